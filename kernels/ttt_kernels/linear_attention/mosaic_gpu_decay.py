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
      log_decay: [batch, time, heads] float32, time a multiple of 64; below -200 counts as that.

    Returns:
      [batch, heads, time] float32.
    """
    batch, length, heads = log_decay.shape
    x = jnp.maximum(log_decay, WIPE).reshape(batch, length // BLOCK, BLOCK, heads)
    return jnp.cumsum(jnp.moveaxis(x, 3, 1), axis=-1).reshape(batch, heads, length)


def padding(real: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Which tokens are real, and which blocks hold padding, as the kernels read it.

    Args:
      real: [batch, time] bool, time a multiple of 64, or None where no row has padding.

    Returns:
      ([batch, time] float32, [batch, time / 64] int32), or (None, None).
    """
    if real is None:
        return None, None
    padded = ~jnp.all(real.reshape(real.shape[0], -1, BLOCK), axis=-1)
    return real.astype(jnp.float32), padded.astype(jnp.int32)
