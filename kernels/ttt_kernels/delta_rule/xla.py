"""Delta rules by WY chunks in plain JAX: runs wherever XLA does.

In a chunk that starts from state `S`, with `G` the running sum of its log decays, the erase terms
`u_i = a_i S_{...}` of all tokens solve one unit lower-triangular system,

    (I - A_ab) U = R + (a exp(G)) S,        A_xy[i, j] = sum_d x_id y_jd exp(G_id - G_jd), j < i

after which state and outputs are matrix products:

    S'  = exp(G_end) S + (b exp(G_end - G))^T U + (k exp(G_end - G))^T v
    O   = (q exp(G)) S + A_qb U + A_qk v            (here j <= i)

The three rules are three choices of (a, b, R): `_erase_terms`. The solve is by substitution, never
by powers of `A`, which grow like binomials when keys repeat. `U = U_0 + W S` is solved once for all
chunks of a group; only three products a chunk are sequential. The backward pass computes each group
again, so that what stays in memory is the inputs and one state a group.

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
from ttt_kernels.delta_rule.scores import pair_scores, shifted
from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention import segments
from ttt_kernels.linear_attention.decay import LogSum
from ttt_kernels.linear_attention.shapes import accumulator_dtype

CHUNK = 64
# Tokens whose chunks are prepared together: enough for a device to be busy with a single row, few
# enough that what the preparation holds in passing stays far below the inputs of a long row.
GROUP_TOKENS = 1024


class _Group(NamedTuple):
    """Chunks that are prepared together. b = batch, h = heads, n = chunks, c = tokens a chunk."""

    q: jax.Array  # [b, h, n, c, key_dim]
    k: jax.Array  # [b, h, n, c, key_dim]
    v: jax.Array  # [b, h, n, c, value_dim]
    beta: jax.Array | None  # [b, h, n, c]
    log_decay: jax.Array  # [b, h, n, c] or [b, h, n, c, key_dim]
    erase_read: jax.Array | None  # [b, h, n, c, key_dim]
    erase_write: jax.Array | None  # [b, h, n, c, key_dim]
    document: jax.Array  # [b, 1, n, c]
    before: jax.Array  # [b, 1, n], document of the state ahead of each chunk


class _Erase(NamedTuple):
    """The erase terms of a group: `(I - A_ab) U = base + (a exp(at)) S`, written with key b."""

    read: jax.Array  # a, [b, h, n, c, key_dim]
    at: LogSum  # running sums at which a reads the state
    write: jax.Array  # b, [b, h, n, c, key_dim]
    base: jax.Array  # [b, h, n, c, value_dim]


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
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule in chunks of `chunk_size` (64); see `ttt_kernels.delta_rule`.

    16-bit inputs use the device's default products (TF32 or bfloat16 factors, float32 sums); the
    running sums of decays, the solve and the states are float32 in any case.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> delta_rule(x, x, x, beta=jnp.full((1, 3, 1), 0.5), chunk_size=2)[0].ravel().tolist()
    [0.5, 0.75, 0.875]
    """
    batch, length, heads, key_dim = q.shape
    acc = accumulator_dtype(q.dtype)
    if log_decay is None:
        log_decay = jnp.zeros((batch, length, heads), acc)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), acc)
    unit = 1 if length <= SUB_CHUNK else SUB_CHUNK
    chunk = min(chunk_size or CHUNK, -(-length // unit) * unit)
    floats = (q, k, v, beta, log_decay, erase_read, erase_write)
    groups = _cut(floats, segment_ids, chunk)
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    precision = lax.Precision.DEFAULT if q.dtype.itemsize == 2 else lax.Precision.HIGHEST
    step = functools.partial(_run_group, accumulator=acc, precision=precision)
    step = jax.checkpoint(step, prevent_cse=False)
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
    if segment_ids is None:
        document = jnp.zeros((batch, length), jnp.int32)
    else:
        document = segments.document_index(segment_ids)
        real = segments.is_real(segment_ids)
        floats = [
            None if x is None else jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)
            for x in floats
        ]

    def cut(x):
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, groups, per_group, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 4, 2), 1, 0)

    document = jnp.pad(document, ((0, 0), (0, tail)), mode="edge")
    before = jnp.pad(document[:, chunk - 1 :: chunk], ((0, 0), (1, 0)))[:, :-1]
    before = jnp.moveaxis(before.reshape(batch, groups, 1, per_group), 1, 0)
    # Edge padding carries the last document's number through the tail, so that its state survives.
    document = jnp.moveaxis(document.reshape(batch, groups, 1, per_group, chunk), 1, 0)
    return _Group(*map(cut, floats), document, before)


def _run_group(state, x: _Group, accumulator, precision) -> tuple[jax.Array, jax.Array]:
    """One group from its starting state: (state after it, outputs [b, h, n, c, value_dim])."""
    floats = [None if y is None else y.astype(accumulator) for y in x[:7]]
    x = _Group(*floats, x.document, x.before)
    sums = decays.cumulative(x.log_decay, axis=3)
    same = x.document[..., :, None] == x.document[..., None, :]
    product = functools.partial(jnp.einsum, precision=precision)

    def scores(reader, at, key, strict=False):
        return jnp.where(same, pair_scores(reader, at, key, sums, strict, precision), 0)

    carry, to_end = _edges(x, sums)
    added, base, reads, written, out = None, None, None, None, 0
    if x.beta is None:  # k^T v is written as it is; with beta it is part of the erase terms
        added = product("bhncd,bhnce->bhnde", x.k * to_end, x.v)
        out = product("bhncm,bhnme->bhnce", scores(x.q, sums, x.k), x.v)
    erase = _erase_terms(x, sums, scores, product)
    if erase is not None:
        base, reads = _solve(erase, x, scores)
        written = erase.write * to_end
    final, states, terms = _scan_chunks(state, (carry, added, base, reads, written), product)
    out = out + product("bhncd,bhnde->bhnce", _from_start(x.q, sums, x), states)
    if erase is not None:
        out = out + product("bhncm,bhnme->bhnce", scores(x.q, sums, erase.write), terms)
    return final, out


def _column(factor: jax.Array, x: _Group) -> jax.Array:
    """Factors by token (and channel) with a channel axis: [b, h, n, c, key_dim or 1]."""
    return factor if factor.ndim == x.q.ndim else factor[..., None]


def _edges(x: _Group, sums: LogSum) -> tuple[jax.Array, jax.Array]:
    """What a chunk's end keeps of its starting state and of each token's write.

    Returns (carry [b, h, n, key_dim or 1, 1], to_end [b, h, n, c, key_dim or 1]), 0 across
    documents.
    """
    end = sums.map(lambda y: y[:, :, :, -1:])
    last = x.document[..., -1:]
    carry = jnp.where((last == x.before[..., None])[..., None], _column(decays.factor(end), x), 0)
    to_end = jnp.where((x.document == last)[..., None], _column(decays.factor(end, sums), x), 0)
    return jnp.swapaxes(carry, -1, -2), to_end


def _from_start(reader: jax.Array, at: LogSum, x: _Group) -> jax.Array:
    """Rows that read the chunk's starting state: `reader exp(at)`, 0 in later documents."""
    visible = (x.document == x.before[..., None])[..., None]
    return jnp.where(visible, reader * _column(decays.factor(at), x), 0)


def _erase_terms(x: _Group, sums: LogSum, scores, product) -> _Erase | None:
    """The choice of (a, at, b, R) that makes the chunk's system one of the three rules."""
    if x.beta is not None:
        rate = x.beta[..., None]
        return _Erase(read=-rate * x.k, at=sums, write=x.k, base=rate * x.v)
    if x.erase_read is None:
        return None
    at = shifted(sums)  # the pair reads the state ahead of the token's decay
    base = product("bhncm,bhnme->bhnce", scores(x.erase_read, at, x.k, strict=True), x.v)
    return _Erase(read=x.erase_read, at=at, write=x.erase_write, base=base)


def _solve(erase: _Erase, x: _Group, scores) -> tuple[jax.Array, jax.Array]:
    """`(I - A_ab)^{-1}` of base and of the reads of the starting state, by substitution.

    Returns ([b, h, n, c, value_dim], [b, h, n, c, key_dim]).
    """
    system = -scores(erase.read, erase.at, erase.write, strict=True)
    right = jnp.concatenate([erase.base, _from_start(erase.read, erase.at, x)], axis=-1)
    solution = lax.linalg.triangular_solve(
        system, right, left_side=True, lower=True, unit_diagonal=True
    )
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
