"""A ring of the last keys and values, for decoding in memory that does not grow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.layers.attention import causal_attention, masked_softmax_attention
from ttt_jax.layers.attention_blocks import NO_DOCUMENT, KeyValue


class AttentionCache(NamedTuple):
    """Keys and values of the last `window` tokens of each row.

    The token at position p of its row is in slot p mod window. Both arrays are
    [batch, window, heads, head_dim], in the compute dtype.
    """

    key: jax.Array
    value: jax.Array


def init_attention_cache(batch, window, heads, head_dim, dtype) -> AttentionCache:
    """An empty cache.

    Args:
      batch: number of rows.
      window: number of tokens kept.
      heads: number of heads.
      head_dim: size of a head.
      dtype: dtype of keys and values.

    Returns:
      Zeros.

    >>> init_attention_cache(2, 8, 1, 4, "float32").key.shape
    (2, 8, 1, 4)
    """
    shape = (batch, window, heads, head_dim)
    return AttentionCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def cached_attention(q, k, v, cache: AttentionCache, start, lengths, *, implementation="auto"):
    """Attention of new tokens over the cached and the new ones, and the cache after them.

    Args:
      q: [batch, time, heads, head_dim]: the new tokens, real ones first in every row.
      k: [batch, time, heads, head_dim].
      v: [batch, time, heads, head_dim].
      cache: keys and values of the tokens before; its length is the window.
      start: [batch], int32: how many tokens each row has seen before.
      lengths: [batch], int32: how many of the new tokens are real (0 .. time).
      implementation: as in `causal_attention`; only "auto" and "xla" can decode.

    Returns:
      ([batch, time, heads, head_dim] in q's dtype, the new cache). Outputs past `lengths` are
      finite and meaningless.

    >>> cache = init_attention_cache(1, 4, 1, 8, "float32")
    >>> x, one = jnp.ones((1, 2, 1, 8)), jnp.ones(1, jnp.int32)
    >>> out, cache = cached_attention(x, x, x, cache, 0 * one, 2 * one)
    >>> cache.key[0, :, 0, 0].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    window = cache.key.shape[1]
    written = _write(cache, k, v, start, lengths)
    if q.shape[1] == 1:
        # Slots are unordered, which softmax does not mind: slot s holds the newest position
        # that is congruent to it, or nothing when that is negative.
        last = (start + lengths - 1)[:, None]
        position = last - (last - jnp.arange(window)) % window
        with jax.named_scope("attention"):
            visible = (position >= 0)[:, None, None]
            return masked_softmax_attention(q, *written, visible), written
    slots = (start[:, None] + jnp.arange(window)) % window
    filled = start[:, None] - window + jnp.arange(window) >= 0
    previous = KeyValue(
        _take(cache.key, slots), _take(cache.value, slots), jnp.where(filled, 0, NO_DOCUMENT)
    )
    documents = jnp.zeros(q.shape[:2], jnp.int32)
    out = causal_attention(
        q,
        k,
        v,
        window=window,
        documents=documents,
        previous=previous,
        implementation=implementation,
    )
    return out, written


def _take(x, slots):
    return jnp.take_along_axis(x, slots[:, :, None, None], axis=1)


def _write(cache, k, v, start, lengths):
    """The ring after the new tokens: of those that share a slot the last one stays."""
    window, time = cache.key.shape[1], k.shape[1]
    index = jnp.arange(time)[None]
    kept = (index < lengths[:, None]) & (index >= lengths[:, None] - window)
    slots = jnp.where(kept, (start[:, None] + index) % window, window)
    rows = jnp.arange(k.shape[0])[:, None]
    return AttentionCache(
        cache.key.at[rows, slots].set(k.astype(cache.key.dtype), mode="drop"),
        cache.value.at[rows, slots].set(v.astype(cache.value.dtype), mode="drop"),
    )
