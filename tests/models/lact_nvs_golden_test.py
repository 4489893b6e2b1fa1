"""LaCT-NVS, layer and model in one pass and in two stages, against the official code's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.golden_cases import Golden
from tests.models.official import params_of
from ttt_jax.convert import lact_nvs
from ttt_jax.convert.tables import to_official
from ttt_jax.inner_loop.spec import Span
from ttt_jax.layers.scheduled_ttt import ScheduledTTT
from ttt_jax.models.decoder import stack_layers, unstack_layers
from ttt_jax.models.lact_nvs import Cameras, LactNVS, LactNVSConfig


def _params(case):
    return {k.removeprefix("param/"): v for k, v in case.arrays.items() if k[:6] == "param/"}


def _check(case, key, value, dtype):
    """The stored tolerance; a parameter gradient of float32 code has one of its own."""
    tol = case.tolerances(key)
    suffix = "_if_f32" if dtype == "float32" else ""
    expected, value = np.asarray(case.arrays[key], np.float64), np.asarray(value, np.float64)
    assert value.shape == expected.shape, (key, value.shape)
    if "rel_to_norm" in tol:
        limit = tol["rel_to_norm" + suffix] * (expected[0] + np.abs(expected))
        assert np.all(np.abs(value - expected) <= limit), (key, value, expected)
    else:
        limit = tol.get("rel_to_max" + suffix, tol["rel_to_max"])
        error = np.max(np.abs(value - expected)) / np.max(np.abs(expected))
        assert error <= limit, (key, error, limit)


def _statistics(gradient):
    flat = np.asarray(gradient, np.float64).ravel()
    return np.array([np.linalg.norm(flat), flat.sum(), flat @ np.cos(0.37 * np.arange(flat.size))])


def _check_gradients(case, prefix, gradients, dtype):
    """In float64 all; in float32 those that are stored whole.

    The stored sums are not gated in float32: that over the six entries of a rate's bias cancels,
    and the rounding of five Newton-Schulz steps moves it by 1.0 to 1.6 times the stated tolerance.
    """
    kinds = ("pgrad", "pgradstat") if dtype == "float64" else ("pgrad",)
    keys = [k for kind in kinds for k in case.arrays if k.startswith(f"{prefix}/{kind}/")]
    assert keys and (dtype == "float32" or len(keys) >= len(gradients))
    for key in keys:
        gradient = gradients[key.split("/", 2)[2]]
        value = _statistics(gradient) if "pgradstat" in key else gradient
        _check(case, key, value, dtype)


@pytest.mark.parametrize(
    ("name", "steps", "tag"),
    [
        ("nvs_layer_a", 5, "f64"),
        ("nvs_layer_a", 0, "f32bf16"),
        ("nvs_layer_b", 5, "f64"),
        pytest.param("nvs_layer_a", 0, "f64", marks=pytest.mark.exhaustive),
        pytest.param("nvs_layer_a", 5, "f32", marks=pytest.mark.exhaustive),
    ],
)
def test_layer_equals_the_official_one(name, steps, tag):
    case = Golden(name)
    dtype = "float64" if tag == "f64" else "float32"
    size, heads = case.hyper["dim"], case.hyper["heads"]
    spans = {
        "nvs_layer_a": [Span(0, 16, True, False), Span(0, 24, False, True)],
        "nvs_layer_b": [Span(0, 24, True, False), Span(0, 24, False, True)],
    }[name]
    config = LactNVSConfig(
        hidden_size=size,
        num_layers=1,
        num_attention_heads=1,
        newton_schulz_steps=steps,
        newton_schulz_dtype="bfloat16" if tag == "f32bf16" else None,
    )

    def make():
        return ScheduledTTT(
            size,
            heads,
            config.inner_loop(spans),
            hidden_multiple=case.hyper["inter_multi"],
            base_rate=case.hyper["base_lr"],
            stddev=0.02,
            out_stddev=0.02,
            dtype=dtype,
            rngs=nnx.Rngs(0),
        )

    with jax.enable_x64(tag == "f64"):
        layer = nnx.eval_shape(make)
        table = lact_nvs.layer_table(size, heads)
        params = params_of(layer, table, _params(case), dtype)
        x = jnp.asarray(case.arrays["in/x"], dtype)

        def loss(params, x):
            out, state = nnx.merge(nnx.graphdef(layer), params)(x, spans)
            return jnp.sum(out * case.arrays["cot/out"]), (out, state)

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, (out, state)), (gradients, by_input) = run(params, x)
        assert out.dtype == dtype
        prefix = f"steps{steps}"
        _check(case, f"{prefix}/{tag}/out", out, "float64")
        if tag == "f32bf16":
            return
        _check(case, f"{prefix}/{tag}/grad/x", by_input, "float64")
        for matrix, value in state.weights.items():
            _check(case, f"{prefix}/f32/{matrix}_state", value.reshape(-1, *value.shape[2:]), dtype)
        _check_gradients(case, prefix, to_official(table, gradients), dtype)


@pytest.mark.parametrize(
    ("steps", "tag"),
    [
        (5, "f64"),
        pytest.param(5, "f32", marks=pytest.mark.exhaustive),
        pytest.param(0, "f64", marks=pytest.mark.exhaustive),
        pytest.param(0, "f32bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_model_equals_the_official_one_in_one_pass_and_in_two_stages(steps, tag):
    case = Golden("nvs_model_a")
    hyper = case.hyper
    dtype = "float64" if tag == "f64" else "float32"
    config = LactNVSConfig(
        hidden_size=hyper["dim"],
        num_layers=hyper["layers"],
        num_attention_heads=hyper["dim"] // hyper["attn_head_dim"],
        num_fast_heads=hyper["dim"] // hyper["fw_head_dim"],
        patch_size=hyper["patch_size"],
        fast_hidden_multiple=hyper["inter_multi"],
        mlp_multiple=hyper["mlp_inter_multi"],
        newton_schulz_steps=steps,
        newton_schulz_dtype="bfloat16" if tag == "f32bf16" else None,
        dtype=dtype,
        scan_layers=False,
    )
    with jax.enable_x64(tag == "f64"):
        model = nnx.eval_shape(lambda: LactNVS(config, nnx.Rngs(0)))
        table = lact_nvs.table(config)
        params = stack_layers(params_of(model, table, _params(case), dtype))
        scanned = nnx.eval_shape(
            lambda: LactNVS(dataclasses.replace(config, scan_layers=True), nnx.Rngs(0))
        )
        given = {k: jnp.asarray(v, dtype) for k, v in case.arrays.items() if k[:3] == "in/"}
        images = jnp.moveaxis(given["in/image"], 2, -1)
        cameras = Cameras(given["in/fxfycxcy_in"], given["in/c2w_in"])
        targets = Cameras(given["in/fxfycxcy_tgt"], given["in/c2w_tgt"])
        cotangent = np.moveaxis(case.arrays["cot/target"], 2, -1)

        def loss(params):
            runner = nnx.merge(nnx.graphdef(scanned), params)
            out = runner(images, cameras, targets)
            states = runner.reconstruct(images, cameras)
            staged = runner.render(states, targets, *images.shape[2:4])
            return jnp.sum(out * cotangent), (out, staged, states)

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, (out, staged, states)), gradients = run(params)
        prefix = f"steps{steps}"
        for value in (out, staged):
            assert value.dtype == dtype
            _check(case, f"{prefix}/{tag}/target", np.moveaxis(value, -1, 2), "float64")
        if tag == "f32bf16":
            return
        if steps == 5:
            for matrix, values in states.weights.items():
                for index, value in enumerate(values):
                    value = value.reshape(-1, *value.shape[2:])
                    _check(case, f"steps5/f32/state/{index}/{matrix}", value, dtype)
            _check(case, "steps5/f32/rendering", np.moveaxis(staged, -1, 2), dtype)
        gradients = to_official(table, unstack_layers(gradients))
        _check_gradients(case, prefix, gradients, dtype)
