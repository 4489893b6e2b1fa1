"""The chunk products as batched matrix products: runs wherever XLA does.

Head-major inside ([batch, heads, chunks, tokens, dim]): XLA's batched products want it so, and
one transposition for each tensor of tokens is what that costs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def summaries(k: jax.Array, v: jax.Array, chunk_size: int, dtype: jnp.dtype) -> jax.Array:
    """`k^T v` over each chunk; see `ttt_kernels.chunk_summaries`."""
    k, v = _cut(k, chunk_size), _cut(v, chunk_size)
    return _product("bhncd,bhnce->bhnde", k, v, dtype)


def outputs(q: jax.Array, states: jax.Array, chunk_size: int, transposed: bool) -> jax.Array:
    """Each token times its chunk's state; see `ttt_kernels.chunk_outputs`."""
    equation = "bhncd,bhned->bhnce" if transposed else "bhncd,bhnde->bhnce"
    out = _product(equation, _cut(q, chunk_size), states.astype(q.dtype), q.dtype)
    out = jnp.moveaxis(out, 1, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, : q.shape[1]]


def states(
    summaries: jax.Array, edge: jax.Array, include: bool, reverse: bool, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """`S_c = edge + sum_{j < c} G_j` for every chunk, and the same over all chunks.

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim], float32 or wider.
      edge: [batch, heads, key_dim, value_dim], the state ahead of (in reverse: behind) all.
      include: sums over j <= c.
      reverse: sums over j > c (with `include` j >= c).
      dtype: of the states.
    """
    sums = lax.cumsum(summaries, axis=2, reverse=reverse)
    final = edge + sums[:, :, 0 if reverse else -1]
    sums = sums if include else sums - summaries
    return (edge[:, :, None] + sums).astype(dtype), final


def _cut(x: jax.Array, chunk_size: int) -> jax.Array:
    """[batch, time, heads, dim] to [batch, heads, chunks, chunk, dim], zeros behind the end."""
    chunk_size = min(chunk_size, x.shape[1])
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk_size), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    return jnp.moveaxis(x, 3, 1)


def _product(equation: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """An einsum that accumulates in float32 (or wider) and writes `dtype`."""
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    exact = lax.Precision.DEFAULT if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=dtype)
