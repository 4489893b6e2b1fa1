"""glu_step: the definition row by row in NumPy, gradients against XLA's, the kernels on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.presets import vittt_glu
from ttt_kernels import compat
from ttt_kernels.glu_step import glu_step, glu_step_beside, mosaic_gpu, mosaic_gpu_plan
from ttt_kernels.glu_step import xla as xla_form

BF16_RMS = 0.01


def make(batch, tokens, heads, dim, dtype=jnp.float32):
    random = np.random.default_rng(0)
    weights = {n: jnp.asarray(random.normal(size=(heads, dim, dim)) / dim**0.5, jnp.float32)
               for n in ("w1", "w2")}  # fmt: skip
    tokens = {n: jnp.asarray(random.normal(size=(batch, tokens, heads, dim)), dtype) for n in "qkv"}
    return weights | tokens


def naive(x, scale, clip):
    """The step of each row and head by itself, in float64; the gradient as a sum over tokens."""
    x = {name: np.asarray(value, np.float64) for name, value in x.items()}
    out = np.zeros_like(x["q"])
    batch, tokens, heads, _ = out.shape
    for b in range(batch):
        for h in range(heads):
            w1, w2 = x["w1"][h], x["w2"][h]
            g1, g2 = np.zeros_like(w1), np.zeros_like(w2)
            for t in range(tokens):
                k, error = x["k"][b, t, h], -scale / tokens * x["v"][b, t, h]
                value, gate = k @ w1, k @ w2
                sigmoid = 1 / (1 + np.exp(-gate))
                g1 += np.outer(k, error * gate * sigmoid)
                g2 += np.outer(k, error * value * sigmoid * (1 + gate * (1 - sigmoid)))
            if clip:
                g1, g2 = (g / (np.linalg.norm(g, axis=0) + 1) for g in (g1, g2))
            value, gate = x["q"][b, :, h] @ (w1 - g1), x["q"][b, :, h] @ (w2 - g2)
            out[b, :, h] = value * gate / (1 + np.exp(-gate))
    return out


@functools.partial(jax.jit, static_argnums=1)
def results(x, function):
    """Outputs and gradients by name, for a random cotangent."""
    error = jnp.asarray(np.random.default_rng(1).normal(size=x["q"].shape), jnp.float32)

    def loss(x):
        out = function(**x)
        return jnp.sum(out * error), out

    gradients, out = jax.grad(loss, has_aux=True)(x)
    return {"out": out} | {f"d_{name}": g for name, g in gradients.items()}


def xla(clip, scale=20.0):
    def function(w1, w2, q, k, v):
        return glu_step({"w1": w1, "w2": w2}, q, k, v, scale=scale, clip=clip, implementation="xla")

    return function


@pytest.mark.parametrize("clip", [True, False])
def test_values_are_the_definition_and_gradients_the_inner_loop_s(clip):
    x = make(2, 10, 3, 8)
    got = results(x, xla(clip))
    assert_close(got["out"], naive(x, 20.0, clip), tolerance(np.float32, 10))
    spec = vittt_glu()
    spec = dataclasses.replace(spec, clip=clip, loss=dataclasses.replace(spec.loss, scale=20.0))
    expected = results(x, lambda w1, w2, q, k, v: ttt(spec, {"w1": w1, "w2": w2}, q, k, v)[0])
    for name, value in expected.items():
        assert_close(got[name], value, tolerance(np.float32, 10), name)


def close_to_bf16(got, expected):
    for name, value in expected.items():
        value, error = np.asarray(value), np.asarray(got[name], np.float32) - np.asarray(value)
        assert np.sqrt(np.mean(error**2) / np.mean(value**2)) < BF16_RMS, name


def interpreted(x, function):
    try:
        return results(x, function)
    except Exception:
        compat.reset_gpu_interpreter()
        raise


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "clip", "blocks"),
    [
        (1, 70, 1, True, 132),
        pytest.param(3, 130, 1, False, 132, marks=pytest.mark.exhaustive),
        pytest.param(5, 70, 2, True, 2, marks=pytest.mark.exhaustive),
    ],
    ids=["a few tokens in the last tile", "a pair without an image", "several images a pair"],
)
def test_the_kernels_in_the_interpreter(monkeypatch, batch, tokens, heads, clip, blocks):
    """With race detection; numbers of tokens that are no multiples of 8."""
    monkeypatch.setattr(mosaic_gpu_plan, "CTAS", blocks)
    x = make(batch, tokens, heads, 64, jnp.bfloat16)

    def kernel(w1, w2, q, k, v):
        return mosaic_gpu.glu_step(w1, w2, q, k, v, 20.0 / tokens, clip, interpret=True)

    expected = results({n: y.astype(jnp.float32) for n, y in x.items()}, xla(clip))
    close_to_bf16(interpreted(x, kernel), expected)


def beside(a, q, k, v):
    return (a * q * jnp.roll(k, 1, axis=1) + v).astype(q.dtype)


def with_others(module, **options):
    """`glu_step_beside` of one head, with one more beside."""

    def function(w1, w2, q, k, v, bias, a):
        qkv = jnp.stack([q, k, v], axis=2)
        return module.glu_step_beside(w1, w2, qkv, bias, beside, a, 0.5, True, **options)

    return function


def one_by_one(w1, w2, q, k, v, bias, a):
    q, k, v = (y + bias[n].astype(y.dtype) for n, y in enumerate((q, k, v)))
    weights, first = {"w1": w1, "w2": w2}, (y[:, :, :1] for y in (q, k, v))
    out = glu_step(weights, *first, scale=0.5 * q.shape[1], implementation="xla")
    return jnp.concatenate([out, beside(a, *(y[:, :, 1:] for y in (q, k, v)))], axis=2)


def make_others(tokens, dtype):
    x = make(1, tokens, 2, 64, dtype)
    x |= {name: x[name][:1] for name in ("w1", "w2")}
    bias = 0.3 * np.random.default_rng(2).normal(size=(3, 2, 64))
    return x | {"a": jnp.linspace(-1, 1, 64), "bias": jnp.asarray(bias, dtype)}


def test_other_heads_beside():
    x = make_others(5, jnp.float32)
    expected, got = results(x, one_by_one), results(x, with_others(xla_form))
    for name, value in expected.items():
        assert_close(got[name], value, tolerance(np.float32, 5), name)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.exhaustive
def test_other_heads_beside_the_kernels_in_the_interpreter():
    x = make_others(70, jnp.bfloat16)
    expected = results({n: y.astype(jnp.float32) for n, y in x.items()}, one_by_one)
    close_to_bf16(interpreted(x, with_others(mosaic_gpu, interpret=True)), expected)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
def test_the_kernels_lower_and_keep_the_inputs_alone():
    shapes = [jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)] * 2
    shapes += [jax.ShapeDtypeStruct((3, 196, 2, 64), jnp.bfloat16)] * 3

    def loss(*arrays):
        return jnp.sum(mosaic_gpu.glu_step(*arrays, 1.0, True), dtype=jnp.float32)

    gradient = jax.jit(jax.grad(loss, argnums=tuple(range(5))))
    text = gradient.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1  # the outputs are not needed
    pullback = jax.eval_shape(lambda *a: jax.vjp(loss, *a)[1], *shapes)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))
    assert kept <= 3 * (3 * 200 * 2 * 64) * 2 + 2 * (2 * 64 * 64) * 4 + 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=None), "k=None must be an array"),
        (dict(q=jnp.ones((1, 3, 2, 8))), "they must be equal"),
        (dict(v=jnp.ones((1, 4, 2, 8), jnp.bfloat16)), "they must be one floating dtype"),
        (dict(weights={"w1": jnp.ones((2, 8, 8))}), "weights=\\['w1'\\] must be a mapping"),
        (dict(weights=None), "weights=NoneType must be a mapping"),
        (dict(weights={"w1": [1.0], "w2": jnp.ones((2, 8, 8))}), "weights\\['w1'\\]=\\[1.0\\]"),
        (dict(weights={n: jnp.ones((2, 8, 4)) for n in ("w1", "w2")}), "must be \\(2, 8, 8\\)"),
        (dict(implementation="cuda"), "implementation='cuda' is unknown"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x = make(1, 4, 2, 8)
    arguments = dict(weights={n: x[n] for n in ("w1", "w2")}, q=x["q"], k=x["k"], v=x["v"])
    with pytest.raises(ValueError, match=message):
        glu_step(**arguments | dict(scale=1.0) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv=jnp.ones((1, 3, 2, 2, 8))), "they must be \\[batch"),
        (dict(bias=jnp.ones((3, 8))), "they must be \\[batch"),
        (dict(bias=None), "bias=None must be an array"),
        (dict(weights={n: jnp.ones((3, 8, 8)) for n in ("w1", "w2")}), "must be \\(2, 8, 8\\)"),
    ],
)
def test_bad_arguments_of_others_are_named(change, message):
    weights = {n: jnp.ones((1, 8, 8)) for n in ("w1", "w2")}
    arguments = dict(weights=weights, qkv=jnp.ones((1, 3, 3, 2, 8)), bias=jnp.ones((3, 2, 8)))
    with pytest.raises(ValueError, match=message):
        glu_step_beside(**arguments | dict(beside=beside, arrays=1.0, scale=1.0) | change)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 4, 2, 64), jnp.float32, "float32"),
        ((1, 4, 2, 32), jnp.bfloat16, "dim=32"),
        ((1, 257, 1, 64), jnp.bfloat16, "257 tokens"),
    ],
)
def test_the_kernel_names_what_it_cannot(shape, dtype, message):
    assert message in mosaic_gpu.unsupported(jax.ShapeDtypeStruct(shape, dtype))
    x = make(*shape, dtype)
    weights = {n: x[n] for n in ("w1", "w2")}
    with pytest.raises(NotImplementedError, match=message):
        glu_step(weights, x["q"], x["k"], x["v"], scale=1.0, implementation="mosaic_gpu")
