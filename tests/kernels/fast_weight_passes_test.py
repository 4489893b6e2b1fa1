"""The kernels between the fast weight's products, against autodiff of the definition."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttt_kernels import compat
from ttt_kernels.fast_weight import fast_weight_apply, mosaic_gpu
from ttt_kernels.fast_weight import mosaic_gpu_passes as passes

BF16_RMS = 0.01
needs_layouts = pytest.mark.skipif(
    compat.layout_problem() is not None, reason="the kernels need jax >= 0.11"
)


def make(rows=8, hidden=128):
    random = np.random.default_rng(0)

    def draw(width, dtype=jnp.bfloat16):
        return jnp.asarray(random.normal(size=(2, 1, rows, width)), dtype)

    return draw(2 * hidden), draw(hidden), draw(3, jnp.float32)


def plain_hidden(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return gate / (1 + jnp.exp(-gate)) * up


def plain_errors(gate_up, error, rates):
    """Gradients of Σ error hidden by autodiff."""
    gradient = jax.grad(lambda x: jnp.sum(error * plain_hidden(x)))(gate_up)
    wide = jnp.repeat(rates[..., ::2], error.shape[-1], axis=-1)
    return plain_hidden(gate_up) * rates[..., 1:2], gradient * wide


@functools.partial(jax.jit, static_argnums=0)
def results(function, *arrays):
    out, pullback = jax.vjp(function, *arrays)
    random = np.random.default_rng(1)
    errors = jax.tree.map(lambda y: jnp.asarray(random.normal(size=y.shape), y.dtype), out)
    return jax.tree.leaves((out, pullback(errors)))


@needs_layouts
@pytest.mark.parametrize("name", ["hidden", "errors"])
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [(6, 512), pytest.param(2, 128, marks=pytest.mark.exhaustive),
     pytest.param(22, 1152, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_the_kernels_in_the_interpreter(name, rows, hidden, capfd):
    """With race detection."""
    kernel, plain = {
        "hidden": (passes.hidden, plain_hidden), "errors": (passes.errors, plain_errors)
    }[name]  # fmt: skip
    arrays = make(rows, hidden)[: 1 if name == "hidden" else 3]
    params = compat.gpu_interpret_params()
    try:
        found = results(functools.partial(kernel, interpret=params), *arrays)
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    assert "RACE" not in "".join(capfd.readouterr())
    wide = [x.astype(jnp.float32) for x in arrays]
    for got, want in zip(found, results(plain, *wide), strict=True):
        error = np.asarray(got, np.float64) - np.asarray(want)
        assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)) < BF16_RMS, got.shape


@needs_layouts
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [(8192, 1536)]
    + [
        pytest.param(*sizes, marks=pytest.mark.exhaustive)
        for sizes in ((16384, 1536), (2, 128), (6, 1024), (1588, 1152), (8, 4096))
    ],
)
def test_the_kernels_lower(rows, hidden):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make(rows, hidden)]
    for function, given in ((passes.errors, arrays), (passes.hidden, arrays[:1])):
        text = results.trace(function, *given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2


@needs_layouts
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((8, 512), jnp.float32, "float32"),
        ((5, 512), jnp.bfloat16, "5 tokens"),
        ((8, 448), jnp.bfloat16, "448 is above 384, and .* of 128"),
    ],
)
def test_what_they_cannot(shape, dtype, message):
    time, hidden = shape
    x, w = jnp.ones((1, 1, time, 8), dtype), jnp.ones((1, 1, 8, hidden), dtype)
    assert re.search(message, mosaic_gpu.unsupported(w, x, 8))
    weights = {"w0": w, "w1": w.mT, "w2": w}
    with pytest.raises(NotImplementedError, match="implementation='mosaic_gpu' cannot run here"):
        fast_weight_apply(weights, x, implementation="mosaic_gpu")
    fast_weight_apply(weights, x)  # None takes another form
