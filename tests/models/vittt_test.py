"""ViTTT, H-ViTTT and their softmax baseline: sizes, variants, training and evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.matmul_count import matmul_flops
from tests.tolerances import assert_close, tolerance
from ttt_jax.models import HViTTTConfig, ViTConfig, ViTTTConfig, build, h_vittt, vit, vittt
from ttt_jax.models.decoder import unstack_layers
from ttt_jax.models.vision import count_params

_SMALL = dict(
    num_classes=5, image_size=8, patch_size=2, hidden_size=16, num_layers=2, num_heads=2,
    initializer_range=0.3,
)  # fmt: skip
_STAGE = dict(num_classes=5, image_size=8, widths=(8,), depths=(1,), heads=(2,))


@functools.partial(jax.jit, static_argnums=0)
def _model(config, seed=0):
    # The default generator takes two seconds to compile for so many parameters.
    return build(config, nnx.Rngs(jax.random.key(seed, impl="rbg")))


_forward = jax.jit(lambda model, images: model(images))


def _images(batch, height, width, dtype="float32"):
    return jax.random.normal(jax.random.key(7), (batch, height, width, 3), dtype)


@pytest.mark.parametrize(
    "module, name, count",
    [
        (vittt, "t", 6_149_416),
        pytest.param(vittt, "s", 23_799_400, marks=pytest.mark.exhaustive),
        (vittt, "b", 90_055_912),
        (h_vittt, "t", 28_703_560),
        pytest.param(h_vittt, "s", 54_362_056, marks=pytest.mark.exhaustive),
        pytest.param(h_vittt, "b", 94_369_304, marks=pytest.mark.exhaustive),
        (vit, "b", 86_567_656 - 768 - 197 * 768 + 12 * 10 * 768),
    ],
)
def test_sizes(module, name, count):
    """The counts of the official modules; the baseline is ViT-B with other positions.

    timm's ViT-B/16 has 86,567,656 parameters: with a class token and 197 positions, without the
    twelve convolutions.
    """
    model = nnx.eval_shape(lambda: build(module.preset(name)))
    assert count_params(model) == count == model.num_params()


@pytest.mark.parametrize(
    "config",
    [ViTTTConfig(**_SMALL), ViTTTConfig(**_SMALL, variant=1), ViTConfig(**_SMALL)],
    ids=["V0", "V1", "softmax"],
)
def test_flops_are_those_of_the_traced_program(config):
    model = nnx.eval_shape(lambda: build(config))
    graphdef, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((3, 8, 8, 3), jnp.float32)
    counted = matmul_flops(lambda s, x: nnx.merge(graphdef, s)(x), state, images)
    assert counted == 3 * model.flops_per_image()


_VARIANTS = [
    (0, "float32"),
    *(pytest.param(*case, marks=pytest.mark.exhaustive)
      for case in [(1, "float32"), (2, "float32"), (3, "float32"), (4, "float32"), (5, "float32"),
                   (6, "float32"), (0, "bfloat16"), (6, "bfloat16")]),
]  # fmt: skip


@pytest.mark.parametrize("variant, dtype", _VARIANTS)
def test_every_variant_has_finite_gradients_of_all_its_parameters(variant, dtype):
    config = ViTTTConfig(**_SMALL, variant=variant, dtype=dtype)
    graphdef, state = nnx.split(_model(config))

    @jax.jit
    def gradients_at(state, images):
        def loss(state):
            logits = nnx.merge(graphdef, state)(images)
            assert logits.dtype == jnp.float32
            return jnp.sum(jnp.square(logits - 1))

        return jax.grad(loss)(state)

    gradients = nnx.to_pure_dict(gradients_at(state, _images(2, 8, 8)))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)) and np.any(gradient), path
    fast = set(gradients["blocks"]["layers"]["mixer"]["gated"])
    assert fast == ({"w1", "w2"} if variant < 3 else {"w"})
    # Black images and no biases: every key, value, inner gradient and norm is zero.
    zero = gradients_at(jax.tree.map(jnp.zeros_like, state), jnp.zeros((2, 8, 8, 3)))
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(zero))


@pytest.mark.parametrize("query", ["query", "key"])
def test_the_gated_branch_beside_the_other_is_both_by_themselves(query):
    """What runs where the gated branch is one kernel, here by its plain form."""
    images, outputs = _images(2, 8, 8), {}
    for mode in ("kernel", "parallel"):
        config = ViTTTConfig(**_SMALL | dict(mode=mode, query=query))
        outputs[mode] = _forward(_model(config), images)
    assert_close(outputs["kernel"], outputs["parallel"], tolerance(jnp.float32, 64))


def test_images_do_not_see_each_other_and_may_be_rectangles():
    model = _model(ViTTTConfig(**_SMALL))
    images = _images(4, 6, 10)
    together = _forward(model, images)
    alone = jnp.concatenate([_forward(model, images[i : i + 1]) for i in range(4)])
    assert_close(alone, together, tolerance(jnp.float32, 16))
    with pytest.raises(ValueError, match=r"multiples of patch_size=2"):
        model(_images(1, 7, 8))


def test_stochastic_depth_and_recomputation():
    """Without a rate training is evaluation; with one, rows differ by key, and the layers' form
    and recomputation change nothing."""
    images = jnp.broadcast_to(_images(1, 8, 8), (16, 8, 8, 3))
    train = jax.jit(lambda model, seed: model(images, key=jax.random.key(seed)))
    plain = _model(ViTTTConfig(**_SMALL))
    assert_close(train(plain, 0), _forward(plain, images), 1e-6)
    deep = _model(ViTTTConfig(**_SMALL, drop_path_rate=0.5, remat="full"))
    first, second = train(deep, 0), train(deep, 1)
    assert len({tuple(row) for row in np.asarray(first).round(4).tolist()}) > 1
    assert not np.allclose(first, second)
    config = ViTTTConfig(**_SMALL, drop_path_rate=0.5, scan_layers=False)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config)))
    params = nnx.to_pure_dict(nnx.state(deep))
    nnx.replace_by_pure_dict(state, params | {"blocks": unstack_layers(params["blocks"])})
    assert_close(train(nnx.merge(graphdef, state), 0), first, tolerance(jnp.float32, 16))


def test_h_vittt_records_running_statistics_in_training_only():
    """Means and unbiased variances of the batch, a tenth of the way a step."""
    config = HViTTTConfig(**_STAGE)
    images = _images(6, 8, 8)
    graphdef, params, buffers = nnx.split(_model(config), nnx.Param, nnx.BatchStat)

    @functools.partial(jax.jit, static_argnums=2)
    def run(buffers, images, train):
        model = nnx.merge(graphdef, params, buffers)
        logits = model(images, key=jax.random.key(0) if train else None)
        return logits, nnx.state(model, nnx.BatchStat), model.stem.convs[0](images)

    logits, after, first = run(buffers, images, True)
    values = np.asarray(first, np.float64).reshape(-1, first.shape[-1])
    norm = after["stem"]["norms"][0]
    assert_close(norm["mean"][...], 0.1 * values.mean(0), 1e-5)
    assert_close(norm["variance"][...], 0.9 + 0.1 * values.var(0, ddof=1), 1e-5)
    evaluated, unchanged, _ = run(buffers, images, False)
    assert not np.allclose(evaluated, logits)
    for a, b in zip(jax.tree.leaves(unchanged), jax.tree.leaves(buffers), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="multiples of 4"):
        nnx.merge(graphdef, params, buffers)(images[:, :6])


@pytest.mark.parametrize(
    "config, message",
    [
        (ViTTTConfig(image_size=30, patch_size=4), "image_size=30 must be a multiple of patch_siz"),
        (ViTTTConfig(variant=7), "variant=7"),
        (ViTTTConfig(mode="kernel", variant=1), "mode='kernel' with variant=1"),
        (ViTTTConfig(drop_path_rate=1.0), "drop_path_rate=1.0"),
        (ViTTTConfig(num_heads=7), "num_heads=7 must divide"),
        (ViTTTConfig(direction="up"), "direction='up'"),
        (HViTTTConfig(image_size=20), r"image_size=20 must be a multiple of 4·2³"),
        (HViTTTConfig(depths=(1, 2)), r"depths=\(1, 2\)"),
        (HViTTTConfig(heads=(2, 4, 7, 16)), "width 320, depth 9 and 7 heads"),
        (ViTConfig(attention_implementation="fast"), "attention_implementation='fast'"),
    ],
)
def test_bad_configurations_name_the_field(config, message):
    with pytest.raises(ValueError, match=message):
        build(config)
