"""Causal softmax attention over a sliding window, in memory linear in the length.

A query sees a key when 0 <= query index − key index < window and both lie in the same document.
Three implementations: XLA, block by block, for every dtype, device and packing; cuDNN's fused
kernel (`attention_cudnn`), for half precision on a GPU; splash attention (`attention_splash`) on a
TPU.
"""

import logging

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.layers import attention_cudnn, attention_splash
from ttt_jax.layers.attention_blocks import KeyValue, blocks_with_previous, join, visible
from ttt_jax.layers.rms_norm import at_least_float32
from ttt_kernels import compat

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")

# Queries handled at once: scores take query_block · (window + query_block) floats a head.
_QUERY_BLOCK = 512
_logged = set()


def document_indices(segment_ids):
    """Numbers the documents of each row: maximal runs of equal ids, padding being runs of −1.

    Args:
      segment_ids: [batch, time], int32.

    Returns:
      [batch, time], int32: 0 for the first run, 1 for the second, and so on. Two documents with
      the same id that do not touch get different numbers.

    >>> document_indices(jnp.array([[0, 0, 1, 0, -1]])).tolist()
    [[0, 0, 1, 2, 3]]
    """
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changes, axis=1, dtype=jnp.int32)


def document_positions(segment_ids):
    """The place of every token in its document, counted from zero.

    Args:
      segment_ids: [batch, time], int32.

    Returns:
      [batch, time], int32.

    >>> document_positions(jnp.array([[0, 0, 1, 1, 1]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(jnp.where(changes, index, 0), axis=1)


def masked_softmax_attention(q, k, v, visible):
    """softmax(q kᵀ / √head_dim) v over the visible keys.

    Args:
      q: [batch, queries, heads, head_dim], any float dtype.
      k: [batch, keys, heads, head_dim].
      v: [batch, keys, heads, head_dim].
      visible: bool, broadcastable to [batch, heads, queries, keys]. A query that sees no key gets
        the mean of all values: finite, and meant to be thrown away.

    Returns:
      [batch, queries, heads, head_dim] in q's dtype. Scores and softmax in at least float32.

    >>> q = jnp.ones((1, 2, 1, 4))
    >>> masked_softmax_attention(q, q, q, jnp.tri(2, dtype=bool)).shape
    (1, 2, 1, 4)
    """
    wide = at_least_float32(q.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=wide)
    scores = scores * q.shape[-1] ** -0.5
    scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(q, query_document, keys: KeyValue, *, offset: int, window: int):
    """Attention of one block of queries; query i and key i + offset are the same token.

    Long blocks go through in pieces of `_QUERY_BLOCK` queries, each against the keys its window
    can reach, and scores are recomputed in the backward pass.
    """
    time, span = q.shape[1], keys.key.shape[1]
    piece = min(time, _QUERY_BLOCK)
    count = -(-time // piece)
    reach = min(span, window - 1 + piece)

    def slice_of(x, start, size):
        return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1)

    @jax.checkpoint
    def attend_piece(index):
        # The last piece is moved back to end with the block: its first queries are computed
        # twice rather than padding every array.
        first = jnp.minimum(index * piece, time - piece)
        first_key = jnp.clip(first + offset - window + 1, 0, span - reach)
        mask = visible(
            first + offset + jnp.arange(piece),
            first_key + jnp.arange(reach),
            window,
            slice_of(query_document, first, piece),
            slice_of(keys.document, first_key, reach),
        )
        return masked_softmax_attention(
            slice_of(q, first, piece),
            slice_of(keys.key, first_key, reach),
            slice_of(keys.value, first_key, reach),
            mask,
        )

    if count == 1:
        return attend_piece(0)
    out = lax.map(attend_piece, jnp.arange(count))
    out = jnp.moveaxis(out, 0, 1)
    body = out[:, :-1].reshape(q.shape[0], (count - 1) * piece, *q.shape[2:])
    return jnp.concatenate([body, out[:, -1, count * piece - time :]], axis=1)


def _xla_attention(q, own: KeyValue, window: int, previous: KeyValue | None):
    """Each block of `window` queries against its own and the previous block of keys."""
    batch, time, heads, dim = q.shape
    if time <= window:
        keys = own if previous is None else join(previous, own)
        offset = 0 if previous is None else window
        return attend(q, own.document, keys, offset=offset, window=window)

    def attend_block(xs):
        q_block, block, before = xs
        keys = join(before, block)
        return attend(q_block, block.document, keys, offset=window, window=window)

    blocks = blocks_with_previous(q, own, window, previous)
    out = lax.map(jax.checkpoint(attend_block), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, dim)[:, :time]


def causal_attention(q, k, v, *, window=None, documents=None, previous=None, implementation="auto"):
    """Causal attention over the last `window` tokens of each token's document, itself included.

    Args:
      q: [batch, time, heads, head_dim], any float dtype.
      k: [batch, time, heads, head_dim].
      v: [batch, time, heads, head_dim].
      window: number of tokens that a query sees, at least 1; None for all earlier ones.
      documents: [batch, time], int32, from `document_indices`; None for one document a row.
      previous: the `window` keys and values before the first token, oldest first, with their
        documents (−2 where there is none); needs `documents` and `window`.
      implementation: "auto" (splash on a TPU and cuDNN on a GPU where they can, else XLA),
        "xla", "cudnn" or "splash".

    Returns:
      [batch, time, heads, head_dim] in q's dtype. The scores of at most
      512 × (window + 512) pairs a head exist at once.

    Raises:
      ValueError: for an unknown implementation, a window below 1, a kernel with a cache, or cuDNN
        with documents and no window.
      NotImplementedError: if a kernel is asked for and this device, dtype or head size cannot.

    >>> x = jnp.ones((1, 6, 2, 8))
    >>> causal_attention(x, x, x, window=4).shape
    (1, 6, 2, 8)
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {IMPLEMENTATIONS}")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, or None for all earlier tokens")
    chosen = choose(implementation, q, window, documents, previous)
    with jax.named_scope("attention"):
        if chosen == "cudnn":
            return attention_cudnn.attention(q, k, v, window, documents)
        if chosen == "splash":
            return attention_splash.attention(q, k, v, window, documents)
        window = max(q.shape[1], 1) if window is None else window
        return _xla_attention(q, KeyValue(k, v, documents), window, previous)


def choose(implementation, q, window, documents, previous) -> str:
    """The implementation to run; raises why a named one cannot."""
    if implementation == "xla":
        return "xla"
    kernel = implementation
    if implementation == "auto":
        kernel = "splash" if compat.target_platform() == "tpu" else "cudnn"
    if kernel == "splash":
        obstacle = attention_splash.obstacle(q, previous)
    else:
        obstacle = attention_cudnn.obstacle(q, window, documents, previous)
    if implementation != "auto":
        if obstacle is not None:
            raise obstacle
        return kernel
    chosen = kernel if obstacle is None else "xla"
    if chosen not in _logged:
        _logged.add(chosen)
        logging.info("attention: using %s%s", chosen, f" ({obstacle})" if obstacle else "")
    return chosen


def visible_pairs(time: int, window: int | None) -> int:
    """Number of (query, key) pairs that `causal_attention` weighs in one document.

    Args:
      time: number of tokens.
      window: as in `causal_attention`.

    Returns:
      Σ_t min(t, window), t = 1 .. time.

    >>> visible_pairs(4, 2), visible_pairs(4, None)
    (7, 10)
    """
    window = time if window is None else min(window, time)
    return window * (window + 1) // 2 + (time - window) * window
