"""The layer and the language model against numbers of the official LaCT code."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.official import params_of
from ttt_jax.convert import lact_llm
from ttt_jax.convert.tables import to_official
from ttt_jax.layers.mixers import TokenInfo
from ttt_jax.layers.rotary import rotary_tables
from ttt_jax.models import LactLLM, LactLLMConfig, build

GOLDEN = Path(__file__).parent.parent / "golden"
LAYERS = ("post_gd_S64", "pre_muon_S72", "post_muon_lowrank_nope_S72")
DTYPES = ("float32", "float64")


def _load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    meta = json.loads((GOLDEN / f"{name}.json").read_text())
    params = {k.removeprefix("param/"): v for k, v in arrays.items() if k.startswith("param/")}
    return arrays, meta, params


def _config(hyper, dtype, **overrides):
    return LactLLMConfig(**lact_llm.config_fields(hyper) | dict(dtype=dtype) | overrides)


def _check(name, value, reference, tolerances, dtype):
    """The stored tolerance of one array, by its stated metric."""
    suffix = "_if_f32" if dtype == "float32" else ""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if "rel_to_norm" in tolerances:
        limit = tolerances["rel_to_norm" + suffix] * (reference[0] + np.abs(reference))
        assert np.all(np.abs(value - reference) <= limit), (name, value, reference)
    else:
        limit = tolerances.get("rel_to_max" + suffix, tolerances["rel_to_max"])
        error = np.max(np.abs(value - reference)) / np.max(np.abs(reference))
        assert error <= limit, (name, error, limit)


def _statistics(gradient):
    flat = np.asarray(gradient, np.float64).ravel()
    return np.array([np.linalg.norm(flat), flat.sum(), flat @ np.cos(0.37 * np.arange(flat.size))])


def _check_gradients(gradients, arrays, meta, dtype):
    checked = 0
    for key in arrays:
        if key.startswith("pgrad/"):
            value = gradients[key.removeprefix("pgrad/")]
        elif key.startswith("pgradstat/"):
            value = _statistics(gradients[key.removeprefix("pgradstat/")])
            checked += 1
        else:
            continue
        _check(key, value, arrays[key], meta["arrays"][key]["tol"], dtype)
    assert checked == len(gradients)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in LAYERS), ("pre_muon_S72", "float32")]
)
def test_layer_equals_the_official_one(case, dtype):
    arrays, meta, params = _load(f"lact_layer_{case}")
    with jax.enable_x64(dtype == "float64"):
        config = _config(meta["hyper"], dtype, mode="recurrent")
        layer = nnx.eval_shape(lambda: LactLLM.make_mixer(config, nnx.Rngs(0)))
        table = lact_llm.layer_table(config.num_fast_heads)
        state = params_of(layer, table, params, dtype)
        x = jnp.asarray(arrays["in/x"], dtype)
        positions = jnp.arange(x.shape[1])[None]
        head_dim = config.hidden_size // config.num_attention_heads
        info = TokenInfo(rotary_tables(positions, head_dim, config.rope_theta, dtype))

        def loss(state, x):
            out, _ = nnx.merge(nnx.graphdef(layer), state)(x, info)
            return jnp.sum(out * arrays["cot/out"]), out

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), (gradients, x_gradient) = run(state, x)
        tag = "f32" if dtype == "float32" else "f64"
        for key, value in (("out", out), ("grad/x", x_gradient)):
            assert value.dtype == dtype
            key = f"{tag}/{key}"
            _check(key, value, arrays[key], meta["arrays"][key]["tol"], "float64")
        _check_gradients(to_official(table, gradients), arrays, meta, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_language_model_equals_the_official_one(dtype):
    arrays, meta, params = _load("lact_lm_a")
    with jax.enable_x64(dtype == "float64"):
        config = _config(meta["hyper"], dtype, scan_layers=False, mode="recurrent")
        model = nnx.eval_shape(lambda: build(config))
        table = lact_llm.table(config)
        state = params_of(model, table, params, dtype)
        tokens = jnp.asarray(arrays["in/input_ids"], jnp.int32)
        labels = arrays["in/labels"][:, 1:]
        weights = labels != -100

        def loss(state):
            logits = nnx.merge(nnx.graphdef(model), state)(tokens)
            log_probabilities = jax.nn.log_softmax(logits[:, :-1])
            chosen = jnp.take_along_axis(
                log_probabilities, np.where(weights, labels, 0)[..., None], axis=-1
            )[..., 0]
            return -jnp.sum(chosen * weights) / weights.sum(), logits

        (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
        tag = "f32" if dtype == "float32" else "f64"
        for key, result in (("loss", value), ("logits", logits)):
            assert result.dtype == dtype
            key = f"{tag}/{key}"
            _check(key, result, arrays[key], meta["arrays"][key]["tol"], "float64")
        _check_gradients(to_official(table, gradients), arrays, meta, dtype)
