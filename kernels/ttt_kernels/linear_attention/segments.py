"""Packed documents: which document, position and readable state belong to each token.

A document is a maximal run of equal `segment_ids` that are >= 0; an id of -1 is padding. Padding
belongs to no document, leaves the state alone and gets a zero output. The first document of a row
continues `initial_state`; every later one starts from zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def is_real(segment_ids: jax.Array) -> jax.Array:
    """True where the token belongs to a document. [B, T] int -> [B, T] bool."""
    return segment_ids >= 0


def document_starts(segment_ids: jax.Array) -> jax.Array:
    """True at the first token of each document. [B, T] int -> [B, T] bool."""
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return is_real(segment_ids) & (segment_ids != previous)


def document_index(segment_ids: jax.Array) -> jax.Array:
    """Number, from 0, of the document whose state a row holds after each token.

    Padding keeps the number of the document before it, and padding ahead of the first document
    has number 0, so that `initial_state` reaches the first document and a row of padding alone
    returns it. [B, T] int -> [B, T] int32, never decreasing.

    >>> import jax.numpy as jnp
    >>> document_index(jnp.array([[-1, 5, 5, -1, 5, 2]])).tolist()
    [[0, 0, 0, 0, 1, 2]]
    """
    starts = document_starts(segment_ids).astype(jnp.int32)
    return jnp.maximum(jnp.cumsum(starts, axis=1) - 1, 0)


def read_index(
    length: int, chunk_size: int, include_current: bool, segment_ids: jax.Array | None
) -> jax.Array:
    """Index of the token after which each token of a chunk-causal row reads the state.

    Chunks are counted from the start of each document. Without `include_current` a token reads
    the state after the last token of the chunk before its own (-1: the row's initial state, and
    an index of another document: that document's start); with it, after the last token of its
    own chunk. Returns [1, T] or [B, T] int32.
    """
    time = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is None:
        start, stop = jnp.zeros_like(time), jnp.full_like(time, length)
    else:
        starts = document_starts(segment_ids)
        start = lax.cummax(jnp.where(starts, time, 0), axis=1)
        ends = jnp.pad(starts[:, 1:] | ~is_real(segment_ids)[:, 1:], ((0, 0), (0, 1)),
                       constant_values=True)
        stop = lax.cummin(jnp.where(ends, time + 1, length), axis=1, reverse=True)
    chunk_start = start + (time - start) // chunk_size * chunk_size
    if not include_current:
        return chunk_start - 1
    return jnp.minimum(chunk_start + chunk_size, stop) - 1
