"""Linear attention, token by token: the specification of every other implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.linear_attention import segments
from ttt_kernels.linear_attention.shapes import accumulator_dtype


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    causal: str = "token",
    chunk_size: int | None = None,
    include_current_chunk: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence one token at a time in float32 (float64 for float64 inputs).

    `S_t = exp(log_decay_t) S_{t-1} + k_t^T v_t` and `o_t = q_t S_r`, where r = t for
    `causal="token"`, and for `causal="chunk"` the last token of the chunk before t's
    (or of t's own chunk with `include_current_chunk`). Arguments and results as in
    `ttt_kernels.linear_attention`; the chunk-causal form holds one state a token in memory.

    Source: arXiv 2602.21204, Theorem 5.2; the decay as in RetNet, arXiv 2307.08621, eq. 3.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 2))
    >>> linear_attention(x, x, x)[0][0, :, 0, 0].tolist()
    [2.0, 4.0, 6.0]
    """
    batch, length, heads, key_dim = q.shape
    acc = accumulator_dtype(q.dtype)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    if log_decay is None:
        log_decay = jnp.zeros((batch, length, heads), acc)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), acc)
    real = segments.is_real(segment_ids)
    document = segments.document_index(segment_ids)
    resets = jnp.diff(document, axis=1, prepend=0) > 0

    def clean(x):
        return jnp.where(real[:, :, None, None], x, 0).astype(acc)

    def step(state, token):
        k_t, v_t, decay_t, reset_t, real_t, read = token
        new = jnp.where(reset_t[:, None, None, None], 0, state)
        new = jnp.exp(decay_t)[..., None, None] * new + k_t[..., None] * v_t[..., None, :]
        state = jnp.where(real_t[:, None, None, None], new, state)
        out = state if read is None else jnp.sum(read[..., None] * state, axis=-2)
        return state, out

    decay = jnp.where(real[..., None], log_decay, 0).astype(acc)
    tokens = [clean(k), clean(v), decay, resets, real]
    read = clean(q) if causal == "token" else None
    xs = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (*tokens, read)]
    final, outs = lax.scan(step, initial_state.astype(acc), tuple(xs))
    if causal == "token":
        return jnp.moveaxis(outs, 0, 1).astype(v.dtype), final
    index = segments.read_index(length, chunk_size, include_current_chunk, segment_ids)
    states = jnp.concatenate([initial_state.astype(acc)[:, None], jnp.moveaxis(outs, 0, 1)], 1)
    states = jnp.take_along_axis(states, index[:, :, None, None, None] + 1, axis=1)
    owners = jnp.pad(document, ((0, 0), (1, 0)))
    same = jnp.take_along_axis(owners, index + 1, axis=1) == document
    states = jnp.where(same[..., None, None, None], states, 0)
    return jnp.sum(clean(q)[..., None] * states, axis=-2).astype(v.dtype), final
