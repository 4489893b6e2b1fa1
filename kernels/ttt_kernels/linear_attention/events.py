"""Chunk-causal linear attention as a token-causal one, whatever the chunks and documents.

Each token becomes two: one that writes its key and value, and one that reads with its query and
stands right behind the token after which it is to read the state. Twice the tokens, in exchange
for chunks of any size that begin anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_kernels.linear_attention import segments


class Events(NamedTuple):
    """Places of a row's reads and writes among its 2 · time events; each row ascending."""

    reads: jax.Array  # [batch or 1, time] int32
    writes: jax.Array  # [batch or 1, time] int32
    reads_own: jax.Array  # [batch or 1, time] bool: the state read belongs to the token's document


def arrange(
    length: int, chunk_size: int, include_current: bool, segment_ids: jax.Array | None
) -> Events:
    """Places the events of chunk-causal rows, see `segments.read_index`.

    >>> import jax.numpy as jnp
    >>> e = arrange(4, 2, False, None)  # r = read, w = write: rrwwrrww
    >>> e.reads.tolist(), e.writes.tolist()
    ([[0, 1, 4, 5]], [[2, 3, 6, 7]])
    """
    index = segments.read_index(length, chunk_size, include_current, segment_ids)
    time = jnp.arange(length, dtype=jnp.int32)
    # A read has index + 1 writes and all earlier reads before it: the index never decreases.
    reads = index + 1 + time
    earlier = jax.vmap(lambda row: jnp.searchsorted(row, time, side="left"))(index)
    if segment_ids is None:
        return Events(reads, time + earlier.astype(jnp.int32), jnp.ones_like(index, bool))
    document = segments.document_index(segment_ids)
    owner = jnp.take_along_axis(jnp.pad(document, ((0, 0), (1, 0))), index + 1, axis=1)
    return Events(reads, time + earlier.astype(jnp.int32), owner == document)


def spread(x: jax.Array, places: jax.Array) -> jax.Array:
    """Tokens at their places among the events, zeros elsewhere; [batch, time, ...] to twice."""
    def row(x, places):
        new = jnp.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)
        return new.at[places].set(x, unique_indices=True, indices_are_sorted=True)

    return jax.vmap(row)(x, jnp.broadcast_to(places, x.shape[:2]))


def collect(x: jax.Array, places: jax.Array) -> jax.Array:
    """The tokens at some places among the events, [batch, 2 · time, ...] to half."""
    shape = (x.shape[0], places.shape[1], *(1,) * (x.ndim - 2))
    index = jnp.broadcast_to(places, shape[:2]).reshape(shape)
    return jnp.take_along_axis(x, index, axis=1)
