"""Delta rules by WY chunks in plain JAX: runs wherever XLA does.

In a chunk that starts from state `S`, with `D_i` the decay of token i, the erase terms `u_i` of all
tokens, which read the state ahead of them, solve one unit lower-triangular system,

    (I - A_ab) U = R + (a exp(before)) S,    A_xy[i, j] = x_i (D_{j+1} ... D_{i-1}) y_j^T,  j < i

after which state and outputs are matrix products:

    S'  = D_1 ... D_c S + (b exp(after))^T U + (k exp(after))^T v
    O   = (q D exp(before)) S + (A_(q D)b + diag(q b^T)) U + (A_(q D)k + diag(q k^T)) v

with `before` and `after` the sums of log decays ahead of and behind each token. The three rules are
three choices of (a, b, R): `_erase_terms`. `solve` inverts blocks within blocks, it takes no powers
of `A`, which grow like binomials when keys repeat. `U = U_0 + W S` is solved once for all chunks of
a group; only three products a chunk are sequential. The backward pass computes each group again, so
that what stays in memory is the inputs and one state a group.

Sources: arXiv 2406.06484 (DeltaNet in parallel), section 3; arXiv 2412.06464 (Gated DeltaNet),
section 3.3; arXiv 2510.26692 (Kimi Linear), section 3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.delta_rule.checks import SUB_CHUNK
from ttt_kernels.delta_rule.scores import pair_scores, sums_around
from ttt_kernels.delta_rule.solve import solve_unit_lower
from ttt_kernels.linear_attention import segments
from ttt_kernels.linear_attention.shapes import accumulator_dtype

CHUNK = 64
# Tokens whose chunks are prepared together: enough for a device to be busy with a single row, and a
# bound on what the preparation holds in passing, which does not grow with the row.
GROUP_TOKENS = 1024


class _Group(NamedTuple):
    """Chunks that are prepared together. b = batch, h = heads, n = chunks, c = tokens a chunk."""

    q: jax.Array  # [b, h, n, c, key_dim]
    k: jax.Array  # [b, h, n, c, key_dim]
    v: jax.Array  # [b, h, n, c, value_dim]
    beta: jax.Array | None  # [b, h, n, c, 1]
    log_decay: jax.Array  # [b, h, n, c, key_dim or 1]
    erase_read: jax.Array | None  # [b, h, n, c, key_dim]
    erase_write: jax.Array | None  # [b, h, n, c, key_dim]
    document: jax.Array  # [b, 1, n, c]
    before: jax.Array  # [b, 1, n], document of the state ahead of each chunk


class _Erase(NamedTuple):
    """The erase terms of a group: `(I - A_ab) U = base + (a exp(before)) S`, written with key b."""

    read: jax.Array  # a, [b, h, n, c, key_dim], of the state ahead of the token
    write: jax.Array  # b, [b, h, n, c, key_dim]
    base: jax.Array  # R, [b, h, n, c, value_dim]


class _Starts(NamedTuple):
    """The states from which the tokens of a group start, and how much of them is left."""

    inside: jax.Array  # [b, 1, n, c, 1] whether the token's document starts inside its chunk
    left: jax.Array  # [b, h, n, c, key_dim or 1] factor of that start ahead of the token
    reset_state: jax.Array | None  # [b, h, key_dim, value_dim], None for zero


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    erase_read: jax.Array | None = None,
    erase_write: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    reset_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule in chunks of `chunk_size` (64); see `ttt_kernels.delta_rule`.

    With 16-bit inputs the products of float32 intermediates may use the device's tensor units
    (TF32, or three bfloat16 passes); sums of decays, the solve and the states are float32.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> delta_rule(x, x, x, beta=jnp.full((1, 3, 1), 0.5), chunk_size=2)[0].ravel().tolist()
    [0.5, 0.75, 0.875]
    """
    batch, length, heads, key_dim = q.shape
    acc = accumulator_dtype(q.dtype)
    if log_decay is None:
        log_decay = jnp.zeros((batch, length, heads), acc)
    shape = (batch, heads, key_dim, v.shape[-1])
    if reset_state is not None:
        reset_state = jnp.broadcast_to(reset_state, shape).astype(acc)
    if initial_state is None:
        initial_state = jnp.zeros(shape, acc) if reset_state is None else reset_state
    if segment_ids is None:
        reset_state = None  # a row is one document
    unit = 1 if length <= SUB_CHUNK else SUB_CHUNK
    chunk = min(chunk_size or CHUNK, -(-length // unit) * unit)
    floats = (q, k, v, beta, log_decay, erase_read, erase_write)
    groups = _cut(floats, segment_ids, chunk)
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    precision = lax.Precision.HIGH if q.dtype.itemsize == 2 else lax.Precision.HIGHEST
    run_group = functools.partial(_run_group, accumulator=acc, precision=precision)
    run_group = jax.checkpoint(run_group, prevent_cse=False)

    def step(state, group):
        return run_group(state, group, reset_state)

    final, out = lax.scan(step, initial_state.astype(acc), groups)
    out = jnp.transpose(out, (1, 0, 3, 4, 2, 5)).reshape(batch, -1, heads, v.shape[-1])
    return out[:, :length].astype(v.dtype), final


def _cut(floats, segment_ids, chunk: int) -> _Group:
    """Cleans padding, pads the tail with tokens of no influence and cuts rows into groups.

    Every array gets a leading axis of groups, over which the caller scans.
    """
    batch, length = floats[0].shape[:2]
    chunks = -(-length // chunk)
    groups = -(-chunks * chunk // max(GROUP_TOKENS, chunk))
    per_group = -(-chunks // groups)
    tail = groups * per_group * chunk - length
    real = None if segment_ids is None else segments.is_real(segment_ids)[:, :, None, None]

    def cut(x):
        if x is None:
            return None
        x = x[..., None] if x.ndim == 3 else x
        if real is not None:
            x = jnp.where(real, x, 0)  # no product: padding may hold NaN
        x = jnp.pad(x, ((0, 0), (0, tail), (0, 0), (0, 0)))
        x = x.reshape(batch, groups, per_group, chunk, *x.shape[2:])
        return jnp.transpose(x, (1, 0, 4, 2, 3, 5))

    if segment_ids is None:
        document = jnp.zeros((batch, length), jnp.int32)
    else:
        document = segments.document_index(segment_ids)
    # Edge padding carries the last document's number through the tail, so that its state survives.
    document = jnp.pad(document, ((0, 0), (0, tail)), mode="edge")
    before = jnp.pad(document[:, chunk - 1 :: chunk], ((0, 0), (1, 0)))[:, :-1]
    before = jnp.moveaxis(before.reshape(batch, groups, 1, per_group), 1, 0)
    document = jnp.moveaxis(document.reshape(batch, groups, 1, per_group, chunk), 1, 0)
    return _Group(*map(cut, floats), document, before)


def _run_group(
    state, x: _Group, reset_state, accumulator, precision
) -> tuple[jax.Array, jax.Array]:
    """One group from its starting state: (state after it, outputs [b, h, n, c, value_dim])."""
    floats = [None if y is None else y.astype(accumulator) for y in x[:7]]
    # exp of the floor is 0, and sums of it, unlike sums of -inf, may be multiplied by 0.
    floor = -1000.0 if accumulator == jnp.float64 else -200.0
    x = _Group(*floats, x.document, x.before)._replace(log_decay=jnp.maximum(floats[4], floor))
    same = x.document[..., :, None] == x.document[..., None, :]
    before, after = sums_around(x.log_decay, same)
    own = jnp.exp(x.log_decay)
    starts = _Starts(
        (x.document != x.before[..., None])[..., None], jnp.exp(before), reset_state
    )
    product = functools.partial(jnp.einsum, precision=precision)

    def scores(reader, key):
        return jnp.where(same, pair_scores(reader, key, x.log_decay, precision), 0)

    def outputs(key, values):
        """What q reads of the values that the chunk has written by `key`, its own included."""
        earlier = product("bhncm,bhnme->bhnce", scores(x.q * own, key), values)
        return earlier + jnp.sum(x.q * key, axis=-1, keepdims=True) * values

    last = x.document == x.document[..., -1:]
    to_end = jnp.where(last[..., None], jnp.exp(after), 0)
    carry, added = _carried(own, starts)
    erase = _erase_terms(x, own, scores, product)
    base, reads, written, out = None, None, None, 0
    if x.beta is None:  # k^T v is written as it is; with beta it is part of the erase terms
        write = product("bhncd,bhnce->bhnde", x.k * to_end, x.v)
        added = write if added is None else added + write
        out = outputs(x.k, x.v)
    if erase is not None:
        base, reads = _solve(erase, starts, scores, product)
        written = erase.write * to_end
    final, states, terms = _scan_chunks(state, (carry, added, base, reads, written), product)
    if erase is not None:
        out = out + outputs(erase.write, terms)
    rows, of_reset = _start_reads(x.q * own, starts, product)
    out = out + of_reset + product("bhncd,bhnde->bhnce", rows, states)
    return final, out


def _start_reads(reader: jax.Array, starts: _Starts, product):
    """What rows that read the state ahead of their token read of the state they start from.

    Returns (rows that read the state ahead of the chunk, [b, h, n, c, key_dim]; what the rows of
    documents that start inside the chunk read of `reset_state`, [b, h, n, c, value_dim] or 0).
    """
    rows = reader * starts.left
    of_reset = 0
    if starts.reset_state is not None:
        late = jnp.where(starts.inside, rows, 0)
        of_reset = product("bhncd,bhde->bhnce", late, starts.reset_state)
    return jnp.where(starts.inside, 0, rows), of_reset


def _carried(own: jax.Array, starts: _Starts):
    """What a chunk's end keeps of the states that its last document started from.

    Returns (factor of the chunk's starting state [b, h, n, key_dim or 1, 1], 0 across documents;
    what is left of `reset_state`, [b, h, n, key_dim, value_dim] or None).
    """
    kept = jnp.swapaxes(starts.left[:, :, :, -1:] * own[:, :, :, -1:], -1, -2)
    inside = starts.inside[:, :, :, -1:]
    left = None
    if starts.reset_state is not None:
        left = jnp.where(inside, kept, 0) * starts.reset_state[:, :, None]
    return jnp.where(inside, 0, kept), left


def _erase_terms(x: _Group, own: jax.Array, scores, product) -> _Erase | None:
    """The choice of (a, b, R) that makes the chunk's system one of the three rules."""
    if x.beta is not None:
        # The correction reads the decayed state.
        return _Erase(read=-x.beta * x.k * own, write=x.k, base=x.beta * x.v)
    if x.erase_read is None:
        return None
    base = product("bhncm,bhnme->bhnce", scores(x.erase_read, x.k), x.v)
    return _Erase(read=x.erase_read, write=x.erase_write, base=base)


def _solve(erase: _Erase, starts: _Starts, scores, product) -> tuple[jax.Array, jax.Array]:
    """`(I - A_ab)^{-1}` of base and of the reads of the starting state.

    Returns ([b, h, n, c, value_dim], [b, h, n, c, key_dim]).
    """
    rows, of_reset = _start_reads(erase.read, starts, product)
    right = jnp.concatenate([erase.base + of_reset, rows], axis=-1)
    solution = solve_unit_lower(-scores(erase.read, erase.write), right)
    return tuple(jnp.split(solution, [erase.base.shape[-1]], axis=-1))


def _scan_chunks(state, chunks, product):
    """Carries the state through the chunks of a group, one after the other.

    Args:
      state: [b, h, key_dim, value_dim].
      chunks: (carry, added, base, reads, written), each with chunks as axis 2, or None.
      product: einsum with the precision of the products.

    Returns:
      (final state, the state ahead of each chunk [b, h, n, key_dim, value_dim], the erase terms
      [b, h, n, c, value_dim] or None).
    """

    def advance(state, chunk):
        carry, added, base, reads, written = chunk
        new, terms = carry * state, None
        if added is not None:
            new = new + added
        if base is not None:
            terms = base + product("bhcd,bhde->bhce", reads, state)
            new = new + product("bhcd,bhce->bhde", written, terms)
        return new, (state, terms)

    by_chunk = jax.tree.map(lambda y: jnp.moveaxis(y, 2, 0), chunks)
    final, outs = lax.scan(advance, state, by_chunk)
    states, terms = jax.tree.map(lambda y: jnp.moveaxis(y, 0, 2), outs)
    return final, states, terms
