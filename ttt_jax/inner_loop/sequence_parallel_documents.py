"""Documents and unfinished chunks across the cuts of a sequence that is spread over devices.

A document that began on a device to the left goes on here with its chunk grid: each device gets the
tokens of the chunk that is unfinished at its left edge, and works on from there as a second call of
``ttt`` does from the first one's state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.inner_loop.carried import NO_ID, last_document
from ttt_jax.inner_loop.chunks import Tokens, first_id, like, squeeze, take
from ttt_jax.inner_loop.sequence_parallel_exchange import last_tokens
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Buffer, State

_NONE, _ANY = -2, NO_ID  # no document yet; the carried state's document, whatever its id
_FACTS = 5  # int32 a row that each device tells the others


class Edge(NamedTuple):
    """What a device knows of its left edge, and of its right one for the state it hands out."""

    segment_ids: jax.Array | None  # [batch, time] of the shard
    buffer: Buffer | None  # tokens of the chunk that is unfinished at the left edge
    ongoing: jax.Array | bool  # [batch, 1]: the shard's first document began to the left
    continued: jax.Array | bool  # [batch, 1]: it also has a state of its own already
    restart: jax.Array | None  # [batch]: the document at the right edge has no update yet
    document: jax.Array  # [batch]: id of the document at the right edge


class _Open(NamedTuple):
    """The document that is open at an edge, one entry a row."""

    ident: jax.Array  # its id, _NONE or _ANY
    length: jax.Array  # its tokens so far
    settled: jax.Array  # whether it has been updated, or came with a carried state


def aligned(spec: InnerLoop, length: int, segment_ids, carried: Buffer | None) -> bool:
    """Whether chunks end exactly at the cuts, so that no token has to move."""
    whole = spec.chunk_size is not None and length % spec.chunk_size == 0
    return whole and segment_ids is None and carried is None and spec.window is None


def left_edge(
    spec: InnerLoop,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    carried: State | None,
    axis_name: str,
) -> Edge:
    """Finds out, for each device, how its shard goes on from those to the left.

    Args:
      spec: the inner loop.
      tokens: the shard's tokens, head-major.
      segment_ids: ``[batch, time]`` of the shard, or ``None`` for one document a row.
      carried: the state that the sequence continues, or ``None``.
      axis_name: the mesh axis over which the sequence is cut.
    """
    batch, _, length, _ = tokens.k.shape
    continues, known = carried is not None, segment_ids is not None
    document = last_document(carried, None, batch)
    buffer = carried.buffer if continues else None
    if aligned(spec, length, segment_ids, buffer):
        begins = (lax.axis_index(axis_name) == 0) & (not continues)
        return Edge(None, None, ~begins, ~begins, None, document)
    ids = segment_ids if known else jnp.zeros((batch, length), jnp.int32)
    count = jnp.zeros((batch,), jnp.int32) if buffer is None else buffer.count
    before = _Open(
        document if continues and known else jnp.full_like(document, _ANY if continues else _NONE),
        count.astype(jnp.int32),
        jnp.full((batch,), continues),
    )
    first, (left, right) = _open_documents(spec, ids, before, axis_name)
    empty = ~jnp.any(ids >= 0, 1)
    ongoing = (left.ident != _NONE) & (_goes_on(left, first) | empty)
    width = spec.window or spec.chunk_size
    if width > 1:
        buffer = _unfinished(spec, tokens, ids, buffer, known, axis_name)
        chunk = spec.chunk_size
        kept = jnp.minimum(left.length, width - chunk + left.length % chunk)
        buffer = _at_front(buffer, jnp.where(ongoing, kept, 0))
    return Edge(
        ids,
        buffer,
        ongoing[:, None],
        (ongoing & left.settled)[:, None],
        (right.ident != _NONE) & ~right.settled,
        jnp.where(right.ident == _NONE, NO_ID, right.ident) if known else document,
    )


def _goes_on(document: _Open, first: jax.Array) -> jax.Array:
    return (document.ident == first) | (document.ident == _ANY)


def _open_documents(
    spec: InnerLoop, ids: jax.Array, before: _Open, axis_name: str
) -> tuple[jax.Array, tuple[_Open, _Open]]:
    """The id of the shard's first token, and the documents open at its two edges."""
    valid = ids >= 0
    backwards, real = ids[:, ::-1], valid[:, ::-1]
    first, last = first_id(ids), first_id(backwards)
    other = jnp.cumsum(real & (backwards != last[:, None]), 1) > 0
    length = jnp.sum(real & ~other, 1)
    facts = (jnp.any(valid, 1), first, last, ~other[:, -1], length)
    table = lax.all_gather(jnp.stack([x.astype(jnp.int32) for x in facts]), axis_name)

    def step(left, row):
        some, first, last, single, length = row
        joined = (single > 0) & _goes_on(left, first)
        total = length + jnp.where(joined, left.length, 0)
        settled = (joined & left.settled) | (total >= spec.chunk_size)
        new = _Open(last, total, settled)
        right = jax.tree.map(lambda a, b: jnp.where(some > 0, a, b), new, left)
        return right, (left, right)

    _, edges = lax.scan(step, before, table)
    return first, jax.tree.map(lambda x: x[lax.axis_index(axis_name)], edges)


def _unfinished(spec, tokens, ids, carried, documents, axis_name) -> Buffer:
    """The last tokens to the left of the shard, at the end of the buffer's room."""
    room = (spec.window or spec.chunk_size) - 1
    if carried is not None:
        as_tokens = jax.tree.map(lambda a, b: a.astype(b.dtype), carried[:5], tokens[1:6])
        carried = _moved(Buffer(*as_tokens, carried.count), carried.count - room, carried.count)
    squeezed, ids, _ = squeeze(tokens, ids, None)
    number = jnp.sum(ids >= 0, 1)
    index = jnp.maximum(number[:, None] - room + jnp.arange(room), 0)
    own = Buffer(
        *jax.tree.map(lambda x: take(x, index), squeezed[1:6]),
        jnp.minimum(number, room).astype(jnp.int32),
    )
    return last_tokens(own, carried, ids.shape[1], documents, axis_name)


def _at_front(buffer: Buffer, count: jax.Array) -> Buffer:
    """The last ``count`` tokens moved to the front of the room, zeros behind them."""
    room = buffer.k.shape[2]
    moved = _moved(buffer, room - count, count)
    used = jnp.arange(room) < count[:, None]
    clean = jax.tree.map(lambda x: jnp.where(like(used, x), x, 0), moved[:5])
    return Buffer(*clean, moved.count)


def _moved(buffer: Buffer, by: jax.Array, count: jax.Array) -> Buffer:
    room = buffer.k.shape[2]
    index = jnp.clip(jnp.arange(room) + by[:, None], 0, room - 1)
    return Buffer(*jax.tree.map(lambda x: take(x, index), buffer[:5]), count)
