"""The chunk products as batched matrix products: runs wherever XLA does.

Head-major inside ([batch, heads, chunks, tokens, dim]): XLA's batched products want it so, and
one transposition for each tensor of tokens is what that costs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def summaries(
    k: jax.Array,
    v: jax.Array,
    chunk_size: int,
    dtype: jnp.dtype,
    rates: jax.Array | None = None,
) -> jax.Array:
    """`sum_t rate_t k_t^T v_t` over each chunk; see `ttt_kernels.chunk_summaries`."""
    if rates is not None:
        k = (k * rates[..., None]).astype(k.dtype)
    k, v = _cut(k, chunk_size), _cut(v, chunk_size)
    return _product("bhncd,bhnce->bhnde", k, v, dtype)


def outputs(q: jax.Array, states: jax.Array, chunk_size: int, transposed: bool) -> jax.Array:
    """Each token times its chunk's state; see `ttt_kernels.chunk_outputs`."""
    return _outputs(q, states, chunk_size, transposed, q.dtype)


def rated_outputs(
    q: jax.Array,
    states: jax.Array,
    rates: jax.Array,
    other: jax.Array | None,
    chunk_size: int,
    transposed: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Outputs times their token's rate, and their products with `other`; see `vjp`."""
    out = _outputs(q, states, chunk_size, transposed, rates.dtype)
    dots = None if other is None else jnp.sum(other * out, -1)
    return (out * rates[..., None]).astype(q.dtype), dots


def _outputs(q, states, chunk_size: int, transposed: bool, dtype: jnp.dtype) -> jax.Array:
    equation = "bhncd,bhned->bhnce" if transposed else "bhncd,bhnde->bhnce"
    out = _product(equation, _cut(q, chunk_size), states.astype(q.dtype), dtype)
    out = jnp.moveaxis(out, 1, 3)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, : q.shape[1]]


def states(
    summaries: jax.Array,
    decay: jax.Array | None,
    edge: jax.Array | None,
    include: bool,
    reverse: bool,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """`S_c = decay_c S_{c-1} + G_c` for every chunk, and the last one.

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim], G.
      decay: [batch, heads, chunks] in the dtype of `edge`, or None for 1.
      edge: [batch, heads, key_dim, value_dim], the state ahead of (in reverse: behind) all, or None
        for a float32 zero.
      include: the states behind each chunk, not ahead of it.
      reverse: from the last chunk to the first.
      dtype: of the states.
    """
    if edge is None:
        edge = jnp.zeros((*summaries.shape[:2], *summaries.shape[3:]), jnp.float32)
    summaries = summaries.astype(edge.dtype)
    if decay is None:
        sums = edge[:, :, None] + lax.cumsum(summaries, axis=2, reverse=reverse)
    else:
        factors = jnp.broadcast_to(decay[..., None, None], (*decay.shape, 1, 1))
        sums, kept = _scan(factors, summaries, reverse)
        sums = sums + kept * edge[:, :, None]
    final = sums[:, :, 0 if reverse else -1]
    return (sums if include else shifted(sums, edge, reverse)).astype(dtype), final


def shifted(x: jax.Array, first: jax.Array, reverse: bool) -> jax.Array:
    """Each chunk's predecessor along axis 2, `first` ahead of the first (in reverse: the last)."""
    first = first[:, :, None]
    return jnp.concatenate([x[:, :, 1:], first] if reverse else [first, x[:, :, :-1]], 2)


def _scan(decay: jax.Array, parts: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """(decayed running sums along axis 2, products of all decays up to each chunk)."""
    def combine(early, late):
        return early[0] * late[0], late[0] * early[1] + late[1]

    kept, sums = lax.associative_scan(combine, (decay, parts), axis=2, reverse=reverse)
    return sums, kept


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
