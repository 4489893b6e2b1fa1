"""The kernel of the chunk summaries `k^T v` on Hopper GPUs.

Persistent: as many thread blocks as the chip holds go through the tiles of all states, and the
loads of the next tile run while the last one is stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.chunk_products import tiling as tilings
from ttt_kernels.chunk_products.mosaic_gpu_common import MEMORY_REGISTERS, drain, ring, tile
from ttt_kernels.chunk_products.tiling import BLOCK, SummaryTiling

_COMPUTE_REGISTERS = {1: 232, 2: 232, 3: 152}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the kernel needs to know, all static."""

    tiling: SummaryTiling
    chunk_size: int
    chunks: int
    heads: int
    row_tiles: int  # of a state, in clusters
    column_tiles: int
    units: int

    @property
    def blocks(self) -> int:
        """Blocks of 64 tokens in a chunk."""
        return self.chunk_size // BLOCK

    @property
    def clusters(self) -> int:
        """Clusters launched."""
        return min(self.units, tilings.HOPPER_MULTIPROCESSORS // self.tiling.cluster)

    def locate(self, unit):
        """(batch, head, chunk, first row, first column) of a unit.

        The tiles of one state are neighbours: what they share is read from memory once.
        """
        unit, column = lax.div(unit, self.column_tiles), lax.rem(unit, self.column_tiles)
        unit, row = lax.div(unit, self.row_tiles), lax.rem(unit, self.row_tiles)
        unit, chunk = lax.div(unit, self.chunks), lax.rem(unit, self.chunks)
        row = row * self.tiling.cluster
        if self.tiling.cluster > 1:
            row = row + lax.axis_index("member")
        row, column = row * self.tiling.rows, column * self.tiling.columns
        return lax.div(unit, self.heads), lax.rem(unit, self.heads), chunk, row, column


def summaries(
    k: jax.Array, v: jax.Array, chunk_size: int, dtype: jnp.dtype, tiling: SummaryTiling, interpret
) -> jax.Array:
    """`k^T v` over each chunk.

    Args:
      k, v: [batch, time, heads, dim] bf16, dims multiples of 64, time a multiple of 8.
      chunk_size: tokens a chunk, a multiple of 64.
      dtype: of the result, float32 or bfloat16.
      tiling: one of `tiling.summary_options`.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, heads, chunks, key_dim, value_dim] in `dtype`.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = k.shape
    value_dim, chunks = v.shape[-1], -(-length // chunk_size)
    row_tiles = key_dim // (tiling.rows * tiling.cluster)
    column_tiles = value_dim // tiling.columns
    units = batch * heads * chunks * row_tiles * column_tiles
    plan = _Plan(tiling, chunk_size, chunks, heads, row_tiles, column_tiles, units)

    def chunk_summaries(*refs):
        _body(plan, refs)

    released = dict(num_arrivals=tiling.warpgroups, num_barriers=tiling.stages)
    cluster = {}
    free = plgpu.Barrier(**released)
    if tiling.cluster > 1:
        cluster = dict(cluster=(tiling.cluster,), cluster_names=("member",))
        free = plgpu.ClusterBarrier(collective_axes=("member",), **released)
    scratch = [
        tile(tiling.stages, tiling.warpgroups, BLOCK, BLOCK),
        tile(tiling.stages, BLOCK, tiling.columns),
        plgpu.Barrier(num_arrivals=tiling.warpgroups + 1, num_barriers=tiling.stages),
        free,
    ]
    if dtype == jnp.bfloat16:
        scratch.append(tile(tiling.warpgroups, BLOCK, BLOCK))
    call = compat.gpu_kernel(
        chunk_summaries,
        out_type=jax.ShapeDtypeStruct((batch, heads, chunks, key_dim, value_dim), dtype),
        scratch_types=scratch,
        grid=(plan.clusters,),
        grid_names=("cta",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        **cluster,
    )
    return call(k, v)


def _body(plan: _Plan, refs) -> None:
    """The kernel: the memory warpgroup's loop, and the compute warpgroups'."""
    plgpu = compat.mosaic_gpu()
    tiling = plan.tiling
    k_ref, v_ref, out_ref, ks, vs, full, free, *staging = refs
    cta, w = lax.axis_index("cta"), lax.axis_index("warpgroup")
    units = lax.div(plan.units - cta + plan.clusters - 1, plan.clusters)
    steps = units * plan.blocks

    @pl.when(w == tiling.warpgroups)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @ring(steps, free, 0, tiling.stages)
        def _(step, slot):
            unit = cta + lax.div(step, plan.blocks) * plan.clusters
            b, h, chunk, row, column = plan.locate(unit)
            token = pl.ds(chunk * plan.chunk_size + lax.rem(step, plan.blocks) * BLOCK, BLOCK)
            for i in range(tiling.warpgroups):
                source = k_ref.at[b, token, h, pl.ds(row + i * BLOCK, BLOCK)]
                plgpu.copy_gmem_to_smem(source, ks.at[slot, i], full.at[slot])
            source = v_ref.at[b, token, h, pl.ds(column, tiling.columns)]
            shared = dict(collective_axes="member") if tiling.cluster > 1 else {}
            plgpu.copy_gmem_to_smem(source, vs.at[slot], full.at[slot], **shared)

        drain(steps, free, 0, tiling.stages)

    @pl.when(w < tiling.warpgroups)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS[tiling.warpgroups], action="increase")

        @pl.loop(0, units)
        def _(u):
            def compute(acc):
                @pl.loop(0, plan.blocks)
                def _(i):
                    slot = lax.rem(u * plan.blocks + i, jnp.int32(tiling.stages))
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, ks.at[slot, w].transpose((1, 0)), vs.at[slot])
                    plgpu.wgmma_wait(1)

                    @pl.when(i > 0)
                    def _():
                        last = u * plan.blocks + i + (tiling.stages - 1)
                        plgpu.barrier_arrive(free.at[lax.rem(last, jnp.int32(tiling.stages))])

                value = acc[...]
                last = (u + 1) * plan.blocks - 1
                plgpu.barrier_arrive(free.at[lax.rem(last, jnp.int32(tiling.stages))])
                return value

            shape = (BLOCK, tiling.columns)
            value = pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
            b, h, chunk, row, column = plan.locate(cta + u * plan.clusters)
            target = out_ref.at[b, h, chunk, pl.ds(row + w * BLOCK, BLOCK)]
            if not staging:
                target.at[:, pl.ds(column, tiling.columns)][...] = value
                return
            for i in range(tiling.columns // BLOCK):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging[0].at[w][...] = value[:, i * BLOCK:(i + 1) * BLOCK].astype(jnp.bfloat16)
                plgpu.commit_smem()
                columns = pl.ds(column + i * BLOCK, BLOCK)
                plgpu.copy_smem_to_gmem(staging[0].at[w], target.at[:, columns])

        if staging:
            plgpu.wait_smem_to_gmem(0)
