"""Decayed products of all pairs of tokens in a chunk; no exponential of a positive number.

A pair's weight is `exp(G_i - G_j)` for j before i, where `G` is the running sum of log decays. With
one decay a head it is a number, and the difference is taken directly. With one a channel it stands
inside the sum over channels, and splitting it into `exp(G_i) exp(-G_j)` would overflow. Here the
split is made at a reference point between the two tokens, `exp(G_i - P) exp(P - G_j)` with P the
sum at the start of i's sub-chunk: `G` never rises, so both exponents are <= 0, and where a factor
underflows to zero the weight itself, which is smaller, does too. Pairs within one sub-chunk have no
point between them and are weighted channel by channel. Source: arXiv 2312.06635 (gated linear
attention), section 4, "secondary-level chunking".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels.delta_rule.checks import SUB_CHUNK
from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention.decay import LogSum


def shifted(sums: LogSum) -> LogSum:
    """Sums ahead of each token: `G_{i-1}`, 0 for the first. Same shape; tokens are axis 3."""
    widths = [(0, 0)] * sums.whole.ndim
    widths[3] = (1, 0)
    return sums.map(lambda y: jnp.pad(y, widths)[:, :, :, :-1])


def pair_scores(
    reader: jax.Array, reader_sums: LogSum, key: jax.Array, sums: LogSum, strict: bool, precision
) -> jax.Array:
    """`sum_d reader_id key_jd exp(R_id - G_jd)` for every j <= i (j < i if `strict`), else 0.

    Args:
      reader, key: [batch, heads, chunks, tokens, key_dim]; up to 16 tokens or a multiple of 16.
      reader_sums: `R`, either `sums` or `shifted(sums)`, the latter with `strict` only.
      sums: `G`, the inclusive running sums of the log decays (<= 0) from the start of each chunk,
        [batch, heads, chunks, tokens] or [batch, heads, chunks, tokens, key_dim].
      strict: whether a token leaves out itself.
      precision: of the matrix products, a `jax.lax.Precision`.

    Returns:
      [batch, heads, chunks, tokens (i), tokens (j)] in the readers' dtype.

    >>> import jax.numpy as jnp
    >>> x, g = jnp.ones((1, 1, 1, 2, 3)), decays.cumulative(jnp.zeros((1, 1, 1, 2)), axis=3)
    >>> pair_scores(x, g, x, g, strict=False, precision=None)[0, 0, 0].tolist()
    [[3.0, 0.0], [3.0, 3.0]]
    """
    tokens = reader.shape[3]
    if sums.whole.ndim == reader.ndim:
        return _by_channel(reader, reader_sums, key, sums, strict, precision)
    mask = jnp.tril(jnp.ones((tokens, tokens), bool), -1 if strict else 0)
    weights = decays.masked_factor(reader_sums[..., :, None], sums[..., None, :], mask)
    return jnp.einsum("bhncd,bhnmd->bhncm", reader, key, precision=precision) * weights


def _by_channel(reader, reader_sums, key, sums, strict: bool, precision) -> jax.Array:
    """`pair_scores` with one decay a channel."""
    batch, heads, chunks, tokens, dim = reader.shape
    sub = min(tokens, SUB_CHUNK)
    count = tokens // sub

    def cut(y):
        return y.reshape(batch, heads, chunks, count, sub, dim)

    reader, reader_sums = cut(reader), reader_sums.map(cut)
    within = _within(reader, reader_sums, cut(key), sums.map(cut), strict)
    if count == 1:
        return within[:, :, :, 0]
    across = _across(reader, reader_sums, key, sums, precision)
    diagonal = jnp.eye(count, dtype=reader.dtype)[:, None, :, None]
    across = across.reshape(batch, heads, chunks, count, sub, count, sub)
    return (across + diagonal * within[..., None, :]).reshape(batch, heads, chunks, tokens, tokens)


def _within(reader, reader_sums, key, sums, strict: bool) -> jax.Array:
    """Scores inside each sub-chunk. [b, h, n, s, c, d] -> [b, h, n, s, c, c]."""
    sub = reader.shape[-2]
    mask = jnp.tril(jnp.ones((sub, sub), bool), -1 if strict else 0)[..., None]
    weights = decays.masked_factor(
        reader_sums[..., :, None, :], sums[..., None, :, :], mask
    )
    return jnp.sum(reader[..., :, None, :] * key[..., None, :, :] * weights, axis=-1)


def _across(reader, reader_sums, key, sums, precision) -> jax.Array:
    """Scores of each sub-chunk's tokens with every token of earlier sub-chunks.

    reader [b, h, n, s, c, d]; key [b, h, n, s * c, d]. Returns [b, h, n, s, c, s * c], zero from
    the sub-chunk's own start on.
    """
    count, sub = reader.shape[3:5]
    starts = jnp.arange(count) * sub
    point = shifted(sums)[:, :, :, ::sub]
    earlier = jnp.arange(count * sub) < starts[:, None]
    to_point = decays.masked_factor(
        point[..., :, None, :], sums[..., None, :, :], earlier[..., None]
    )
    from_point = decays.factor(reader_sums, point[..., :, None, :])
    return jnp.einsum(
        "bhnscd,bhnsmd->bhnscm",
        reader * from_point,
        key[..., None, :, :] * to_point,
        precision=precision,
    )
