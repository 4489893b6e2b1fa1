"""Linear attention in chunks, by batched matrix products: runs wherever XLA does.

Three steps, head-major ([batch, heads, blocks, block, dim]) because XLA's batched products want
it so: the summary `K^T V` of every block, the state at every block's start as a product of those
summaries with a lower-triangular matrix of decays, and the outputs: scores within a block plus
the block's starting state. Source: arXiv 2602.21204, section 5; the chunked form as in
arXiv 2312.06635 (gated linear attention), section 4.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention import segments
from ttt_kernels.linear_attention.decay import LogSum
from ttt_kernels.linear_attention.shapes import accumulator_dtype

# On an H200 blocks of 128 are fastest for 64 to 256 wide heads: the score products grow with the
# block, the states to be written shrink with it.
BLOCK = 128
# Above this many blocks the triangular matrix is applied group by group, so that its cost stays
# linear in the length.
MAX_GROUP = 256


class _Blocks(NamedTuple):
    """One row's tokens cut into blocks. b = batch, h = heads, n = blocks, c = tokens a block."""

    q: jax.Array  # [b, h, n, c, key_dim]
    k: jax.Array  # [b, h, n, c, key_dim]
    v: jax.Array  # [b, h, n, c, value_dim]
    decay: LogSum | None  # [b, h, n, c], summed from each block's start
    document: jax.Array | None  # [b, n, c]
    read: jax.Array | None  # [b or 1, n, c] index of the last token each token sees

    @property
    def precision(self):
        # float32 inputs promise float32 results: no TF32 behind the caller's back.
        return lax.Precision.DEFAULT if self.q.dtype.itemsize == 2 else lax.Precision.HIGHEST

    @property
    def accumulator(self):
        return accumulator_dtype(self.q.dtype)

    @property
    def state_dtype(self):
        """What blocks' states are kept in: bfloat16 halves the bytes; float16 might overflow."""
        return self.q.dtype if self.q.dtype == jnp.bfloat16 else self.accumulator

    def document_before(self) -> jax.Array:
        """Document of the state at each block's start and, last, at the row's end, [b, n + 1]."""
        return jnp.pad(self.document[:, :, -1], ((0, 0), (1, 0)))


@functools.partial(jax.checkpoint, static_argnums=(6, 7, 8))
def _checkpointed(q, k, v, log_decay, initial_state, segment_ids, causal, chunk_size, include):
    batch, length, heads, key_dim = q.shape
    acc = accumulator_dtype(q.dtype)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), acc)
    initial_state = initial_state.astype(acc)
    plain_chunks = causal == "chunk" and segment_ids is None
    block = min(chunk_size if plain_chunks else BLOCK, length)
    read = None
    if causal == "chunk" and not plain_chunks:
        read = segments.read_index(length, chunk_size, include, segment_ids)
    x = _cut(q, k, v, log_decay, segment_ids, read, block)
    states, final = _prefix(_summaries(x), x, initial_state, inclusive=plain_chunks and include)
    if plain_chunks:
        out = _product("bhncd,bhnde->bhnce", x.q, states.astype(q.dtype), x).astype(acc)
    else:
        out = _outputs(x, states)
    out = jnp.moveaxis(out, 1, 3).reshape(batch, -1, heads, v.shape[-1])
    return out[:, :length].astype(v.dtype), final


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
    """Linear attention by batched products; see `ttt_kernels.linear_attention`.

    The backward pass computes the blocks again, so that what is kept for it is the inputs, and
    what it needs in passing grows linearly with the length.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 2))
    >>> linear_attention(x, x, x, causal="chunk", chunk_size=2)[0][0, :, 0, 0].tolist()
    [0.0, 0.0, 4.0]
    """
    return _checkpointed(
        q, k, v, log_decay, initial_state, segment_ids, causal, chunk_size, include_current_chunk
    )


def _product(equation: str, a: jax.Array, b: jax.Array, x: _Blocks, dtype=None) -> jax.Array:
    """An einsum that accumulates in float32 and writes `dtype` (default: the inputs' own)."""
    return jnp.einsum(
        equation, a, b, precision=x.precision, preferred_element_type=dtype or x.q.dtype
    )


def _cut(q, k, v, log_decay, segment_ids, read, block: int) -> _Blocks:
    """Cleans padding, pads the tail with tokens of no influence and cuts rows into blocks."""
    batch, length = q.shape[:2]
    tail = -length % block
    document = None
    if segment_ids is not None:
        real = segments.is_real(segment_ids)[:, :, None]
        # `where`, not a product: padded positions may hold NaN.
        q, k, v = (jnp.where(real[..., None], a, 0) for a in (q, k, v))
        log_decay = None if log_decay is None else jnp.where(real, log_decay, 0)
        document = segments.document_index(segment_ids)

    def tokens_first(x, mode="constant"):
        x = jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return x.reshape(x.shape[0], -1, block, *x.shape[2:])

    def heads_first(x):
        return jnp.moveaxis(tokens_first(x), 3, 1)

    if log_decay is not None:
        log_decay = log_decay.astype(accumulator_dtype(q.dtype))
        log_decay = decays.cumulative(heads_first(log_decay), axis=-1)
    return _Blocks(
        heads_first(q), heads_first(k), heads_first(v), log_decay,
        None if document is None else tokens_first(document, "edge"),
        None if read is None else tokens_first(read, "edge"),
    )


def _summaries(x: _Blocks) -> jax.Array:
    """What each block adds to the state at its end, [b, h, n, key_dim, value_dim]."""
    k = x.k
    weight = None
    if x.decay is not None:
        weight = decays.factor(x.decay[..., -1:], x.decay)
    if x.document is not None:
        last = (x.document == x.document[:, :, -1:])[:, None]
        weight = last if weight is None else jnp.where(last, weight, 0)
    if weight is not None:
        k = k * weight[..., None].astype(k.dtype)
    return _product("bhncd,bhnce->bhnde", k, x.v, x, x.state_dtype)


def _prefix(
    summaries: jax.Array, x: _Blocks, initial_state: jax.Array, inclusive: bool
) -> tuple[jax.Array, jax.Array]:
    """State at each block's start (inclusive: its end), as the summaries, and at the row's end.

    ([b, h, n, key_dim, value_dim], [b, h, key_dim, value_dim] in the accumulator's dtype.) A
    product with the lower-triangular matrix of the decays between blocks; XLA runs it several
    times faster than a running sum.
    """
    n = summaries.shape[2]
    totals = None if x.decay is None else x.decay[..., -1]
    step = functools.partial(_prefix_group, precision=x.precision, inclusive=inclusive)
    if n <= MAX_GROUP:
        owners = None if x.document is None else x.document_before()
        return step(summaries, totals, owners, initial_state)
    group = -(-n // -(-n // MAX_GROUP))
    tail = -n % group

    def grouped(y, axis):
        widths = [(0, 0)] * y.ndim
        widths[axis] = (0, tail)
        y = jnp.pad(y, widths, mode="edge" if y.dtype == jnp.int32 else "constant")
        shape = (*y.shape[:axis], -1, group, *y.shape[axis + 1:])
        return jnp.moveaxis(y.reshape(shape), axis, 0)

    owners = None
    if x.document is not None:
        ends = grouped(x.document[:, :, -1], 1)
        first = jnp.concatenate([jnp.zeros_like(ends[:1, :, -1]), ends[:-1, :, -1]])
        owners = jnp.concatenate([first[..., None], ends], axis=2)
    if totals is not None:
        totals = totals.map(lambda y: grouped(y, 2))

    def scanned(state, inputs):
        return step(*inputs, state)[::-1]

    final, states = lax.scan(scanned, initial_state, (grouped(summaries, 2), totals, owners))
    states = jnp.moveaxis(states, 0, 2)
    return states.reshape(*states.shape[:2], -1, *states.shape[4:])[:, :, :n], final


def _prefix_group(summaries, totals, owners, initial_state, *, precision, inclusive):
    """`_prefix` of one group. totals [b, h, n]; owners [b, n + 1], document at each edge."""
    n, acc = summaries.shape[2], initial_state.dtype
    mask = jnp.tril(jnp.ones((n + 1, n + 1), bool))
    if owners is not None:
        mask = mask & (owners[:, None, :, None] == owners[:, None, None, :])
    if totals is None:
        weights = mask.astype(acc)
    else:
        # Column 0 is the state ahead of the group, column j + 1 block j's summary.
        sums = decays.cumulative_sums(totals, axis=-1)
        sums = sums.map(lambda y: jnp.pad(y, ((0, 0), (0, 0), (1, 0))))
        weights = decays.masked_factor(sums[..., :, None], sums[..., None, :], mask)
    weights = jnp.broadcast_to(weights, (*summaries.shape[:2], n + 1, n + 1))
    last = weights[:, :, -1, :, None, None]
    final = last[:, :, 0] * initial_state
    final = final + jnp.sum(last[:, :, 1:] * summaries.astype(acc), axis=2)
    # What is left of the state ahead joins the first summary: no copy of them all to append it.
    ahead = (weights[:, :, 1, 0, None, None] * initial_state).astype(summaries.dtype)
    terms = summaries.at[:, :, 0].add(ahead)
    rows = weights[:, :, 1:, 1:] if inclusive else weights[:, :, :-1, 1:]
    states = jnp.einsum("bhij,bhjde->bhide", rows.astype(terms.dtype), terms,
                        precision=precision, preferred_element_type=terms.dtype)
    if not inclusive:
        states = states.at[:, :, 0].set(initial_state.astype(states.dtype))
    return states, final


def _outputs(x: _Blocks, states: jax.Array) -> jax.Array:
    """Reads every token's state: `q_i S` of the block's start plus scores within the block."""
    n, c = x.q.shape[2:4]
    local = jnp.arange(c, dtype=jnp.int32)
    first = (jnp.arange(n, dtype=jnp.int32) * c)[:, None]
    if x.read is None:
        read = jnp.broadcast_to(local, (1, n, c))
        at_read = x.decay
        inside = None
    else:
        read = x.read - first
        # -1 is the block's starting state itself.
        inside = (read >= -1) & (read < c)
        at_read = None
        if x.decay is not None:
            at_read = x.decay.map(functools.partial(_take_sum, index=read, inside=inside))
    mask = local <= read[..., None]
    if inside is not None:
        mask = mask & inside[..., None]
    if x.document is not None:
        mask = mask & (x.document[..., :, None] == x.document[..., None, :])
    scores = _product("bhncd,bhnmd->bhncm", x.q, x.k, x)
    if x.decay is None:
        scores = jnp.where(mask[:, None], scores, 0)
    else:
        weights = decays.masked_factor(
            at_read[..., :, None], x.decay[..., None, :], mask[:, None]
        )
        scores = (scores * weights).astype(x.q.dtype)
    out = _product("bhncm,bhnme->bhnce", scores, x.v, x).astype(x.accumulator)
    start = _product("bhncd,bhnde->bhnce", x.q, states.astype(x.q.dtype), x)
    return out + _start_weight(x, at_read, inside, start.astype(x.accumulator), states)


def _start_weight(x: _Blocks, at_read, inside, start: jax.Array, states: jax.Array) -> jax.Array:
    """The part of the outputs that comes from before (or, whole chunks, after) the block."""
    if at_read is not None:
        start = start * decays.factor(at_read)[..., None]
    if x.document is not None:
        same = x.document == x.document_before()[:, :-1, None]
        visible = same if inside is None else same & inside
        start = jnp.where(visible[:, None, ..., None], start, 0)
    if inside is None:
        return start
    far = _far_states(x, inside, states).astype(x.q.dtype)
    far = _product("bhncd,bhnde->bhnce", x.q, far, x).astype(x.accumulator)
    return start + jnp.where(inside[:, None, ..., None], 0, far)


def _take_sum(sums: jax.Array, index: jax.Array, inside: jax.Array) -> jax.Array:
    """The running sum at a local index of [b, n, c]; 0 at index -1 and where not `inside`."""
    index = jnp.broadcast_to(index[:, None], (*sums.shape[:-1], index.shape[-1]))
    taken = jnp.take_along_axis(sums, jnp.clip(index, 0, sums.shape[-1] - 1), axis=-1)
    return jnp.where((index >= 0) & inside[:, None], taken, 0)


def _far_states(x: _Blocks, inside: jax.Array, states: jax.Array) -> jax.Array:
    """The state that a block's tokens read when it lies outside the block.

    All such tokens of one block belong to one chunk, which crosses the block's edge, so one state
    a block is enough: the state after token r of another block m, made from m's starting state
    and m's own tokens up to r.
    """
    batch, n, c = x.document.shape
    rows = jnp.arange(c, dtype=jnp.int32)
    chosen = jnp.max(jnp.where(inside, -1, rows), axis=-1, keepdims=True)
    r = jnp.take_along_axis(x.read, jnp.maximum(chosen, 0), axis=-1)[..., 0]
    owner = jnp.take_along_axis(x.document, jnp.maximum(chosen, 0), axis=-1)[..., 0]
    r = jnp.broadcast_to(r, (batch, n))
    m = jnp.maximum(r, 0) // c
    local = r - m * c  # -1: the row's initial state

    def blocks(y, axis=2):  # y[..., m, ...] along the block axis
        shape = [1] * y.ndim
        shape[0], shape[axis] = m.shape
        return jnp.take_along_axis(y, m.reshape(shape), axis=axis)

    document = blocks(x.document, axis=1)
    seen = (rows <= local[..., None]) & (document == owner[..., None])
    before = blocks(x.document_before()[:, :-1], axis=1) == owner
    weight, carry = seen[:, None].astype(x.accumulator), before[:, None].astype(x.accumulator)
    if x.decay is not None:
        sums = x.decay.map(blocks)
        index = jnp.broadcast_to(local[:, None, :, None], (*sums.whole.shape[:-1], 1))
        at_r = sums.map(lambda y: jnp.take_along_axis(y, jnp.maximum(index, 0), axis=-1))
        at_r = at_r.map(lambda y: jnp.where(index >= 0, y, 0))
        weight = decays.masked_factor(at_r, sums, seen[:, None])
        carry = carry * decays.factor(at_r)[..., 0]
    k = blocks(x.k) * weight[..., None].astype(x.k.dtype)
    partial = _product("bhncd,bhnce->bhnde", k, blocks(x.v), x, x.accumulator)
    return carry[..., None, None] * blocks(states) + partial
