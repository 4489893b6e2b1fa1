"""TTT-Linear and TTT-MLP: the official layers, and the dual form against explicit weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.golden_cases import Golden
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import fast_nets, losses, presets


def _rotate(x, period):
    """Rotary positions modulo the mini-batch, neighbouring channels in pairs."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** -(np.arange(half) / half)
    angle = (np.arange(x.shape[1]) % period)[:, None, None] * speed
    cosine, sine = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.reshape(x.shape)


def _causal_convolution(x, weight, bias):
    width = weight.shape[-1]
    padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    taps = [padded[:, j : j + x.shape[1]] * weight[:, 0, j] for j in range(width)]
    return sum(taps) + bias


def _norm(x, scale, shift):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale + shift


def _layer(case, x, p):
    """The official layer around the inner loop."""
    heads, period = case.hyper["num_attention_heads"], case.hyper["mini_batch_size"]
    batch, time, channels = x.shape
    width = channels // heads
    q, v = x @ p["q_proj.weight"].T, x @ p["v_proj.weight"].T
    if case.hyper["share_qk"]:
        k = _causal_convolution(q, p["conv_k.weight"], p["conv_k.bias"])
        q = _causal_convolution(q, p["conv_q.weight"], p["conv_q.bias"])
    else:
        k = x @ p["k_proj.weight"].T
    q, k, v = (y.reshape(batch, time, heads, width) for y in (q, k, v))
    gate = jnp.einsum("btc,hc->bth", x, p["learnable_ttt_lr_weight"][:, 0])
    lr = jax.nn.sigmoid(gate + p["learnable_ttt_lr_bias"][:, 0])
    lr = lr * case.hyper["ttt_base_lr"] / width
    position = jnp.maximum(1 / jnp.arange(1.0, period + 1) + p["learnable_token_idx"], 0)
    weights = {n.lower(): p[n] for n in ("W1", "b1", "W2", "b2") if n in p}
    weights["norm_scale"] = p["ttt_norm_weight"][:, None]
    weights["norm_shift"] = p["ttt_norm_bias"][:, None]
    weights["position_rate"] = jnp.broadcast_to(position[:, None], (heads, period, 1))
    preset = {"linear": presets.ttt_linear, "mlp": presets.ttt_mlp}[case.hyper["ttt_layer_type"]]
    spec = preset(chunk_size=period)
    out, state = ttt_jax.ttt(spec, weights, _rotate(q, period), _rotate(k, period), v, lr=lr)
    out = _norm(out.reshape(x.shape), p["post_norm.weight"], p["post_norm.bias"])
    if case.hyper["use_gate"]:
        out = out * jax.nn.gelu(x @ p["g_proj.weight"].T, approximate=True)
    return out @ p["o_proj.weight"].T, state.weights


@pytest.mark.parametrize("tag", ["f64", "f32"])
@pytest.mark.parametrize("name", ["ttt_linear_L64", "ttt_mlp_gate_shareqk_L56"])
def test_official_layer(name, tag):
    """Output, weights after the last complete mini-batch, gradients of input and parameters."""
    case = Golden(name)
    dtype = {"f64": "float64", "f32": "float32"}[tag]

    def loss(x, p):
        out, weights = _layer(case, x, p)
        return jnp.sum(out * jnp.asarray(case.arrays["cot/out"], dtype)), (out, weights)

    with jax.enable_x64(tag == "f64"):
        x = jnp.asarray(case.arrays["in/x"], dtype)
        p = {k[6:]: jnp.asarray(y, dtype) for k, y in case.arrays.items() if k[:6] == "param/"}
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, (out, weights)), (by_input, by_parameter) = run(x, p)
        case.check(f"{tag}/out", out)
        case.check(f"{tag}/grad/x", by_input)
        if tag == "f64":
            for n, weight in weights.items():
                case.check(f"f64/decode_{n.replace('w', 'W')}_state", weight)
        else:
            case.check("f32/out_primal_decode", out, in_float32=True)
        case.check_parameter_gradients(by_parameter, in_float32=tag == "f32")


SPECS = {
    "ttt_linear": presets.ttt_linear(chunk_size=4),
    "ttt_mlp": presets.ttt_mlp(chunk_size=4),
    "swiglu_ascent": ttt_jax.InnerLoop(
        fast_net=fast_nets.SwiGLU(),
        loss=losses.DotProduct(),
        chunk_size=3,
        order="token_causal",
        rate="per_token",
        direction="ascent",
    ),
}


def _primal(spec, weights, tokens):
    """Token by token, with a matrix of its own for each token; one document, no batch."""
    static = {n: w for n, w in weights.items() if n not in spec.trained}
    sign = 1 if spec.direction == "ascent" else -1
    current = {n: weights[n] for n in spec.trained}
    out = []
    for begin in range(0, tokens["q"].shape[0], spec.chunk_size):
        total = {n: 0 for n in spec.trained}
        for i in range(begin, min(begin + spec.chunk_size, tokens["q"].shape[0])):
            rate = weights["position_rate"][i - begin, 0]

            def loss(w, i=i):
                found = spec.fast_net.apply({**static, **w}, tokens["k"][i : i + 1])
                return jnp.sum(spec.loss.value(found, tokens["v"][i : i + 1]))

            gradients = jax.grad(loss)(current)
            for place, n in enumerate(spec.trained):
                total[n] += tokens["lr"][i, place] * gradients[n]
            own = {n: current[n] + sign * rate * total[n] for n in spec.trained}
            out.append(spec.fast_net.apply({**static, **own}, tokens["q"][i : i + 1])[0])
        if i + 1 - begin == spec.chunk_size:
            current = own
    return jnp.stack(out), current


@pytest.mark.parametrize("name", SPECS)
def test_dual_form_is_the_primal_form(name):
    """Each token's own matrices, by autodiff of the loss, for an unfinished last chunk, too."""
    spec = SPECS[name]
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=7, batch=1, heads=1, dim=4)
        out, state = cases.run(spec, weights, tokens)
        head = {n: w[0] for n, w in weights.items()}
        expected, final = _primal(spec, head, {n: x[0, :, 0] for n, x in tokens.items()})
        assert_close(out[0, :, 0], expected, 1e-12, "out")
        for n, weight in final.items():
            assert_close(state.weights[n][0, 0], weight, 1e-12, n)


@pytest.mark.parametrize(
    "name", ["ttt_linear", pytest.param("swiglu_ascent", marks=pytest.mark.exhaustive)]
)
def test_documents_and_split_calls(name):
    """Packed = alone, split = whole (also token by token inside a chunk), values and gradients."""
    spec = SPECS[name]
    ids = jnp.asarray([[0] * 5 + [1, -1] + [1] * 4 + [2] * 5], jnp.int32)
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=16, batch=1, dim=4)
        out, state = cases.run(spec, weights, tokens, ids)
        assert not np.any(np.asarray(out)[np.asarray(ids) < 0])
        for document in range(3):
            where = np.flatnonzero(np.asarray(ids[0]) == document)
            alone = jax.tree.map(lambda x, where=where: x[:, where], tokens)
            expected, final = cases.run(spec, weights, alone)
            assert_close(out[0, where], expected[0], 1e-12, f"document {document}")
        for (leaf, a), (_, b) in zip(
            cases.named_leaves(state), cases.named_leaves(final), strict=True
        ):
            assert_close(a, b, 1e-12, "state" + leaf)

        expected, final = cases.run(spec, weights, tokens)
        carried, parts = None, []
        for begin, end in ((0, 5), (5, 6), (6, 11), (11, 16)):
            part, carried = cases.run(spec, weights, cases.cut(tokens, begin, end), None, carried)
            parts.append(part)
        assert_close(jnp.concatenate(parts, 1), expected, 1e-12, "split")
        for (leaf, a), (_, b) in zip(
            cases.named_leaves(carried), cases.named_leaves(final), strict=True
        ):
            assert_close(a, b, 1e-12, "carried" + leaf)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"momentum": 0.5}, ["momentum=0.5", "token_causal"]),
        ({"clip": True}, ["clip=True", "token_causal"]),
        ({"chunk_size": None}, ["chunk_size=None", "token_causal"]),
        ({"update": "last_layer"}, ["MLP has no linear last layer"]),
    ],
)
def test_errors_of_the_dual_form(change, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(SPECS["ttt_mlp"], **change)
    assert all(word in str(error.value) for word in words), error.value


def test_explain_names_the_norm():
    found = ttt_jax.explain(SPECS["ttt_mlp"])
    assert not found.reducible and not found.parallel
