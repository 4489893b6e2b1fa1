"""The kernels between the fast weight's products, against autodiff of the definition."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttt_kernels.fast_weight import fast_weight_apply, triton

BF16_RMS = 0.01


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


@pytest.mark.parametrize("name", ["hidden", "errors"])
def test_the_kernels_in_the_interpreter(name):
    """Two steps of columns."""
    kernel, plain = {
        "hidden": (triton.hidden, plain_hidden), "errors": (triton.errors, plain_errors)
    }[name]  # fmt: skip
    arrays = make(hidden=192 if name == "errors" else 128)[: 1 if name == "hidden" else 3]
    wide = [x.astype(jnp.float32) for x in arrays]
    found = results(functools.partial(kernel, interpret=True), *arrays)
    for got, want in zip(found, results(plain, *wide), strict=True):
        error = np.asarray(got, np.float64) - np.asarray(want)
        assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)) < BF16_RMS, got.shape


def test_the_kernels_lower():
    arrays = make(hidden=1536)
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    for function, given, count in ((triton.errors, arrays, 2), (triton.hidden, arrays[:1], 1)):
        with jax.sharding.use_abstract_mesh(mesh):
            text = results.trace(function, *given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @__gpu$xla.gpu.triton") == count


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((8, 128), jnp.float32, "float32"),
        ((5, 128), jnp.bfloat16, "5 tokens"),
        ((8, 96), jnp.bfloat16, "hidden width of 96"),
    ],
)
def test_what_they_cannot(shape, dtype, message):
    time, hidden = shape
    x, w = jnp.ones((1, 1, time, 8), dtype), jnp.ones((1, 1, 8, hidden), dtype)
    assert re.search(message, triton.unsupported(hidden, x))
    weights = {"w0": w, "w1": w.mT, "w2": w}
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot run here"):
        fast_weight_apply(weights, x, implementation="triton")
    fast_weight_apply(weights, x)  # None takes another form
