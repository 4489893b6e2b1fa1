"""What the kernels of the chunk products share: tiles, a ring's loading side, plans of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.chunk_products.tiling import BLOCK, OutputTiling, RegisterTiling

MEMORY_REGISTERS = 40
SWIZZLE = 128  # bytes


@dataclasses.dataclass(frozen=True)
class OutputPlan:
    """What a kernel of the outputs needs to know, all static."""

    tiling: OutputTiling | RegisterTiling
    length: int
    chunk_size: int
    chunks: int
    heads: int
    slabs: int
    transposed: bool
    rated: bool
    portable: bool  # only what the interpreter can run

    def locate(self, cta):
        """(batch, head, chunk, first column, first block, number of blocks) of a thread block.

        The column slabs of one state are neighbours: their tokens are read from memory once.
        """
        cta, slab = lax.div(cta, self.slabs), lax.rem(cta, self.slabs)
        cta, part = lax.div(cta, self.tiling.parts), lax.rem(cta, self.tiling.parts)
        cta, chunk = lax.div(cta, self.chunks), lax.rem(cta, self.chunks)
        tokens = lax.min(self.length - chunk * self.chunk_size, jnp.int32(self.chunk_size))
        blocks = lax.div(tokens + BLOCK - 1, BLOCK)
        low = lax.div(part * blocks, self.tiling.parts)
        high = lax.div((part + 1) * blocks, self.tiling.parts)
        b, h = lax.div(cta, self.heads), lax.rem(cta, self.heads)
        return b, h, chunk, slab * self.tiling.columns, low, high - low


def tile(*shape: int, dtype=jnp.bfloat16):
    """A buffer in shared memory, swizzled for wgmma."""
    plgpu = compat.mosaic_gpu()
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ring(steps, free, first: int, stages: int) -> Callable:
    """Decorator that runs `load(step, slot)` for each step, when the slot has been released.

    Args:
      steps: number of steps, may be traced.
      free: barriers at which consumers release the slots.
      first: index of slot 0's barrier.
      stages: slots.
    """
    plgpu = compat.mosaic_gpu()

    def run(load) -> None:
        @pl.loop(0, steps)
        def _(step):
            slot = lax.rem(step, jnp.int32(stages))

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(free.at[first + slot])

            load(step, slot)

    return run


def drain(steps, free, first: int, stages: int) -> None:
    """Waits for the last releases: a producer must outlive its consumers' arrivals."""
    plgpu = compat.mosaic_gpu()

    @pl.loop(lax.max(steps - stages, jnp.int32(0)), steps)
    def _(step):
        plgpu.barrier_wait(free.at[first + lax.rem(step, jnp.int32(stages))])


def load_tile(ref):
    """Reads a tile of shared memory into registers, in the layout of wgmma."""
    return compat.load(ref, layout=compat.mosaic_gpu().Layout.WGMMA, optimized=False)


def load_vector(ref, axis: int):
    """Reads 64 float32s of memory, one a row (axis 1) or column (axis 0) of a tile."""
    layout = compat.mosaic_gpu().Layout.WGMMA.reduce(axis)
    return compat.load(ref, layout=layout, optimized=False)
