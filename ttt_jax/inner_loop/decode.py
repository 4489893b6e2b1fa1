"""One more token: constant time and memory, and an update only when a chunk is complete."""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.chunks import Tokens, stack_slots
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Buffer, State, apply, update


def is_decode(spec: InnerLoop, tokens: Tokens) -> bool:
    """Whether ``decode_one`` serves: one token, and complete chunks of more than one token."""
    by_chunk = spec.order == "apply_then_update" and spec.window is None and spec.chunk_size > 1
    return tokens.k.shape[2] == 1 and by_chunk


def decode_one(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    state: State,
    start: State,
) -> tuple[jax.Array, State]:
    """Output and state for one token that continues ``state``; the same as the general path's.

    Args:
      spec: the inner loop.
      static: matrices that are not trained.
      tokens: head-major, one token a row.
      segment_ids: ``[batch, 1]``, -1 for a row that gets no token, or ``None``.
      state: the carried state, with its buffer.
      start: the state of a new document (never entered: one token continues).
    """
    buffer, chunk = state.buffer, spec.chunk_size
    rows = jnp.arange(tokens.k.shape[0])
    real = jnp.ones(rows.shape, bool) if segment_ids is None else segment_ids[:, 0] >= 0
    tokens = jax.tree.map(lambda x: jnp.where(_column(real, x), x, 0), tokens)
    carried = state._replace(buffer=None)
    out = jnp.where(_column(real, tokens.v), apply(spec, static, carried, tokens.q), 0)

    complete = real & (buffer.count == chunk - 1)
    slot_index = jnp.where(real & ~complete, buffer.count, chunk)  # out of range: not stored
    stored = [
        None if new is None else old.at[rows, :, slot_index].set(new[:, :, 0], mode="drop")
        for old, new in zip(buffer[:5], tokens[1:6], strict=True)
    ]

    def learn(carried, stored):
        joined = [
            None if new is None else jnp.concatenate([old.astype(new.dtype), new], 2)
            for old, new in zip(stored, tokens[1:6], strict=True)
        ]
        queries = jnp.zeros((*joined[0].shape[:3], tokens.q.shape[3]), tokens.q.dtype)
        stacked = stack_slots(spec, Tokens(queries, *joined), chunk, None)
        slot = jax.tree.map(lambda x: x[0], stacked)._replace(valid=complete)
        emptied = jax.tree.map(lambda x: jnp.where(_column(complete, x), 0, x), stored)
        return update(spec, static, carried, slot, start), emptied

    def wait(carried, stored):
        return carried, stored

    carried, stored = jax.lax.cond(jnp.any(complete), learn, wait, carried, stored)
    count = jnp.where(complete, 0, buffer.count + real).astype(buffer.count.dtype)
    return out, carried._replace(buffer=Buffer(*stored, count))


def _column(mask: jax.Array, x: jax.Array) -> jax.Array:
    """``[batch]`` reshaped to broadcast against ``x``."""
    return mask.reshape(-1, *(1,) * (x.ndim - 1))
