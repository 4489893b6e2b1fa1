"""Causal attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from ttt_jax.layers.attention_blocks import KeyValue, blocks_with_previous, join, visible

_ALIGNMENT = 64


def obstacle(q, window, documents, previous) -> Exception | None:
    """Why cuDNN cannot run a call, as the error to raise where it was asked for by name.

    Args:
      q: [batch, time, heads, head_dim].
      window: as in `causal_attention`.
      documents: likewise.
      previous: likewise.

    Returns:
      A ValueError or NotImplementedError that is not raised, or None.

    >>> print(obstacle(jnp.ones((1, 2, 1, 8)), None, None, KeyValue(None, None, None)))
    implementation='cudnn' has no cache: decode with 'auto' or 'xla'
    """
    if previous is not None:
        return ValueError("implementation='cudnn' has no cache: decode with 'auto' or 'xla'")
    if documents is not None and window is None:
        return ValueError(
            "implementation='cudnn' has packed documents only with a window: set window, leave"
            " segment_ids out, or use 'auto' or 'xla'"
        )
    if jax.default_backend() != "gpu":
        return NotImplementedError(
            f"implementation='cudnn' needs a GPU, the backend is {jax.default_backend()!r};"
            " 'auto' and 'xla' run here"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] % 8 or q.shape[-1] > 128:
        return NotImplementedError(
            f"implementation='cudnn' needs bfloat16 or float16 and a head size that is a multiple"
            f" of 8 up to 128, not {q.dtype} and {q.shape[-1]}; 'auto' and 'xla' run this"
        )
    return None


def attention(q, k, v, window, documents):
    """As `causal_attention`, for a call without `obstacle`.

    Args:
      q: [batch, time, heads, head_dim], bfloat16 or float16.
      k: likewise.
      v: likewise.
      window: tokens that a query sees, or None.
      documents: [batch, time], int32, or None.

    Returns:
      Like q.
    """
    if documents is None:
        length = q.shape[1]
        local = None if window is None or window >= length else (window - 1, 0)
        # cuDNN has no gradient for odd lengths; causality hides what is put behind.
        tail = ((0, 0), (0, -length % 2), (0, 0), (0, 0))
        q, k, v = (jnp.pad(x, tail) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation="cudnn"
        )
        return out[:, :length]
    return packed_attention(q, KeyValue(k, v, documents), window, "cudnn")


def packed_attention(q, own: KeyValue, window: int, implementation: str):
    """Window attention within documents: blocks side by side in the batch, each with its mask.

    The kernel takes a mask of [blocks, 1, size, 2 · size] booleans, which is linear in the
    length; the scores never leave the chip.

    Args:
      q: [batch, time, heads, head_dim].
      own: keys, values and documents.
      window: tokens that a query sees.
      implementation: of `jax.nn.dot_product_attention`: "cudnn", or "xla" to test the blocks.

    Returns:
      Like q.

    >>> x = jnp.ones((1, 6, 2, 8))
    >>> documents = jnp.array([[0, 0, 0, 1, 1, 1]])
    >>> packed_attention(x, KeyValue(x, x, documents), 4, "xla").shape
    (1, 6, 2, 8)
    """
    batch, time, heads, dim = q.shape
    size = -(-min(window, time) // _ALIGNMENT) * _ALIGNMENT
    q, own, before = blocks_with_previous(q, own, size, None)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, own, before))
    q, own, before = flat
    keys = join(before, own)
    mask = visible(
        size + jnp.arange(size), jnp.arange(2 * size), window, own.document, keys.document
    )
    out = jax.nn.dot_product_attention(
        q, keys.key, keys.value, mask=mask, implementation=implementation
    )
    out = jnp.moveaxis(out.reshape(-1, batch, size, heads, dim), 0, 1)
    return out.reshape(batch, -1, heads, dim)[:, :time]
