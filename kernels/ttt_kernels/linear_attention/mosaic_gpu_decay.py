"""The decays of a call in the form that the Mosaic GPU kernels read.

Document boundaries are decays too: a log decay of -200 is an exact zero in float32, so the first
token of a document wipes the state, and the kernels need no notion of documents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ttt_kernels.linear_attention.tiling import BLOCK, blocks

WIPE = -200.0
"""A log decay whose exponential is exactly zero in float32."""


def segment_edges(length: int, segments: int) -> np.ndarray:
    """First block of each segment and, last, the number of blocks, [segments + 1]."""
    n = blocks(length)
    return np.arange(segments + 1) * n // segments


def block_sums(log_decay: jax.Array) -> jax.Array:
    """Running sums of log decays that start anew in every block of 64 tokens.

    A plain float32 sum of 64 is exact enough beside bf16 products.

    Args:
      log_decay: [batch, time, heads] float32.

    Returns:
      [batch, heads, blocks * 64] float32; tokens past the end repeat the last sum.
    """
    batch, length, heads = log_decay.shape
    n = blocks(length)
    x = jnp.pad(log_decay, ((0, 0), (0, n * BLOCK - length), (0, 0)))
    x = jnp.moveaxis(x.reshape(batch, n, BLOCK, heads), 3, 1)
    return jnp.cumsum(x, axis=-1).reshape(batch, heads, n * BLOCK)


def padding(real: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Which tokens are real, and which blocks hold padding, as the kernels read it.

    Args:
      real: [batch, time] bool, or None where no row has padding.

    Returns:
      ([batch, blocks * 64] float32, [batch, blocks] int32), or (None, None).
    """
    if real is None:
        return None, None
    batch, length = real.shape
    n = blocks(length)
    real = jnp.pad(real, ((0, 0), (0, n * BLOCK - length)), constant_values=True)
    padded = ~jnp.all(real.reshape(batch, n, BLOCK), axis=-1)
    return real.astype(jnp.float32), padded.astype(jnp.int32)
