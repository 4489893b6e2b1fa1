"""The kernel of the chunk summaries `k^T v` on Hopper GPUs.

Persistent: as many thread blocks as the chip holds go through the tiles of all states, and the
loads of the next tile run while the last one is stored. With rates a compute warpgroup multiplies
its keys by them on their way from shared memory into registers, from which the tensor core then
reads them; the other warpgroups' products run meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.chunk_products import tiling as tilings
from ttt_kernels.chunk_products.mosaic_gpu_common import (
    MEMORY_REGISTERS,
    SWIZZLE,
    drain,
    load_tile,
    load_vector,
    ring,
    tile,
)
from ttt_kernels.chunk_products.tiling import BLOCK, SummaryTiling

_COMPUTE_REGISTERS = {1: 232, 2: 232, 3: 152}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the kernel needs to know, all static."""

    tiling: SummaryTiling
    chunk_size: int
    chunks: int
    heads: int
    row_tiles: int  # of a state
    column_tiles: int
    units: int
    rated: bool
    portable: bool  # scaled keys go back to shared memory: what the interpreter can run

    @property
    def blocks(self) -> int:
        """Blocks of 64 tokens in a chunk."""
        return self.chunk_size // BLOCK

    @property
    def ctas(self) -> int:
        """Thread blocks launched."""
        return min(self.units, tilings.HOPPER_MULTIPROCESSORS)

    def locate(self, unit):
        """(batch, head, chunk, first row, first column) of a unit, a tile of a state.

        The tiles of one state are neighbours: what they share is read from memory once.
        """
        unit, column = lax.div(unit, self.column_tiles), lax.rem(unit, self.column_tiles)
        unit, row = lax.div(unit, self.row_tiles), lax.rem(unit, self.row_tiles)
        unit, chunk = lax.div(unit, self.chunks), lax.rem(unit, self.chunks)
        row, column = row * self.tiling.rows, column * self.tiling.columns
        return lax.div(unit, self.heads), lax.rem(unit, self.heads), chunk, row, column


def summaries(
    k: jax.Array,
    v: jax.Array,
    rates: jax.Array | None,
    chunk_size: int,
    dtype: jnp.dtype,
    tiling: SummaryTiling,
    interpret,
) -> jax.Array:
    """`sum_t rate_t k_t^T v_t` over each chunk.

    Args:
      k, v: [batch, time, heads, dim] bf16, dims multiples of 64, time a multiple of 8.
      rates: [batch, heads, time] float32, time a multiple of 64, or None for 1.
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
    row_tiles = key_dim // tiling.rows
    column_tiles = value_dim // tiling.columns
    units = batch * heads * chunks * row_tiles * column_tiles
    rated = rates is not None
    portable = interpret is not None or compat.layout_problem() is not None
    plan = _Plan(
        tiling, chunk_size, chunks, heads, row_tiles, column_tiles, units, rated, portable
    )

    def chunk_summaries(*refs):
        _body(plan, refs)

    copies = tiling.warpgroups + 1 + rated
    scratch = [
        tile(tiling.warpgroups, BLOCK, SWIZZLE // dtype.itemsize, dtype=dtype),
        tile(tiling.stages, tiling.warpgroups, BLOCK, BLOCK),
        tile(tiling.stages, BLOCK, tiling.columns),
        plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
        plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=tiling.stages),
    ]
    if rated:
        scratch.append(plgpu.SMEM((tiling.stages, BLOCK), jnp.float32))
    call = compat.gpu_kernel(
        chunk_summaries,
        out_type=jax.ShapeDtypeStruct((batch, heads, chunks, key_dim, value_dim), dtype),
        scratch_types=scratch,
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return call(k, v, *([rates] if rated else []))


class _Ring(NamedTuple):
    """Shared memory of the blocks of tokens on their way, one slot a stage, and its barriers."""

    keys: object  # a tile of 64 columns for each compute warpgroup
    values: object
    full: object
    free: object
    rates: object = None


def _body(plan: _Plan, refs) -> None:
    """The kernel: the memory warpgroup's loop, and the compute warpgroups'."""
    plgpu = compat.mosaic_gpu()
    tiling = plan.tiling
    k_ref, v_ref, *rest = refs
    rates_ref = rest.pop(0) if plan.rated else None
    out_ref, staging, *buffers = rest
    slots = _Ring(*buffers)
    cta, w = lax.axis_index("cta"), lax.axis_index("warpgroup")
    units = lax.div(plan.units - cta + plan.ctas - 1, plan.ctas)
    steps = units * plan.blocks

    @pl.when(w == tiling.warpgroups)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        @ring(steps, slots.free, 0, tiling.stages)
        def _(step, slot):
            unit = cta + lax.div(step, plan.blocks) * plan.ctas
            b, h, chunk, row, column = plan.locate(unit)
            token = pl.ds(chunk * plan.chunk_size + lax.rem(step, plan.blocks) * BLOCK, BLOCK)
            full = slots.full.at[slot]
            for i in range(tiling.warpgroups):
                source = k_ref.at[b, token, h, pl.ds(row + i * BLOCK, BLOCK)]
                plgpu.copy_gmem_to_smem(source, slots.keys.at[slot, i], full)
            source = v_ref.at[b, token, h, pl.ds(column, tiling.columns)]
            plgpu.copy_gmem_to_smem(source, slots.values.at[slot], full)
            if plan.rated:
                plgpu.copy_gmem_to_smem(rates_ref.at[b, h, token], slots.rates.at[slot], full)

        drain(steps, slots.free, 0, tiling.stages)

    @pl.when(w < tiling.warpgroups)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS[tiling.warpgroups], action="increase")

        @pl.loop(0, units)
        def _(u):
            value = _sum_chunk(plan, slots, u * plan.blocks, w)
            b, h, chunk, row, column = plan.locate(cta + u * plan.ctas)
            # Through shared memory: stores from registers take 2 us more at 64 x 384^2 in float32.
            buffer, width = staging.at[w], staging.shape[-1]
            for i in range(tiling.columns // width):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer[...] = value[:, i * width:(i + 1) * width].astype(out_ref.dtype)
                plgpu.commit_smem()
                rows, columns = pl.ds(row + w * BLOCK, BLOCK), pl.ds(column + i * width, width)
                plgpu.copy_smem_to_gmem(buffer, out_ref.at[b, h, chunk, rows, columns])

        plgpu.wait_smem_to_gmem(0)


def _sum_chunk(plan: _Plan, slots: _Ring, first, w):
    """A warpgroup's rows of a tile, [64, columns] float32, from the steps from `first` on."""
    plgpu = compat.mosaic_gpu()
    stages = jnp.int32(plan.tiling.stages)
    in_registers = plan.rated and not plan.portable

    def release(step):
        plgpu.barrier_arrive(slots.free.at[lax.rem(step, stages)])

    def compute(acc):
        @pl.loop(0, plan.blocks)
        def _(i):
            slot = lax.rem(first + i, stages)
            keys, values = slots.keys.at[slot, w], slots.values.at[slot]
            plgpu.barrier_wait(slots.full.at[slot])
            if in_registers:
                plgpu.wgmma(acc, _rated(keys, slots.rates.at[slot]), values)
                # Before anything else: the compiler reuses the registers that the product reads.
                plgpu.wgmma_wait(0)
                release(first + i)
                return
            if plan.rated:
                _rate_in_place(keys, slots.rates.at[slot])
            plgpu.wgmma(acc, keys.transpose((1, 0)), values)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: release(first + i - 1))

        value = acc[...]
        if not in_registers:
            release(first + plan.blocks - 1)
        return value

    shape = (BLOCK, plan.tiling.columns)
    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def _rated(keys, rates):
    """A tile's [64 tokens, 64 columns] times its tokens' rates, transposed, in registers."""
    x = load_tile(keys.transpose((1, 0))).astype(jnp.float32)
    rates = lax.broadcast_in_dim(load_vector(rates, 0), x.shape, (1,))
    return (x * rates).astype(jnp.bfloat16)


def _rate_in_place(keys, rates) -> None:
    """Multiplies a tile by its tokens' rates in shared memory."""
    x = load_tile(keys).astype(jnp.float32)
    rates = lax.broadcast_in_dim(load_vector(rates, 1), x.shape, (0,))
    keys[...] = (x * rates).astype(jnp.bfloat16)
    compat.mosaic_gpu().commit_smem()
