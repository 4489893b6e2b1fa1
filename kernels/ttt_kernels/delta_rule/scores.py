"""Decayed products of all pairs of tokens in a chunk; no exponential of a positive number.

A pair's weight is the product of the decays strictly between its tokens, the exponential of
`sum_{j < s < i} g_s`. Every exponent here is such a sum, of nothing but decays that act on the
pair: it is <= 0, so that nothing overflows, and it is no difference of two running sums, so that a
decay of -80 elsewhere in the chunk blurs neither the weight nor the gradient of a weak one.

With one decay a channel the weight stands inside the sum over channels. There a chunk is cut into
sub-chunks: between two of them the exponent splits at the start of the reader's sub-chunk into one
sum a reader and one a key, and the scores are matrix products; an underflow of either factor means
that the weight, which is smaller, is zero too. Within a sub-chunk pairs are weighted channel by
channel. Source: arXiv 2312.06635 (gated linear attention), section 4, "secondary-level chunking".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.delta_rule.checks import SUB_CHUNK


def _product(equation: str, *arrays: jax.Array) -> jax.Array:
    """Sums of log decays by a product with zeros and ones, at full precision on every device."""
    return jnp.einsum(equation, *arrays, precision=lax.Precision.HIGHEST)


def sums_between(log_decay: jax.Array) -> jax.Array:
    """`sum_{j < s < i} g_s` for every pair of tokens, 0 where nothing lies between.

    [..., tokens (s), channels] -> [..., tokens (i), tokens (j), channels].

    >>> import jax.numpy as jnp
    >>> sums_between(-jnp.array([[1.0], [2.0], [4.0]]))[..., 0].tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-2.0, 0.0, 0.0]]
    """
    tokens = log_decay.shape[-2]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
    after_key = jnp.where(earlier[..., None], log_decay[..., :, None, :], 0)
    return _product("is,...sjd->...ijd", earlier.astype(log_decay.dtype), after_key)


def sums_around(log_decay: jax.Array, same: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of the log decays ahead of and behind each token, among the tokens of its document.

    Args:
      log_decay: [..., tokens, channels].
      same: [..., tokens, tokens] bool, symmetric: which tokens share a document.

    Returns:
      (before, after), both like `log_decay`, both without the token's own.
    """
    earlier = jnp.tril(same, -1).astype(log_decay.dtype)
    before = _product("...is,...sd->...id", earlier, log_decay)
    after = _product("...si,...sd->...id", earlier, log_decay)
    return before, after


def pair_scores(
    reader: jax.Array, key: jax.Array, log_decay: jax.Array, precision
) -> jax.Array:
    """`sum_d reader_id key_jd exp(sum_{j < s < i} g_sd)` for every j < i, else 0.

    Args:
      reader, key: [batch, heads, chunks, tokens, key_dim]; up to 16 tokens or a multiple of 16.
      log_decay: `g`, [batch, heads, chunks, tokens, key_dim or 1], finite and <= 0.
      precision: of the matrix products, a `jax.lax.Precision`.

    Returns:
      [batch, heads, chunks, tokens (i), tokens (j)] in the readers' dtype.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 3, 2))
    >>> half = jnp.log(jnp.full((1, 1, 1, 3, 1), 0.5))
    >>> pair_scores(x, x, half, precision=None)[0, 0, 0].round(3).tolist()
    [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 2.0, 0.0]]
    """
    tokens = reader.shape[3]
    if log_decay.shape[-1] == 1:
        earlier = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
        weights = jnp.where(earlier, jnp.exp(sums_between(log_decay)[..., 0]), 0)
        return jnp.einsum("bhncd,bhnmd->bhncm", reader, key, precision=precision) * weights
    sub = min(tokens, SUB_CHUNK)
    reader, key, log_decay = (
        y.reshape(*y.shape[:3], tokens // sub, sub, y.shape[-1]) for y in (reader, key, log_decay)
    )
    within = _within(reader, key, log_decay)
    if tokens == sub:
        return within[:, :, :, 0]
    across = _across(reader, key, log_decay, precision)
    diagonal = jnp.eye(tokens // sub, dtype=reader.dtype)[:, None, :, None]
    scores = across + diagonal * within[..., None, :]
    return scores.reshape(*reader.shape[:3], tokens, tokens)


def _within(reader: jax.Array, key: jax.Array, log_decay: jax.Array) -> jax.Array:
    """Scores inside each sub-chunk. [b, h, n, s, c, d] -> [b, h, n, s, c, c]."""
    sub = reader.shape[-2]
    earlier = jnp.tril(jnp.ones((sub, sub), bool), -1)[..., None]
    weights = jnp.where(earlier, jnp.exp(sums_between(log_decay)), 0)
    return jnp.sum(reader[..., :, None, :] * key[..., None, :, :] * weights, axis=-1)


def _across(reader: jax.Array, key: jax.Array, log_decay: jax.Array, precision) -> jax.Array:
    """Scores with the tokens of earlier sub-chunks, else 0.

    [b, h, n, s, c, d] -> [b, h, n, s (i), c (i), s (j), c (j)].
    """
    count, sub = reader.shape[3:5]
    before, after = sums_around(log_decay, jnp.ones((sub, sub), bool))
    whole = sums_between(jnp.sum(log_decay, axis=-2))  # of the sub-chunks in between
    earlier = jnp.tril(jnp.ones((count, count), bool), -1)[:, :, None, None]
    to_start = after[:, :, :, None] + whole[..., None, :]
    keys = key[:, :, :, None] * jnp.where(earlier, jnp.exp(to_start), 0)
    readers = reader * jnp.exp(before)
    return jnp.einsum("bhnscd,bhnsmjd->bhnscmj", readers, keys, precision=precision)
