"""ViTTT and H-ViTTT against numbers of the official code: logits and every gradient."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.golden_cases import Golden
from tests.models.official import params_of
from tests.tolerances import assert_close
from ttt_jax.convert import vittt
from ttt_jax.convert.tables import to_official
from ttt_jax.models import HViTTTConfig, ViTTTConfig, build
from ttt_jax.models.decoder import stack_layers


def _config(case, dtype):
    """Our configuration of a case."""
    hyper = case.hyper
    common = dict(
        num_classes=hyper["num_classes"],
        image_size=hyper["img_size"],
        mlp_ratio=hyper["mlp_ratio"],
        dtype=dtype,
        scan_layers=False,
    )
    if case.name.startswith("h_"):
        return HViTTTConfig(
            widths=tuple(hyper["dim"]),
            depths=tuple(hyper["depths"]),
            heads=tuple(hyper["num_heads"]),
            **common,
        )
    return ViTTTConfig(
        patch_size=hyper["patch_size"],
        hidden_size=hyper["embed_dim"],
        num_layers=hyper["depth"],
        num_heads=hyper["num_heads"],
        **common,
    )


def _loaded(case, dtype):
    config = _config(case, dtype)
    abstract = nnx.eval_shape(lambda: build(config))
    keys = {k: k.split("/", 1)[1] for k in case.arrays if k.startswith(("param/", "buffer/"))}
    arrays = {name: case.arrays[key] for key, name in keys.items()}
    table, (graphdef, state) = vittt.table(config), nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params_of(abstract, table, arrays, dtype))
    return graphdef, state, table


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("vittt_model_a", "float64"),
        pytest.param("vittt_model_a", "float32", marks=pytest.mark.exhaustive),
        ("h_vittt_model_a", "float64"),
        pytest.param("h_vittt_model_a", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_model_equals_the_official_one(name, dtype):
    case = Golden(name)
    tag = {"float64": "f64", "float32": "f32"}[dtype]
    with jax.enable_x64(dtype == "float64"):
        graphdef, state, table = _loaded(case, dtype)
        images = jnp.asarray(case.arrays["in/img"].transpose(0, 2, 3, 1), dtype)
        params, buffers = nnx.split_state(state, nnx.Param, ...)

        def loss(params, images):
            logits = nnx.merge(graphdef, params, buffers)(images)
            return jnp.sum(logits * case.arrays["cot/out"]), logits

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, logits), (by_param, by_image) = run(params, images)
        assert logits.dtype == dtype
        case.check(f"{tag}/out", logits)
        case.check(f"{tag}/grad/img", by_image.transpose(0, 3, 1, 2))
        found = to_official(table, nnx.to_pure_dict(by_param))
        case.check_parameter_gradients(found, in_float32=dtype == "float32")
        if name == "vittt_model_a" and dtype == "float64":
            _check_scanned(case, state, images, logits)


def _check_scanned(case, state, images, logits):
    """The stacked form of the same parameters gives the same logits."""
    config = _config(case, "float64")
    config.scan_layers = True
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build(config)))
    tree = nnx.to_pure_dict(state)
    nnx.replace_by_pure_dict(abstract, tree | {"blocks": stack_layers(tree["blocks"])})
    scanned = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(abstract, images)
    assert_close(scanned, logits, 1e-12)
