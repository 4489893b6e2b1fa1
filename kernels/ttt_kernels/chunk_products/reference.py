"""The chunk products token by token: the specification of every other implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def summaries(
    k: jax.Array, v: jax.Array, chunk_size: int, dtype: jnp.dtype, rates: jax.Array | None
) -> jax.Array:
    """Adds one token after the other to its chunk's sum, in float32 or wider."""
    wide = jnp.promote_types(k.dtype, jnp.float32)
    batch, length, heads, key_dim = k.shape
    chunks = -(-length // chunk_size)
    rates = jnp.ones((batch, length, heads), wide) if rates is None else rates

    def step(sums, token):
        k_t, v_t, rate, chunk = token
        k_t = k_t * rate[..., None]
        return sums.at[:, :, chunk].add(k_t[..., :, None] * v_t[..., None, :]), None

    zeros = jnp.zeros((batch, heads, chunks, key_dim, v.shape[-1]), wide)
    tokens = (*_tokens_first(k, v, rates), jnp.arange(length) // chunk_size)
    return lax.scan(step, zeros, tokens)[0].astype(dtype)


def outputs(q: jax.Array, states: jax.Array, chunk_size: int, transposed: bool) -> jax.Array:
    """Multiplies one token after the other with its chunk's state, in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    if transposed:
        states = jnp.swapaxes(states, -1, -2)
    states = states.astype(q.dtype).astype(wide)

    def step(token):
        q_t, chunk = token
        state = lax.dynamic_index_in_dim(states, chunk, axis=2, keepdims=False)
        return jnp.sum(q_t[..., :, None] * state, axis=-2)

    out = lax.map(step, (*_tokens_first(q), jnp.arange(q.shape[1]) // chunk_size))
    return jnp.moveaxis(out, 0, 1).astype(q.dtype)


def states(
    summaries: jax.Array,
    decay: jax.Array | None,
    initial: jax.Array,
    include: bool,
    reverse: bool,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Passes one chunk after the other."""
    decay = jnp.ones(summaries.shape[:3], initial.dtype) if decay is None else decay

    def step(state, chunk):
        summary, factor = chunk
        new = factor[..., None, None] * state + summary
        return new, new if include else state

    chunks = (jnp.moveaxis(summaries.astype(initial.dtype), 2, 0), jnp.moveaxis(decay, 2, 0))
    final, made = lax.scan(step, initial, chunks, reverse=reverse)
    return jnp.moveaxis(made, 0, 2).astype(dtype), final


def _tokens_first(*arrays: jax.Array) -> list[jax.Array]:
    """[batch, time, ...] to [time, batch, ...] in float32 or wider."""
    return [jnp.moveaxis(x, 1, 0).astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
