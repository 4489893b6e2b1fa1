"""What the Mosaic GPU kernels of linear attention share: the plan of a launch, tiles and loads."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling, blocks

MEMORY_REGISTERS = 40
COMPUTE_REGISTERS = 232


class Decay(NamedTuple):
    """Sums of log decays as the kernels read them, all float32."""

    sums: jax.Array  # [batch, heads, blocks * 64], from the start of the token's block to it
    to_edge: jax.Array  # [batch, heads, blocks], from the block's far side to its segment's edge
    segment: jax.Array  # [batch, heads, segments], factor of a whole segment


@dataclasses.dataclass(frozen=True)
class Plan:
    """What both kernel bodies need to know, all static."""

    tiling: Tiling
    batch: int
    length: int
    heads: int
    decay: bool
    reverse: bool

    def segment_blocks(self, segment):
        """First block and number of blocks of a segment; they differ by at most one block."""
        n = blocks(self.length)
        low = lax.div(segment * n, self.tiling.segments)
        high = lax.div((segment + 1) * n, self.tiling.segments)
        return low, high - low

    def head(self, group, warpgroup):
        """The head that a warpgroup works on."""
        return group * 2 + warpgroup if self.tiling.heads_per_cta == 2 else group

    def column(self, slab, warpgroup):
        """First value column of a warpgroup."""
        if self.tiling.heads_per_cta == 2:
            return 0
        return (slab * COMPUTE_WARPGROUPS + warpgroup) * self.tiling.columns

    def grid(self, segments: int) -> dict:
        """Grid, threads and names of a launch."""
        groups = self.heads // self.tiling.heads_per_cta
        return dict(
            grid=(self.tiling.slabs, groups, segments, self.batch),
            grid_names=("slab", "group", "segment", "batch"),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
        )


def tile(tiling: Tiling, *shape: int):
    """A bf16 tile in shared memory. Both operands of a wgmma must have the same swizzle."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, tiling.columns)),
                  plgpu.SwizzleTransform(tiling.swizzle))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def load_blocks(plan: Plan, copies, full, free, first, count, order):
    """The memory warpgroup's loop: `copies(slot, token, barrier)` for each block of the ring."""
    plgpu = compat.mosaic_gpu()
    stages = full.shape[0]
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(stages))

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copies(slot, (first + order(i, count)) * BLOCK, full.at[slot])

    # A producer must outlive its consumers' last arrivals.
    @pl.loop(lax.max(count - stages, jnp.int32(0)), count)
    def _(i):
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])


def forwards(i, count):
    """Block of step `i` of `count` when a segment is walked from its start."""
    del count
    return i


def backwards(i, count):
    """Block of step `i` of `count` when a segment is walked from its end."""
    return count - 1 - i


def rows(x, columns: int):
    """Broadcasts one value a row over `columns` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def load_vector(ref, axis: int):
    """Reads 64 float32s of global memory, one a row (axis 1) or column (axis 0) of a tile."""
    plgpu = compat.mosaic_gpu()
    return compat.load(ref, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=False)


def weigh_values(values, weights, scaled):
    """Writes `weights[:, None] * values` to shared memory for the tensor core."""
    plgpu = compat.mosaic_gpu()
    x = compat.load(values, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    scaled[...] = (x * rows(weights, x.shape[1])).astype(jnp.bfloat16)
    plgpu.commit_smem()


def copy_values(plan: Plan, ref, slots, slot, batch, group, slab, token, barrier):
    """Starts the copies of a block's value columns, one for each compute warpgroup."""
    plgpu = compat.mosaic_gpu()
    for w in range(COMPUTE_WARPGROUPS):
        columns = pl.ds(plan.column(slab, w), plan.tiling.columns)
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, w), columns]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, w], barrier)


def copy_keys(plan: Plan, ref, slots, slot, batch, group, token, barrier):
    """Starts the copies of a block's keys (or queries), one for each head of the CTA."""
    plgpu = compat.mosaic_gpu()
    for g in range(plan.tiling.heads_per_cta):
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, g)]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, g], barrier)


def own(plan: Plan, warpgroup):
    """Index of a warpgroup's head among those the CTA has loaded."""
    return warpgroup if plan.tiling.heads_per_cta == 2 else 0
