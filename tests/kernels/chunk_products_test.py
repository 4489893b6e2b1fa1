"""One battery for all implementations of the chunk products: values and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import chunk_outputs, chunk_summaries

CASES = [
    # batch, time, heads, key_dim, value_dim, chunk_size
    (2, 23, 3, 5, 4, 7),
    (1, 12, 2, 4, 6, 12),
    (1, 1, 1, 2, 3, 4),
]


def make(case, dtype, seed=0):
    """Random q, k, v, states and cotangents of both results."""
    batch, time, heads, key_dim, value_dim, chunk_size = case
    rng = np.random.default_rng(seed)
    tokens, chunks = (batch, time, heads), -(-time // chunk_size)
    shapes = dict(
        q=(*tokens, key_dim), k=(*tokens, key_dim), v=(*tokens, value_dim),
        states=(batch, heads, chunks, key_dim, value_dim),
    )
    made = {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items()}
    made["d_out"] = jnp.asarray(rng.standard_normal((*tokens, value_dim)), dtype)
    made["d_summaries"] = jnp.asarray(rng.standard_normal(shapes["states"]), jnp.float32)
    return made


def products(x, summaries, outputs):
    """Both products, the transposed one, and all gradients, by one pair of functions."""
    made = {}
    made["summaries"], pullback = jax.vjp(summaries, x["k"], x["v"])
    made["dk"], made["dv"] = pullback(x["d_summaries"].astype(made["summaries"].dtype))
    made["out"], pullback = jax.vjp(outputs, x["q"], x["states"])
    made["dq"], made["d_states"] = pullback(x["d_out"])
    made["out_t"], pullback = jax.vjp(
        functools.partial(outputs, transposed=True), x["q"], jnp.swapaxes(x["states"], -1, -2)
    )
    made["dq_t"], made["d_states_t"] = pullback(x["d_out"])
    return made


@functools.partial(jax.jit, static_argnums=(1, 2))
def by_name(x, chunk_size, name):
    return products(
        x,
        lambda k, v: chunk_summaries(k, v, chunk_size, implementation=name),
        lambda q, s, **how: chunk_outputs(q, s, chunk_size, implementation=name, **how),
    )


def definition(x, chunk_size):
    """The two values in float64 NumPy."""
    q, k, v, states = (np.asarray(x[n], np.float64) for n in ("q", "k", "v", "states"))
    sums, out = np.zeros_like(states), np.zeros_like(v)
    for t in range(q.shape[1]):
        c = t // chunk_size
        sums[:, :, c] += np.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
        out[:, t] = np.einsum("bhd,bhde->bhe", q[:, t], states[:, :, c])
    return {"summaries": sums, "out": out, "out_t": out}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_equals_reference_and_reference_is_the_definition(case):
    x, chunk_size = make(case, jnp.float32), case[-1]
    want, got = (by_name(x, chunk_size, name) for name in ("reference", "xla"))
    for name, expected in definition(x, chunk_size).items():
        assert_close(want[name], expected, tolerance(jnp.float32, chunk_size), name)
    for name, expected in want.items():
        assert_close(got[name], expected, tolerance(jnp.float32, max(case)), name)
