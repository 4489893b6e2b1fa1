"""bias_gelu: values and gradients against the definition in float64, the kernels interpreted."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat
from ttt_kernels.bias_gelu import bias_gelu, mosaic_gpu, xla

BF16_RMS = 0.01


def make(rows, features, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(3 * random.normal(size=(rows, features)), dtype)
    return x, jnp.asarray(random.normal(size=features), jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def results(x, bias, function):
    out, pullback = jax.vjp(function, x, bias)
    error = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), x.dtype)
    return dict(zip(("out", "dx", "dbias"), (out, *pullback(error)), strict=True))


def expected(x, bias):
    z = np.asarray(x, np.float64) + np.asarray(bias, np.float64)
    error = np.asarray(jnp.asarray(np.random.default_rng(1).normal(size=x.shape), x.dtype))
    normal = (1 + np.vectorize(math.erf)(z / 2**0.5)) / 2
    slope = normal + z * np.exp(-z * z / 2) / (2 * np.pi) ** 0.5
    dx = error.astype(np.float64) * slope
    return {"out": z * normal, "dx": dx, "dbias": dx.sum(axis=0)}


def test_the_plain_form_is_the_definition():
    x, bias = make(5, 12, jnp.float32)
    got = results(x, bias, xla.bias_gelu)
    for name, value in expected(x, bias).items():
        assert_close(got[name], value, tolerance(jnp.float32, 5), name)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize("rows", [136, pytest.param(36, marks=pytest.mark.exhaustive)])
def test_the_kernels_in_the_interpreter(rows, monkeypatch, capfd):
    """With race detection; shares of uneven size, two blocks of columns."""
    jax.clear_caches()  # of programs that were made with other numbers
    x, bias = make(rows, 128, jnp.bfloat16)
    monkeypatch.setattr(mosaic_gpu, "MAX_COLUMNS", 64)
    monkeypatch.setattr(mosaic_gpu, "THREAD_BLOCKS", 4)
    try:
        got = results(x, bias, functools.partial(mosaic_gpu.bias_gelu, interpret=True))
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    assert "RACE" not in "".join(capfd.readouterr())
    for name, value in expected(x, bias).items():
        error = np.asarray(got[name], np.float64) - value
        assert np.sqrt(np.mean(error**2) / np.mean(value**2)) < BF16_RMS, name


def test_the_kernels_normal_distribution():
    z = np.linspace(-40, 40, 8001, dtype=np.float32)
    normal, density = jax.jit(lambda z: (mosaic_gpu._normal(z), mosaic_gpu._density(z)))(z)
    z = z.astype(np.float64)
    exact = (1 + np.vectorize(math.erf)(z / 2**0.5)) / 2
    assert np.abs(normal - exact).max() < 4e-7
    assert np.abs(density - np.exp(-(z**2) / 2) / (2 * np.pi) ** 0.5).max() < 1e-6
    inside = np.abs(z) < 3  # where also the tail keeps more digits than bfloat16
    assert np.abs(normal / exact - 1)[inside].max() < 1e-4


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize(
    ("rows", "features"), [(16, 3072), pytest.param(4, 384, marks=pytest.mark.exhaustive)]
)
def test_the_kernels_lower(rows, features):
    traced = results.trace(*make(rows, features, jnp.bfloat16), mosaic_gpu.bias_gelu)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=[1.0]), "x=\\[1.0\\] must be an array"),
        (dict(bias=jnp.ones(6, int)), "bias has dtype int32; it must be a float"),
        (dict(x=jnp.ones(6)), "x has shape \\(6,\\)"),
        (dict(bias=jnp.ones(5)), "bias has shape \\(5,\\); it must be \\(6,\\)"),
        (dict(implementation="cuda"), "implementation='cuda' is unknown"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x, bias = make(2, 6, jnp.float32)
    with pytest.raises(ValueError, match=message):
        bias_gelu(**dict(x=x, bias=bias) | change)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((8, 128), jnp.float32, "float32"),
        ((9, 128), jnp.bfloat16, "9 rows"),
        ((8, 96), jnp.bfloat16, "96 features"),
    ],
)
def test_the_kernel_names_what_it_cannot(shape, dtype, message):
    x = jnp.ones(shape, dtype)
    assert message in mosaic_gpu.unsupported(x)
    with pytest.raises(NotImplementedError, match=message):
        bias_gelu(x, jnp.ones(shape[1]), implementation="mosaic_gpu")
