"""Tiles in registers: broadcasts, masks and the decays within a block of 64 tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ttt_kernels import compat
from ttt_kernels.linear_attention.tiling import BLOCK


def rows(x, columns: int):
    """Broadcasts one value a row over `columns` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def load_vector(ref, axis: int):
    """Reads 64 float32s of memory, one a row (axis 1) or column (axis 0) of a tile."""
    plgpu = compat.mosaic_gpu()
    return compat.load(ref, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=False)


def triangle(upper: bool):
    """[64, 64] mask of row <= column (`upper`), or of row >= column."""
    plgpu = compat.mosaic_gpu()
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    return row <= column if upper else row >= column


def decay_between(sums, reverse: bool):
    """Factor of each pair (row, column) of a block: 0 where not seen, else the decay in between.

    `sums` are a block's sums of log decays along rows and along columns, or None for 1.
    """
    seen = triangle(reverse)
    if sums is None:
        return jnp.where(seen, 1.0, 0.0)
    row, column = rows(sums[0], BLOCK), lax.broadcast_in_dim(sums[1], (BLOCK, BLOCK), (1,))
    fall = column - row if reverse else row - column
    # Masked before the exponential: on the other side the difference is positive without bound.
    return jnp.exp(jnp.where(seen, fall, -1e30))


def state_factors(sums, total, reverse: bool) -> tuple:
    """Decays of what each token of a block reads of the state, and of the state over the block.

    Args:
      sums: [64] sums of the block's log decays, one a row.
      total: the last of them.
      reverse: whether the state comes from the block's end.
    """
    return jnp.exp(total - sums if reverse else sums), jnp.exp(total)


def running_sums(log_decay) -> tuple:
    """Sums of a block's log decays up to each token, and behind it.

    Args:
      log_decay: [64] f32, one a column of a tile.

    Returns:
      Two of [64] f32, one a row; they add up to the whole block's.
    """
    x = lax.broadcast_in_dim(log_decay, (BLOCK, BLOCK), (1,))
    before = triangle(False)
    return tuple(jnp.sum(jnp.where(before, *pair), axis=1) for pair in ((x, 0.0), (0.0, x)))


def weigh_values(values, weights, scaled):
    """Writes `weights[:, None] * values` to shared memory; `commit_smem` is the caller's."""
    plgpu = compat.mosaic_gpu()
    x = compat.load(values, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    scaled[...] = (x * rows(weights, x.shape[1])).astype(jnp.bfloat16)
