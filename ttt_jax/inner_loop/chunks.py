"""From tokens to chunks: which tokens each update reads and where its weights are applied.

Both modes see the same stack of ``Slot``s: a slot holds the tokens of one update and the queries
that read its result, so "apply then update" and "update then apply" differ only in which queries
those are. Without documents and carried tokens a slot is a reshape; with them it is a gather, with
every document's chunks counted from its own start, so that packed equals alone. With ``window`` a
slot also holds the tokens before its chunk that its gradient reads.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Buffer, Slot


class Tokens(NamedTuple):
    """Token arrays, head-major; ``None`` where the specification does not use a field."""

    q: jax.Array  # [batch, heads, time, key_dim]
    k: jax.Array  # [batch, heads, time, key_dim]
    v: jax.Array  # [batch, heads, time, value_dim]
    lr: jax.Array | None  # [batch, heads, time, R] or [batch, heads, time, R, channels]
    momentum: jax.Array | None  # [batch, heads, time, 1]
    forget: jax.Array | None  # [batch, heads, time, 1 or key_dim]
    erase: tuple[jax.Array, jax.Array] | None = None  # read and write keys, like ``k``


class Chunks(NamedTuple):
    """The slots of a sequence, and how outputs and the unfinished chunk are put together."""

    slots: Slot | None  # stacked, or None where no chunk is complete
    reads: int  # the first ``reads`` slots are applied; at most one more only updates
    base: jax.Array | None  # queries that may read weights before any update of their document
    continues: jax.Array | None  # [batch, base time] bool: those of the document that is carried on
    collect: Callable[[jax.Array | None, jax.Array | None], jax.Array]
    buffer: Buffer | None
    restart: jax.Array | None  # [batch] bool: the last document has no update yet


def keeps_buffer(spec: InnerLoop) -> bool:
    """Whether tokens are carried from call to call: an unfinished chunk, or a window."""
    return spec.order in ("apply_then_update", "token_causal") or spec.window is not None


def head_major(q, k, v, lr, momentum, forget, erase=None) -> Tokens:
    """``[batch, time, heads, ...]`` to ``[batch, heads, time, ...]``, gates with a last axis."""

    def turn(x):
        if x is None:
            return None
        return jnp.swapaxes(x[..., None] if x.ndim == 3 else x, 1, 2)

    erase = None if erase is None else tuple(map(turn, erase))
    return Tokens(*map(turn, (q, k, v, lr, momentum, forget)), erase)


def arrange(
    spec: InnerLoop,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    buffer: Buffer | None,
    continued: bool,
) -> Chunks:
    """The chunks of ``tokens``, which continue those in ``buffer``.

    Args:
      spec: the inner loop, with a named order.
      tokens: the tokens of this call.
      segment_ids: ``[batch, time]`` int, -1 for padding, or ``None``.
      buffer: the unfinished chunk of the carried state, or ``None``.
      continued: whether the first document started before this call.
    """
    chunk = spec.chunk_size or tokens.k.shape[2]
    if segment_ids is None and buffer is None and spec.window is None:
        return _reshaped(spec, tokens, chunk)
    return _gathered(spec, tokens, chunk, segment_ids, buffer, continued)


def _reshaped(spec: InnerLoop, tokens: Tokens, chunk: int) -> Chunks:
    """One document from its start: slots are reshapes."""
    batch, _, time, _ = tokens.k.shape
    full, rest = divmod(time, chunk)
    count = jnp.full((batch,), rest, jnp.int32)
    if spec.order != "apply_then_update":
        updates = full + (rest > 0)
        mask = None if not rest else _pad(jnp.ones((1, 1, time, 1), bool), updates * chunk)
        slots = stack_slots(spec, _pad(tokens, updates * chunk), chunk, mask)

        def collect(_, outputs):
            return _unfold(outputs)[:, :, :time]

        kept = None
        if spec.order == "token_causal":
            unfinished = jax.tree.map(lambda x: x[:, :, full * chunk :], tokens)
            kept = pack_buffer(unfinished, chunk, count)
        return Chunks(slots, updates, None, None, collect, kept, None)

    queries = _pad(tokens.q[:, :, chunk:], full * chunk)
    done = jax.tree.map(lambda x: x[:, :, : full * chunk], tokens._replace(q=queries))
    slots = stack_slots(spec, done, chunk, None) if full else None

    def collect(base, outputs):
        return base if outputs is None else jnp.concatenate([base, _unfold(outputs)], 2)[:, :,
        :time]

    unfinished = jax.tree.map(lambda x: x[:, :, full * chunk :], tokens)
    reads = full if rest else max(full - 1, 0)
    base = tokens.q[:, :, :chunk]
    return Chunks(slots, reads, base, None, collect, pack_buffer(unfinished, chunk, count), None)


def _gathered(
    spec: InnerLoop,
    tokens: Tokens,
    chunk: int,
    segment_ids: jax.Array | None,
    buffer: Buffer | None,
    continued: bool,
) -> Chunks:
    """Packed documents and carried tokens: padding is squeezed out, slots are gathers."""
    batch, _, new, _ = tokens.k.shape
    own = spec.order != "apply_then_update"  # a token reads in the slot of its own chunk
    width = spec.window or chunk
    carried = 0 if buffer is None else buffer.count[:, None]
    tokens, ids, place = squeeze(tokens, segment_ids, buffer)
    time, valid = ids.shape[1], ids >= 0
    document, position = documents(ids)
    first = (document == 0) & continued

    ends = (position + 1) % chunk == 0
    room = (new + (chunk - 1 if buffer is not None else 0)) // chunk
    if own:
        ends |= jnp.diff(document, axis=1, append=document[:, -1:] + 1) != 0
        room = room + 1 if segment_ids is None else new
    ends &= valid & (jnp.arange(time) >= carried)  # those of a window's older tokens are past
    slot_of = jnp.cumsum(ends, 1) - ends  # the slot of each token's own chunk
    end, exists = _positions(ends, room)
    last = jnp.take_along_axis(position, end, 1)
    length = jnp.where(exists, last % chunk + 1, 0)
    begin = end - last % chunk

    index = jnp.arange(chunk)
    reads = (begin if own else end + 1)[..., None] + index
    slots = None
    if room:
        older = jnp.arange(chunk - width, chunk)  # with a window from below 0
        updates = begin[..., None] + older
        mask = (older < length[..., None]) & ((last - last % chunk)[..., None] + older >= 0)
        flat = [jnp.clip(x, 0, time - 1).reshape(batch, -1) for x in (reads, updates)]
        picked = jax.tree.map(lambda x: take(x, flat[1]), tokens)
        slots = stack_slots(spec, picked, width, mask.reshape(batch, 1, -1, 1))
        fresh = exists & (last // chunk == 0) & ~jnp.take_along_axis(first, end, 1)
        queries = _fold(take(tokens.q, flat[0]), chunk)
        slots = slots._replace(q=queries, valid=exists.T, fresh=fresh.T)

    reader = slot_of if own else slot_of - 1
    before = jnp.arange(time) - position % chunk  # the first token of each token's chunk
    has_slot = valid & (own | ((position >= chunk) & (before > carried)))
    source = jnp.where(has_slot, time + reader * chunk + position % chunk, jnp.arange(time))

    def collect(base, outputs):
        parts = [jnp.zeros_like(outputs[0, :, :, :1]).repeat(time, 2) if base is None else base]
        parts += [] if outputs is None else [_unfold(outputs)]
        everything = jnp.where(like(valid, parts[0]), take(jnp.concatenate(parts, 2), source), 0)
        return take(everything, place)[:, :, time - new :]

    restart = kept = None
    if keeps_buffer(spec):
        total = jnp.sum(valid, 1)
        tail = jnp.maximum(total - 1, 0)[:, None]
        length = jnp.where(total > 0, jnp.take_along_axis(position, tail, 1)[:, 0] + 1, 0)
        if not own:
            young = (length < chunk) & (length > 0)
            restart = young & ~jnp.take_along_axis(first, tail, 1)[:, 0]
        count = jnp.minimum(length, width - chunk + length % chunk)
        index = jnp.clip((total - count)[:, None] + jnp.arange(width - 1), 0, time - 1)
        kept = pack_buffer(jax.tree.map(lambda x: take(x, index), tokens), width, count)
    base = None if own else tokens.q
    return Chunks(slots, room, base, first, collect, kept, restart)


def stack_slots(spec: InnerLoop, tokens: Tokens, chunk: int, mask: jax.Array | None) -> Slot:
    """Stacks chunks of ``tokens`` (``n * chunk`` of them; those outside ``mask`` do not count).

    Gates are means over the chunk itself, the last ``spec.chunk_size`` tokens of a wider window.
    """
    batch, heads, time, _ = tokens.k.shape
    wide = jnp.promote_types(tokens.k.dtype, jnp.float32)
    full = (batch, heads, time, 1)
    present = _fold(jnp.broadcast_to(jnp.ones((), wide) if mask is None else mask, full), chunk)
    present = present.astype(wide)
    number = jnp.sum(present, 3, keepdims=True)  # [n, batch, heads, 1, 1]
    inside = present[:, :, :, -spec.chunk_size :] if spec.window else present

    def chunk_mean(gate, tokens_gate):
        if gate is None:
            return None
        if gate != "per_token":
            by_head = jnp.reshape(jnp.asarray(gate, wide), (1, 1, -1, 1, 1))
            return jnp.broadcast_to(by_head, number.shape)
        values = _fold(tokens_gate.astype(wide), chunk)[:, :, :, -inside.shape[3] :]
        total = jnp.maximum(jnp.sum(inside, 3, keepdims=True), 1)
        return (jnp.sum(values * inside, 3, keepdims=True) / total).mT

    def rate_of(index):
        if spec.rate == "per_token":
            lr = tokens.lr[:, :, :, min(index, tokens.lr.shape[3] - 1)]
            rate = _fold(lr if lr.ndim == 4 else lr[..., None], chunk)
            return rate if mask is None else rate * present
        constant = spec.rate[index] if isinstance(spec.rate, tuple) else spec.rate
        return None if constant == 1 and mask is None else constant * present

    return Slot(
        q=_fold(tokens.q, chunk),
        k=_fold(tokens.k, chunk),
        v=_fold(tokens.v, chunk),
        rates={name: rate_of(index) for index, name in enumerate(spec.trained)},
        count=jnp.maximum(number[:, :, 0, 0, 0], 1),
        momentum=chunk_mean(spec.momentum, tokens.momentum),
        forget=chunk_mean(spec.forget, tokens.forget),
        valid=None,
        fresh=None,
        erase=None if tokens.erase is None else tuple(_fold(x, chunk) for x in tokens.erase),
    )


def pack_buffer(tokens: Tokens, chunk: int, count: jax.Array) -> Buffer | None:
    """Room for ``chunk - 1`` tokens, zeros after the first ``count``; ``None`` for no room."""
    if chunk == 1:
        return None
    padded = _pad(tokens, chunk - 1)
    used = jnp.arange(chunk - 1) < count[:, None]
    wide = jax.tree.map(
        lambda x: jnp.where(like(used, x), x, 0).astype(jnp.promote_types(x.dtype, jnp.float32)),
        padded,
    )
    return Buffer(wide.k, wide.v, wide.lr, wide.momentum, wide.forget, count.astype(jnp.int32))


def _prepend(
    tokens: Tokens, segment_ids: jax.Array, buffer: Buffer
) -> tuple[Tokens, jax.Array]:
    """The carried tokens in front of the new ones; unused room is padding."""
    room = buffer.k.shape[2]
    # A row of padding alone still holds its carried tokens.
    head = jnp.maximum(first_id(segment_ids), 0)[:, None]
    carried = jnp.where(jnp.arange(room) < buffer.count[:, None], head, -1)
    old = Tokens(
        jnp.zeros((*buffer.k.shape[:3], tokens.q.shape[3]), tokens.q.dtype), *buffer[:5]
    )
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a.astype(b.dtype), b], 2), old, tokens)
    return joined, jnp.concatenate([carried, segment_ids], 1)


def squeeze(
    tokens: Tokens, segment_ids: jax.Array | None, buffer: Buffer | None
) -> tuple[Tokens, jax.Array, jax.Array]:
    """Carried tokens in front, padding behind (zeros, id -1), so that documents are contiguous.

    Returns:
      The tokens, their ids ``[batch, room + time]``, and the place of each token of ``buffer`` and
      of this call in them.
    """
    batch, _, time, _ = tokens.k.shape
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    if buffer is not None:
        tokens, segment_ids = _prepend(tokens, segment_ids, buffer)
    padding = segment_ids < 0
    order = jnp.argsort(padding, axis=1, stable=True)
    ids = jnp.take_along_axis(segment_ids, order, 1)
    valid = jnp.arange(ids.shape[1]) < jnp.sum(~padding, 1, keepdims=True)
    tokens = jax.tree.map(lambda x: jnp.where(like(valid, x), take(x, order), 0), tokens)
    return tokens, jnp.where(valid, ids, -1), jnp.argsort(order, axis=1)


def first_id(ids: jax.Array) -> jax.Array:
    """Id of each row's first token that is no padding, ``[batch]``; negative where all are."""
    return jnp.take_along_axis(ids, jnp.argmax(ids >= 0, 1)[:, None], 1)[:, 0]


def documents(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index of each token's document in its row, and its position in that document."""
    index = jnp.arange(ids.shape[1])
    starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], 1)
    begin = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.cumsum(starts, 1) - 1, index - begin


def _positions(marks: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Where the first ``room`` true entries of each row are (0 where there are fewer), and if."""
    rows = jnp.arange(marks.shape[0])[:, None]
    rank = jnp.where(marks, jnp.cumsum(marks, 1) - 1, room)
    index = jnp.broadcast_to(jnp.arange(marks.shape[1]), marks.shape)
    where = jnp.zeros((marks.shape[0], room), index.dtype).at[rows, rank].set(index, mode="drop")
    return where, jnp.arange(room) < jnp.sum(marks, 1, keepdims=True)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, :, index[b]]`` for tokens on axis 2; ``index`` is ``[batch, tokens]``."""
    return jnp.take_along_axis(x, index.reshape(index.shape[0], 1, -1, *(1,) * (x.ndim - 3)), 2)


def like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """``[batch, time]`` reshaped to broadcast against tokens ``[batch, heads, time, ...]``."""
    return mask.reshape(mask.shape[0], 1, mask.shape[1], *(1,) * (x.ndim - 3))


def _pad(tokens, time: int):
    """Zeros after the last token, up to ``time`` tokens, in every array of a pytree."""

    def pad(x):
        return jnp.pad(x, [(0, time - x.shape[2] if axis == 2 else 0) for axis in range(x.ndim)])

    return jax.tree.map(pad, tokens)


def _fold(x: jax.Array, chunk: int) -> jax.Array:
    """``[batch, heads, n * chunk, ...]`` to ``[n, batch, heads, chunk, ...]``."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:]), 2, 0)


def _unfold(x: jax.Array) -> jax.Array:
    """The inverse of ``_fold``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
