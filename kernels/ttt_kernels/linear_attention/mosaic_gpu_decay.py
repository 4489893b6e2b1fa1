"""The decays of a call in the forms that the Mosaic GPU kernels read: small XLA arithmetic.

Document boundaries are decays too: a log decay of -200 is an exact zero in float32, so the first
token of a document wipes the state, and the kernels need no notion of documents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention.decay import LogSum
from ttt_kernels.linear_attention.mosaic_gpu_common import Decay
from ttt_kernels.linear_attention.tiling import BLOCK, blocks

WIPE = -200.0
"""A log decay whose exponential is exactly zero in float32."""


def segment_edges(length: int, segments: int) -> np.ndarray:
    """First block of each segment and, last, the number of blocks, [segments + 1]."""
    n = blocks(length)
    return np.arange(segments + 1) * n // segments


def prepare(log_decay: jax.Array, segments: int, reverse: bool) -> Decay:
    """Log decays [batch, time, heads] float32 -> the kernels' arrays for one direction."""
    batch, length, heads = log_decay.shape
    n = blocks(length)
    x = jnp.pad(log_decay, ((0, 0), (0, n * BLOCK - length), (0, 0)))
    x = jnp.moveaxis(x.reshape(batch, n, BLOCK, heads), 3, 1)
    # Within 64 tokens a plain float32 sum is exact enough beside bf16 products.
    sums = jnp.cumsum(x, axis=-1)
    running = decays.cumulative(sums[..., -1], axis=-1, floor=BLOCK * WIPE)
    running = running.map(lambda y: jnp.pad(y, ((0, 0), (0, 0), (1, 0))))  # [b, h, n + 1]
    edges = segment_edges(length, segments)
    factors = decays.factor(running[..., edges[1:]], running[..., edges[:-1]])
    to_edge = _to_segment_edge(running, edges, reverse)
    return Decay(sums.reshape(batch, heads, n * BLOCK), to_edge, factors)


def _to_segment_edge(running: LogSum, edges: np.ndarray, reverse: bool) -> jax.Array:
    """Log decay from each block's far side to its segment's edge, [b, h, n]."""
    segment = np.searchsorted(edges, np.arange(edges[-1]), side="right") - 1
    if reverse:  # from the segment's start to the block's start
        later, earlier = running[..., :-1], running[..., edges[segment]]
    else:  # from the block's end to the segment's end
        later, earlier = running[..., edges[segment + 1]], running[..., 1:]
    return (later.whole - earlier.whole) + (later.part - earlier.part)
