"""The layer and the language model against numbers of the official LaCT code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.golden_cases import Golden
from tests.models.official import params_of
from ttt_jax.convert import lact_llm
from ttt_jax.convert.tables import to_official
from ttt_jax.layers.mixers import TokenInfo
from ttt_jax.layers.rotary import rotary_tables
from ttt_jax.models import LactLLM, LactLLMConfig, build

LAYERS = ("post_gd_S64", "pre_muon_S72", "post_muon_lowrank_nope_S72")
DTYPES = ("float32", "float64")


def _params(case):
    return {k.removeprefix("param/"): v for k, v in case.arrays.items() if k.startswith("param/")}


def _config(hyper, dtype, **overrides):
    return LactLLMConfig(**lact_llm.config_fields(hyper) | dict(dtype=dtype) | overrides)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in LAYERS), ("pre_muon_S72", "float32")]
)
def test_layer_equals_the_official_one(case, dtype):
    golden = Golden(f"lact_layer_{case}")
    arrays, params = golden.arrays, _params(golden)
    with jax.enable_x64(dtype == "float64"):
        config = _config(golden.hyper, dtype, mode="recurrent")
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
            golden.check(f"{tag}/{key}", value)
        gradients = to_official(table, gradients)
        golden.check_parameter_gradients(gradients, in_float32=dtype == "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_language_model_equals_the_official_one(dtype):
    golden = Golden("lact_lm_a")
    arrays, params = golden.arrays, _params(golden)
    with jax.enable_x64(dtype == "float64"):
        config = _config(golden.hyper, dtype, scan_layers=False, mode="recurrent")
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
            golden.check(f"{tag}/{key}", result)
        gradients = to_official(table, gradients)
        golden.check_parameter_gradients(gradients, in_float32=dtype == "float32")
