"""Sums of matrix products in a row, in one launch on Hopper GPUs.

A cluster of CTAs takes a matrix through all steps of all iterations. Each step's result is cut
into tiles, dealt out to the CTAs in turn; results pass from CTA to CTA through global memory (in
fact the L2 cache) and a cluster barrier. In a CTA one warpgroup loads, through a ring that runs on
from tile to tile, and the others multiply 64 rows of the tile each.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.newton_schulz.mosaic_gpu_step import (
    BLOCK,
    Step,
    copy_in,
    copy_out,
    on_diagonal,
    span,
)

# Registers of a loading and of a computing thread, by the number of computing warpgroups.
_REGISTERS = {1: (40, 232), 2: (40, 232), 3: (40, 152)}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a launch is cut.

    Attributes:
      tile: rows of a tile, and columns of a symmetric matrix's: 64, 128 or 192.
      width: columns of another matrix's tile: 64, 128 or 192.
      cluster: CTAs a matrix, at most 8.
      stages: loads in flight in a CTA.
      apart: the CTAs of a matrix are no cluster, and may be any number; for a single step.
    """

    tile: int
    width: int
    cluster: int
    stages: int
    apart: bool = False

    @property
    def warpgroups(self) -> int:
        """Computing warpgroups of a CTA."""
        return self.tile // BLOCK

    def columns(self, step: Step) -> int:
        """Columns of a step's tiles."""
        return self.tile if step.symmetric else self.width

    def tiles(self, step: Step) -> int:
        """Number of a step's tiles that are computed: of a symmetric matrix, not those below the
        diagonal."""
        down, across = step.shape[0] // self.tile, step.shape[1] // self.columns(step)
        return down * (down + 1) // 2 if step.symmetric else down * across

    def corner(self, step: Step, index):
        """First row and first column of a tile, which are numbered row by row."""
        down, across = step.shape[0] // self.tile, step.shape[1] // self.columns(step)
        if not step.symmetric:
            row, column = lax.div(index, jnp.int32(across)), lax.rem(index, jnp.int32(across))
            return row * self.tile, column * self.width
        row = first = jnp.int32(0)
        for i in range(1, down):
            start = i * down - i * (i - 1) // 2
            row = jnp.where(index >= start, i, row)
            first = jnp.where(index >= start, start, first)
        return row * self.tile, (row + index - first) * self.tile


def launch(name, iteration, iterations, arrays, out_types, matrices, layout, interpret):
    """Runs `iterations` times the steps of `iteration` on every matrix.

    Args:
      name: of the kernel.
      iteration: (k, matrix, arrays' references, results' references) -> tuple of Steps, each of
        which may read what those before it wrote; k counts from 0.
      iterations: their number, at least 1.
      arrays: what is read.
      out_types: `jax.ShapeDtypeStruct`s of what is written.
      matrices: their number.
      layout: how it is cut.
      interpret: None, or the interpreter's parameters.

    Returns:
      The results, one array for each of `out_types`.
    """
    plgpu = compat.mosaic_gpu()
    tile, warpgroups, stages = layout.tile, layout.warpgroups, layout.stages

    def body(*refs):
        inputs = refs[: len(arrays)]
        outputs = refs[len(arrays) : len(arrays) + len(out_types)]
        ring = _Ring(layout, *refs[len(arrays) + len(out_types) :])
        matrix = lax.axis_index("matrix")

        def walk(visit):
            """Calls `visit(is the first, number of the first tile, step, done)`, step by step."""
            def once(k, done):
                start = 0
                for number, step in enumerate(iteration(k, matrix, inputs, outputs)):
                    done = visit((k == 0) & (number == 0), start, step, done)
                    start += layout.tiles(step)
                return done

            return lax.fori_loop(0, iterations, once, jnp.int32(0))

        w = lax.axis_index("warpgroup")

        @pl.when(w == warpgroups)
        def _():
            plgpu.set_max_registers(_REGISTERS[warpgroups][0], action="decrease")
            ring.load_all(walk)

        @pl.when(w < warpgroups)
        def _():
            plgpu.set_max_registers(_REGISTERS[warpgroups][1], action="increase")
            walk(ring.compute_step)
            ring.await_end()

    transforms = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))

    def shared(*shape):
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    body.__name__ = name
    if layout.apart:
        grid = dict(grid=(matrices, layout.cluster), grid_names=("matrix", "part"))
        written = plgpu.Barrier(num_arrivals=warpgroups + 1)
    else:
        grid = dict(grid=(matrices,), grid_names=("matrix",), cluster=(layout.cluster,),
                    cluster_names=("part",))  # fmt: skip
        written = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=warpgroups + 1)
    call = compat.gpu_kernel(
        body,
        out_type=list(out_types),
        scratch_types=[
            shared(stages, tile, BLOCK),
            plgpu.RefUnion(shared(stages, BLOCK, layout.width), shared(stages, tile, BLOCK)),
            shared(warpgroups, BLOCK, BLOCK),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            written,
        ],
        **grid,
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return call(*arrays)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Shared memory of a CTA, and what its warpgroups do with it."""

    layout: Layout
    lefts: jax.Array  # [stages, tile, BLOCK]
    rights: tuple  # one memory, as [stages, BLOCK, width] and, transposed, [stages, tile, BLOCK]
    staging: jax.Array  # [warpgroups, BLOCK, BLOCK]
    full: jax.Array  # a slot is loaded
    free: jax.Array  # a slot has been read
    written: jax.Array  # all CTAs have written their tiles of a step

    def slot(self, position):
        return lax.rem(position, jnp.int32(self.layout.stages))

    def own_tiles(self, step: Step, start: int):
        """The first of this CTA's tiles of a step, and how many it has."""
        parts = self.layout.cluster
        first = lax.rem(lax.axis_index("part") + (parts - start % parts), jnp.int32(parts))
        count = lax.div(self.layout.tiles(step) - first + parts - 1, jnp.int32(parts))
        return first, count

    def await_step(self, is_first) -> None:
        """Waits until the step before this one has been written."""
        @pl.when(jnp.logical_not(is_first))
        def _():
            compat.mosaic_gpu().barrier_wait(self.written)

    def await_end(self) -> None:
        """Waits for the last step: a CTA must outlive its cluster's arrivals."""
        compat.mosaic_gpu().barrier_wait(self.written)

    def load_all(self, walk) -> None:
        """The loading warpgroup: everything that the others need, as far ahead as the ring goes."""
        plgpu = compat.mosaic_gpu()
        done = walk(self.load_step)
        self.await_end()

        @pl.loop(lax.max(done - self.layout.stages, jnp.int32(0)), done)
        def _(position):
            plgpu.barrier_wait(self.free.at[self.slot(position)])

    def load_step(self, is_first, start, step: Step, done):
        """Loads a step's operands, once the step before it has been written; the loads done."""
        plgpu = compat.mosaic_gpu()
        tile, width = self.layout.tile, self.layout.columns(step)
        self.await_step(is_first)
        plgpu.barrier_arrive(self.written)  # nobody may be two steps ahead of a waiter
        first, count = self.own_tiles(step, start)

        def load_tile(i, done):
            top, left_edge = self.layout.corner(step, first + i * self.layout.cluster)
            rows, columns = pl.ds(top, tile), pl.ds(left_edge, width)
            for left, right in step.terms:
                done = self._load_term(step, left, right, rows, columns, done)
            if step.other is not None:
                for c in range(tile // BLOCK):
                    slot = self._free_slot(done + c)
                    index = (rows, pl.ds(left_edge + c * BLOCK, BLOCK))
                    copy_in(step.other, index, self.lefts.at[slot], self.full.at[slot])
                    plgpu.barrier_arrive(self.full.at[slot])  # in place of a right operand
                done = done + tile // BLOCK
            return done

        return lax.fori_loop(0, count, load_tile, done)

    def _free_slot(self, position):
        slot = self.slot(position)

        @pl.when(position >= self.layout.stages)
        def _():
            compat.mosaic_gpu().barrier_wait(self.free.at[slot])

        return slot

    def _load_term(self, step: Step, left, right, rows, columns, done):
        @pl.loop(0, step.inner // BLOCK)
        def _(i):
            slot = self._free_slot(done + i)
            copy_in(left, (rows, span(i)), self.lefts.at[slot], self.full.at[slot])
            index = (columns, span(i)) if step.symmetric else (span(i), columns)
            copy_in(right, index, self.rights[int(step.symmetric)].at[slot], self.full.at[slot])

        return done + step.inner // BLOCK

    def compute_step(self, is_first, start, step: Step, done):
        """A computing warpgroup's part of a step; the loads used."""
        plgpu = compat.mosaic_gpu()
        self.await_step(is_first)  # also without a tile: its arrival must not come too early
        blocks = self.layout.columns(step) // BLOCK
        w = lax.axis_index("warpgroup")
        first, count = self.own_tiles(step, start)

        def compute_tile(i, done):
            top, left_edge = self.layout.corner(step, first + i * self.layout.cluster)
            total, done = self._multiply(step, w, done)
            for c in range(blocks):
                corner = (top + w * BLOCK, left_edge + c * BLOCK)
                part = total[:, c * BLOCK : (c + 1) * BLOCK]
                part = self._weigh(step, w, part, corner, done + c).astype(jnp.bfloat16)
                self._store(w, part, step.out, corner)
                if step.symmetric:
                    @pl.when(top != left_edge)
                    def _(part=part, corner=corner):
                        mirrored = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                        self._store(w, mirrored, step.out, corner[::-1], transposed=True)
            return done if step.other is None else done + blocks

        done = lax.fori_loop(0, count, compute_tile, done)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.written)
        return done

    def _multiply(self, step: Step, w, done):
        """Sum of a tile's products, [64, tile] float32, and the loads used."""
        plgpu = compat.mosaic_gpu()
        loads = len(step.terms) * step.inner // BLOCK
        rows = span(w)

        def accumulate(acc):
            @pl.loop(0, loads)
            def _(i):
                slot = self.slot(done + i)
                plgpu.barrier_wait(self.full.at[slot])
                right = self.rights[int(step.symmetric)].at[slot]
                plgpu.wgmma(acc, self.lefts.at[slot, rows],
                            right.transpose((1, 0)) if step.symmetric else right)
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)  # the product before this one is done
                def _():
                    plgpu.barrier_arrive(self.free.at[self.slot(done + i - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free.at[self.slot(done + loads - 1)])
            return acc[...]

        shape = (BLOCK, self.layout.columns(step))
        return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32)), done + loads

    def _weigh(self, step: Step, w, total, corner, position):
        """The step's sum for a [64, 64] part; I is where column == row + offset."""
        plgpu = compat.mosaic_gpu()
        if step.weights is None:
            return total
        weights = step.weights()
        if step.other is None:
            return weights[0] * total
        slot = self.slot(position)
        plgpu.barrier_wait(self.full.at[slot])
        other = compat.load(self.lefts.at[slot, span(w)],
                            layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()  # the copy engine may only write after this read
        plgpu.barrier_arrive(self.free.at[slot])
        here = on_diagonal(total.shape, corner[0] - corner[1])
        diagonal = jnp.where(here, weights[2], jnp.float32(0.0))
        return weights[0] * total + weights[1] * other.astype(jnp.float32) + diagonal

    def _store(self, w, part, out, corner, transposed: bool = False) -> None:
        """Starts the store of a [64, 64] part of the result through shared memory."""
        plgpu = compat.mosaic_gpu()
        staging = self.staging.at[w]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        (staging.transpose((1, 0)) if transposed else staging)[...] = part
        plgpu.commit_smem()
        copy_out(staging, out, (pl.ds(corner[0], BLOCK), pl.ds(corner[1], BLOCK)))
