"""What a computing warpgroup does in a step, where a pair of CTAs takes a matrix.

A result that is not symmetric is two strips a warpgroup. A symmetric one needs half of its blocks
and their mirror images. In the first round warpgroup w takes, on the diagonal of the CTA's panel,
the blocks (w, w), (w, w + 1), ..., cyclically, whose left operands lie in the panel too. In the
second, CTA 0 takes the first columns of the square below the diagonal, and CTA 1 the last column,
as a row above the diagonal.
"""

from __future__ import annotations

import dataclasses
import functools

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
    fence,
    on_diagonal,
    span,
)

_SLOTS = 3  # of a warpgroup's left operands, and of its results on their way out


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory and barriers of a CTA.

    Attributes:
      strips: s.
      panels: the right operand's panel by block rows, [2 s, 64, 64 s], and the same memory for a
        transposed operand, [2 s, 64 s, 64].
      lefts: [s, 3, 64, 64], for each warpgroup: blocks of left operands and of `other`, the n-th
        of a step in slot n % 3, and blocks of the result in slots that are empty.
      rows: [s, 64] float32, for each warpgroup: sums of the rows of a block.
      full: a block row of the panel is loaded.
      free: a block row of the panel has been used by all warpgroups.
      here: a slot of `lefts` is loaded.
      written: both CTAs have written their parts of a step.
      traced: both CTAs have written their traces.
    """

    strips: int
    panels: tuple
    lefts: jax.Array
    rows: jax.Array
    full: jax.Array
    free: jax.Array
    here: jax.Array
    written: jax.Array
    traced: jax.Array

    @staticmethod
    def types(strips: int) -> list:
        """Scratch types of all but `strips`."""
        plgpu = compat.mosaic_gpu()
        transforms = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))

        def shared(*shape):
            return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

        depth, width = 2 * strips, strips * BLOCK
        return [
            plgpu.RefUnion(shared(depth, BLOCK, width), shared(depth, width, BLOCK)),
            shared(strips, _SLOTS, BLOCK, BLOCK),
            plgpu.SMEM((strips, BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=depth),
            plgpu.Barrier(num_arrivals=strips, num_barriers=depth),
            plgpu.Barrier(num_arrivals=1, num_barriers=strips * _SLOTS),
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=strips + 1),
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=strips),
        ]

    @property
    def depth(self) -> int:
        """Blocks in a row or a column of a matrix; block rows of a panel."""
        return 2 * self.strips


def compute(memory: Memory, step: Step, is_first) -> None:
    """A computing warpgroup's part of a step.

    Args:
      memory: of the CTA.
      step: what is computed.
      is_first: whether it is the first of the launch.
    """
    plgpu = compat.mosaic_gpu()

    @pl.when(jnp.logical_not(is_first))
    def _():
        plgpu.barrier_wait(memory.written)

    rounds = _Rounds(memory, step)
    if step.symmetric:
        rounds.near(is_first)
        rounds.far()
    else:
        rounds.whole(0)
        rounds.whole(1)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(memory.written)


@dataclasses.dataclass(frozen=True)
class _Rounds:
    memory: Memory
    step: Step

    @property
    def near_blocks(self) -> int:
        """Blocks that a warpgroup takes on the panel's diagonal."""
        return self.memory.strips // 2 + 1

    @property
    def far_blocks(self) -> int:
        """Blocks that a warpgroup takes off it."""
        return (self.memory.strips + 1) // 2

    def slot(self, position):
        """(slot of `lefts`, its barrier) for the position-th block that comes in."""
        w, slot = lax.axis_index("warpgroup"), lax.rem(jnp.int32(position), jnp.int32(_SLOTS))
        return self.memory.lefts.at[w, slot], self.memory.here.at[w * _SLOTS + slot]

    def load_left(self, position, strip, i) -> None:
        """Starts the load of block i of a strip of the left operand."""
        copy_in(self.step.terms[0][0], (span(strip), span(i)), *self.slot(position))

    def load_other(self, position, row, column) -> None:
        """Starts the load of a block of `other`."""
        copy_in(self.step.other, (span(row), span(column)), *self.slot(position))

    def whole(self, number: int) -> None:
        """A strip of a result that is not symmetric; positions go on from round to round."""
        w, s, part = lax.axis_index("warpgroup"), self.memory.strips, lax.axis_index("part")
        depth, start = jnp.int32(self.memory.depth), number * self.memory.depth

        def load(position):
            strip = lax.div(jnp.int32(position), depth) * s + w
            self.load_left(position, strip, lax.rem(jnp.int32(position), depth))

        def load_next(i):
            position = start + i + _SLOTS - 1
            pl.when(position < 2 * depth)(lambda: load(position))

        if number == 0:
            for position in range(_SLOTS):
                load(position)
        total = self.multiply(number, s, None, start, load_next)
        empty = start + self.memory.depth + _SLOTS - 1
        store = self.storing([empty % _SLOTS] if number == 0 else list(range(_SLOTS)))
        for d in range(s):
            store(_part(total, d).astype(jnp.bfloat16), number * s + w, part * s + d)
        if number == 0 and empty < 2 * self.memory.depth:
            compat.mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)
            load(empty)

    def near(self, is_first) -> None:
        """Blocks on the panel's diagonal."""
        plgpu = compat.mosaic_gpu()
        w, s = lax.axis_index("warpgroup"), self.memory.strips
        corner = lax.axis_index("part") * s
        columns = [lax.rem(w + d, jnp.int32(s)) for d in range(self.near_blocks)]
        if self.step.other is not None:
            for d, column in enumerate(columns):
                self.load_other(d, corner + w, corner + column)
        for position in range(self.near_blocks, _SLOTS):
            self.load_far(position - self.near_blocks)
        total = self.multiply(0, self.near_blocks, columns)
        if self.step.traces is not None:
            @pl.when(is_first)
            def _():
                trace = _trace(_part(total, 0), self.memory.rows.at[w])
                self.step.traces[corner + w] = trace
                fence()
                plgpu.barrier_arrive(self.memory.traced)
                plgpu.barrier_wait(self.memory.traced)
                fence()

        store, weights = self.storing(list(range(self.near_blocks))), self.step.weights()
        for d, column in enumerate(columns):
            part = self.weigh(weights, _part(total, d), d, diagonal=d == 0)
            store(part, corner + w, corner + column, mirrored=d > 0 and 2 * d != s)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for position in range(_SLOTS, self.near_blocks + _SLOTS):
            self.load_far(position - self.near_blocks)

    def far_place(self):
        """A warpgroup's row off the panel's diagonal, and its first block's column in the panel."""
        w, s, part = lax.axis_index("warpgroup"), self.memory.strips, lax.axis_index("part")
        row = jnp.where(part == 0, s + w, min(self.far_blocks, s - 1))
        return row, jnp.where(part == 0, 0, lax.min(w, jnp.int32(s - self.far_blocks)))

    def load_far(self, i: int) -> None:
        """The load of block i of the second round, or of what follows on the last one."""
        row, column = self.far_place()
        if i < self.memory.depth:
            self.load_left(self.near_blocks + i, row, i)
        elif self.step.other is not None and i < self.memory.depth + self.far_blocks:
            column = lax.axis_index("part") * self.memory.strips + column + i - self.memory.depth
            self.load_other(self.near_blocks + i, row, column)

    def far(self) -> None:
        """Blocks off the panel's diagonal."""
        w, s, part = lax.axis_index("warpgroup"), self.memory.strips, lax.axis_index("part")
        depth, blocks, start = self.memory.depth, self.far_blocks, self.near_blocks
        row, first = self.far_place()

        def load_next(i):
            i = i + _SLOTS - 1
            pl.when(i < depth)(lambda: self.load_left(start + i, row, i))
            if self.step.other is not None:
                column = part * s + first + i - depth
                pl.when((i >= depth) & (i < depth + blocks))(
                    lambda: self.load_other(start + i, row, column)
                )

        total = self.multiply(1, blocks, first, start, load_next)
        end, weights = start + depth, self.step.weights()
        parts = [self.weigh(weights, _part(total, d), end + d) for d in range(blocks)]
        if self.step.other is not None and blocks == s:
            compat.mosaic_gpu().commit_smem()  # CTA 1 stores nothing from the slots just read
        slots = [(end + d) % _SLOTS for d in range(_SLOTS)]

        @pl.when(part == 0)
        def _():
            store = self.storing(slots)
            for d in range(blocks):
                store(parts[d], row, d, mirrored=True)

        if blocks < s:
            for d in range(blocks):
                @pl.when((part == 1) & (first + d == w))
                def _(d=d):
                    self.storing(slots)(parts[d], row, s + w, mirrored=True)

    def multiply(self, number: int, blocks: int, columns, start: int = 0, load_next=None):
        """Sum of a round's products, [64, 64 blocks] float32.

        Args:
          number: of the round.
          blocks: their number.
          columns: None for the whole panel; the first block's column in it; or a list of the
            blocks' columns, and then the left operand is in the panel, too.
          start: position of the first block of the left operand.
          load_next: (i) loads what comes 2 blocks after the i-th.
        """
        plgpu, memory, w = compat.mosaic_gpu(), self.memory, lax.axis_index("warpgroup")
        near = isinstance(columns, list)

        def release(i):
            if number == 1:
                plgpu.barrier_arrive(memory.free.at[i])

        def accumulate(acc):
            @pl.loop(0, memory.depth)
            def _(i):
                if number == 0:
                    plgpu.barrier_wait(memory.full.at[i])
                if near:
                    left = memory.panels[1].at[i, span(w)]
                else:
                    left, here = self.slot(start + i)
                    plgpu.barrier_wait(here)
                self.product(acc, left, i, blocks, columns)
                plgpu.wgmma_wait(blocks if near else 1)

                @pl.when(i > 0)  # the product before this one is done
                def _():
                    release(i - 1)
                    if load_next is not None:
                        load_next(i)

            plgpu.wgmma_wait(0)
            release(memory.depth - 1)
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((BLOCK, blocks * BLOCK), jnp.float32))

    def product(self, acc, left, i, blocks: int, columns) -> None:
        """Adds a block of the left operand times some columns of block row i of the panel."""
        plgpu = compat.mosaic_gpu()
        panel = self.memory.panels[int(self.step.symmetric)]
        if columns is None:
            plgpu.wgmma(acc, left, panel.at[i])
        elif isinstance(columns, list):
            for d, column in enumerate(columns):
                right = panel.at[i, span(column)].transpose((1, 0))
                plgpu.wgmma(acc.at[:, d * BLOCK : (d + 1) * BLOCK], left, right)
        else:
            right = panel.at[i, pl.ds(columns * BLOCK, blocks * BLOCK)].transpose((1, 0))
            plgpu.wgmma(acc, left, right)

    def weigh(self, weights, total, position: int, diagonal: bool = False):
        """The step's sum for a block of a symmetric result, rounded."""
        plgpu = compat.mosaic_gpu()
        total = weights[0] * total
        if self.step.other is not None:
            other, here = self.slot(position)
            plgpu.barrier_wait(here)
            other = compat.load(other, layout=plgpu.Layout.WGMMA, optimized=False)
            total = total + weights[1] * other.astype(jnp.float32)
            if diagonal:
                total = total + jnp.where(on_diagonal(total.shape), weights[2], jnp.float32(0.0))
        return total.astype(jnp.bfloat16)

    def storing(self, slots: list[int]):
        """A function that starts the store of a block, from one of the slots after the other.

        None of them may be on its way out when the first block is stored.
        """
        plgpu, used = compat.mosaic_gpu(), 0

        def put(block, row, column, transposed):
            nonlocal used
            staging, _ = self.slot(slots[used % len(slots)])
            if used >= len(slots):
                plgpu.wait_smem_to_gmem(len(slots) - 1, wait_read_only=True)
            used += 1
            (staging.transpose((1, 0)) if transposed else staging)[...] = block
            plgpu.commit_smem()
            copy_out(staging, self.step.out, (span(row), span(column)))

        def store(block, row, column, mirrored=False):
            put(block, row, column, False)
            if mirrored:
                turned = plgpu.layout_cast(block, plgpu.Layout.WGMMA_TRANSPOSED)
                put(turned, column, row, True)

        return store


def _part(total, d: int):
    """Block d of a row of them."""
    return total[:, d * BLOCK : (d + 1) * BLOCK]


def _trace(block, rows):
    """The sum of a block's diagonal, by way of a warpgroup's own shared memory.

    Mosaic GPU adds over rows, which are in several warps, by way of memory that all warpgroups
    share, and at the same time.
    """
    rows[...] = jnp.sum(jnp.where(on_diagonal(block.shape), block, 0.0), axis=1)
    return functools.reduce(jnp.add, [rows[i] for i in range(BLOCK)])
