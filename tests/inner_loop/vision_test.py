"""ViTTT's block and LaCT-NVS's operator against the official PyTorch code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.golden_cases import Golden
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import Span, fast_nets, losses, presets


def _rotate(x, height, width):
    """Rotary positions over all channels: half of the pairs by row, the others by column."""
    quarter = x.shape[-1] // 4
    speed = 10000.0 ** -(np.arange(quarter) / quarter)
    rows, columns = np.divmod(np.arange(height * width), width)
    angle = np.concatenate([rows[:, None] * speed, columns[:, None] * speed], 1)
    cosine, sine = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.reshape(x.shape)


def _block(case, x, parameters, mode):
    """ViTTT's block around the two inner loops: projections, rotary positions, concatenation."""
    height, width, heads = (case.hyper[n] for n in ("h", "w", "num_heads"))
    channels, narrow = x.shape[-1], case.hyper["head_dim"]
    projected = x @ parameters["qkv.weight"].T + parameters["qkv.bias"]
    cuts = np.cumsum([channels] * 3 + [narrow] * 3)[:-1]
    q1, k1, v1, q2, k2, v2 = jnp.split(projected, cuts, -1)
    if case.hyper["rope"]:
        q1, k1 = _rotate(q1, height, width), _rotate(k1, height, width)
    by_head = [y.reshape(*y.shape[:2], heads, -1) for y in (q1, k1, v1)]
    weights = {n: parameters[n][0] for n in ("w1", "w2")}
    gated, first = ttt_jax.ttt(presets.vittt_glu(), weights, *by_head, mode=mode)
    by_channel = [y[..., None] for y in (q2, k2, v2)]
    kernel = {"w": parameters["w3"].reshape(narrow, 9, 1)}
    spec = presets.vittt_dwconv(height, width)
    local, second = ttt_jax.ttt(spec, kernel, *by_channel, mode=mode)
    joined = jnp.concatenate([gated.reshape(*x.shape[:2], -1), local[..., 0]], -1)
    out = joined @ parameters["proj.weight"].T + parameters["proj.bias"]
    return out, {**first.weights, "w3": second.weights["w"].reshape(-1, narrow, 3, 3)}


@pytest.mark.parametrize("tag", ["f64", "f32"])
@pytest.mark.parametrize(
    "name,mode", [("vittt_ttt_a", "recurrent"), ("vittt_ttt_rect_rope", "parallel")]
)
def test_vittt_block(name, mode, tag):
    """Output, inner weights after the step, gradients of the input and of every parameter."""
    case = Golden(name)
    dtype = {"f64": "float64", "f32": "float32"}[tag]

    def loss(x, parameters):
        out, weights = _block(case, x, parameters, mode)
        return jnp.sum(out * jnp.asarray(case.arrays["cot/out"], dtype)), (out, weights)

    with jax.enable_x64(tag == "f64"):
        x = jnp.asarray(case.arrays["in/x"], dtype)
        parameters = {
            k[6:]: jnp.asarray(y, dtype) for k, y in case.arrays.items() if k[:6] == "param/"
        }
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, (out, weights)), (by_input, by_parameter) = run(x, parameters)
        case.check(f"{tag}/out", out)
        case.check(f"{tag}/grad/x", by_input)
        for n, weight in weights.items():
            case.check(f"f32/{n}_new", weight)
        if tag == "f64":
            for n, gradient in by_parameter.items():
                case.check(f"pgrad/{n}", gradient)


def test_a_frozen_gate_is_a_gated_linear_attention():
    """ViTTT's variant 1 in chunks: parallel = recurrent, with the gate on both sides."""
    spec = dataclasses.replace(
        presets.vittt_glu(), update="last_layer", chunk_size=4, order="apply_then_update"
    )
    assert ttt_jax.explain(spec).parallel
    with jax.enable_x64(True):
        for change in ({}, {"clip": False, "loss": losses.DotProduct()}):
            spec = dataclasses.replace(spec, **change)
            weights, tokens = cases.arguments(spec, time=10, dim=4)
            expected = cases.gradients(spec, weights, tokens)
            modes = ["parallel"] if not change else ["parallel", "kernel"]
            for mode in modes:
                implementation = "xla" if mode == "kernel" else None
                found = cases.gradients(spec, weights, tokens, None, None, mode, implementation)
                pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
                for (leaf, a), (_, b) in pairs:
                    assert_close(a, b, 1e-12, mode + leaf)


def test_convolution_is_jax_convolution():
    """The patches against ``lax.conv_general_dilated`` with one group a channel."""
    net = fast_nets.DepthwiseConv3x3(height=3, width=5)
    x = jax.random.normal(jax.random.key(0), (2, 4, 15, 1))
    w = jax.random.normal(jax.random.key(1), (4, 9, 1))
    expected = jax.lax.conv_general_dilated(
        x.reshape(2, 4, 3, 5), w.reshape(4, 1, 3, 3), (1, 1), "SAME", feature_group_count=4
    )
    assert_close(net.apply({"w": w}, x), expected.reshape(x.shape), 1e-5)


def test_errors_of_images():
    spec = presets.vittt_dwconv(2, 3)
    weights = spec.init(jax.random.key(0), heads=2, key_dim=1)
    x = jnp.ones((1, 6, 2, 1))
    with pytest.raises(ValueError, match="time=5, but an image of 2×3 has 6 tokens"):
        ttt_jax.ttt(spec, weights, x[:, :5], x[:, :5], x[:, :5])
    with pytest.raises(ValueError, match="segment_ids with DepthwiseConv3x3"):
        ttt_jax.ttt(spec, weights, x, x, x, segment_ids=jnp.zeros((1, 6), jnp.int32))
    with pytest.raises(ValueError, match="channels of DepthwiseConv3x3 are heads"):
        spec.init(jax.random.key(0), heads=2, key_dim=3)
    with pytest.raises(ValueError, match="needs all tokens at once"):
        dataclasses.replace(spec, chunk_size=3)


@pytest.mark.parametrize(
    "name,tag",
    [
        ("multichunk_steps0", "f64"),
        ("multichunk_steps5", "f64"),
        ("updthenapply_steps0", "f64"),
        ("updthenapply_steps5", "f64"),
        ("updthenapply_steps5", "f32"),
        ("multichunk_steps0", "f32bf16"),
        pytest.param("multichunk_steps0", "f32", marks=pytest.mark.exhaustive),
        pytest.param("updthenapply_steps5", "f32bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_lact_nvs_preset(name, tag):
    """The preset: an explicit list of spans, Muon steps 0 and 5; final weights and gradients."""
    case = Golden(f"nvs_op_{name}")
    entries = eval(case.hyper["ttt_op_order"].split("=", 1)[1])  # a literal list of tuples
    muon_dtype = "bfloat16" if tag == "f32bf16" else None
    spec = presets.lact_nvs(entries, case.hyper["muon_update_steps"], muon_dtype=muon_dtype)
    assert isinstance(spec.order[0], Span)
    dtype = "float64" if tag == "f64" else "float32"

    def by_token(x):
        return jnp.swapaxes(x, 0, 1)[None]

    def loss(x):
        weights = {n: x[n] for n in ("w0", "w1", "w2")}
        lr = jnp.stack([by_token(x[f"lr{i}"])[..., 0] for i in range(3)], 3)
        out, state = ttt_jax.ttt(spec, weights, *(by_token(x[n]) for n in "qkv"), lr=lr)
        out = jnp.swapaxes(out[0], 0, 1)
        total = jnp.sum(out * case.arrays["cot/out"])
        for n in weights:
            total += jnp.sum(state.weights[n][0] * case.arrays[f"cot/{n}_final"])
        return total, (out, state)

    with jax.enable_x64(tag == "f64"):
        inputs = {k[3:]: jnp.asarray(x, dtype) for k, x in case.arrays.items() if k[:3] == "in/"}
        (_, (out, state)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
        found = {f"{tag}/out": out}
        found |= {f"{tag}/{n}_final": w[0] for n, w in state.weights.items()}
        found |= {f"{tag}/grad/{n}": g for n, g in gradients.items()}
        checked = [key for key in found if case.gated(key)]
        for key in checked:
            case.check(key, found[key])
        assert checked or tag == "f32bf16", name
