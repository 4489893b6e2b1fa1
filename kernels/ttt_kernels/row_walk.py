"""What the Mosaic GPU kernels share that walk over an array's rows at the speed of the memory.

Every multiprocessor has one block of threads, of several warpgroups that do the same by
themselves: each goes over its own share of the rows, a few at a time, with the next ones on
their way into its ring of slots in shared memory. A warp holds whole rows, so that sums over a
row need no shared memory, and those over columns stay in registers until the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

CTAS = 132  # multiprocessors of a Hopper GPU
_MEMORY_BYTES = 220 * 1024  # of shared memory, for rings and sums
_MAX_VECTOR = 8  # bfloat16 numbers a lane loads at once


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a launch deals out its rows.

    Attributes:
      rows: of the arrays, a multiple of `step`.
      columns: of a step, a multiple of 64.
      inputs: arrays read.
      warpgroups: of a thread block.
      stages: slots of a warpgroup's ring, where there is room for so many.
      sums: over columns that `add_up` makes.
      step: rows of a step, a multiple of 4: a warp has one or more.
      blocks: of columns, each with thread blocks of its own.
      pieces: blocks of columns that a warpgroup takes one after another; then `blocks` is 1.
      turns: steps are dealt out in turn; else each warpgroup has neighbouring ones.
    """

    rows: int
    columns: int
    inputs: int
    warpgroups: int
    stages: int
    sums: int = 0
    step: int = 4
    blocks: int = 1
    pieces: int = 1
    turns: bool = False

    @property
    def groups(self) -> int:
        """Thread blocks for a block of columns."""
        return max(1, min(CTAS // self.blocks, self.rows // self.step))

    @property
    def slots(self) -> int:
        """Slots of a warpgroup's ring."""
        room = _MEMORY_BYTES // self.warpgroups - (4 * math.prod(self.partial) if self.sums else 0)
        return min(self.stages, room // (2 * self.inputs * self.step * self.columns))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return (self.columns,)

    @property
    def partial(self) -> tuple[int, ...]:
        """Of a warpgroup's sum, columns last."""
        return (4, self.columns)

    def layout(self):
        """Registers of [rows, columns]: a row a warp, its columns over the lanes."""
        plgpu = compat.mosaic_gpu()
        vector = min(self.columns & -self.columns, 32 * _MAX_VECTOR) // 32
        tiling = plgpu.Tiling(((4, 32 * vector), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def view(self, ref):
        """A slot's rows in shared memory, as they go into registers."""
        return ref

    def vector_layout(self):
        """Registers of what every row has, [columns]."""
        return self.layout().reduce(0)

    def launch(self, interpret) -> dict:
        """Arguments of `compat.gpu_kernel`, but for the types."""
        return dict(
            grid=(self.blocks, self.groups),
            grid_names=("block", "group"),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            interpret=interpret,
        )

    def scratch(self) -> list:
        """Shared memory and barriers that `run` and `add_up` take."""
        plgpu = compat.mosaic_gpu()
        ring = (self.warpgroups, self.slots, self.inputs, self.step, *self.shape)
        types = [
            plgpu.SMEM(ring, jnp.bfloat16),
            plgpu.Barrier(num_arrivals=self.inputs, num_barriers=self.warpgroups * self.slots),
        ]
        if self.sums:
            types += [
                plgpu.SMEM((self.warpgroups, *self.partial), jnp.float32),
                plgpu.Barrier(num_arrivals=self.warpgroups),
            ]
        return types

    def run(self, sources, scratch, step, carry=()):
        """`carry = step(first row, arrays, carry)` for every step of the warpgroup's share.

        Args:
          sources: arrays of `rows` in global memory, [rows, blocks * columns].
          scratch: the first two of `scratch`.
          step: gets [step, columns] of each source.
          carry: of the first step.
        """
        row, count, take = self._start(sources, scratch)

        def body(i, carry):
            arrays = take(i)
            return step(row(i), arrays, carry)

        return lax.fori_loop(0, count, body, carry)

    def run_pieces(self, sources, scratch, step) -> None:
        """`step(first row, walk)` for every step of the warpgroup's share, of rows in pieces.

        Args:
          sources: arrays of `rows` in global memory, [rows, pieces * columns].
          scratch: the first two of `scratch`.
          step: calls `walk(function, carry)` once, which makes `carry = function(columns, arrays,
            carry)` for every piece, with [step, columns] of each source, and returns the last.
        """
        row, count, take = self._start(sources, scratch)

        def body(i, _):
            def walk(function, carry):
                def piece(p, carry):
                    return function(self._piece(p), take(i * self.pieces + p), carry)

                return lax.fori_loop(0, self.pieces, piece, carry)

            step(row(i), walk)

        lax.fori_loop(0, count, body, None)

    def _start(self, sources, scratch):
        """Fills the ring: the first rows of the share's steps, their number, what reads the ring.

        The latter must be called for every number from 0 on; it copies what lies ahead.
        """
        plgpu = compat.mosaic_gpu()
        ring, full = scratch
        w, shares = lax.axis_index("warpgroup"), self.groups * self.warpgroups
        share = lax.axis_index("group") * self.warpgroups + w
        if self.turns:  # the last ones go to all thread blocks alike
            share = w * self.groups + lax.axis_index("group")
        least, longer = divmod(self.rows // self.step, shares)
        low = share * least + jnp.minimum(share, longer)

        def row(i):
            return (share + i * shares if self.turns else low + i) * self.step

        count = least + (share < longer).astype(jnp.int32)
        columns, mode = self.here(), plgpu.OOBFillMode.ZEROS
        if self.blocks * self.pieces == 1:  # whole rows lie one after another: any length
            columns, mode = slice(None), plgpu.OOBFillMode.PROMISE_IN_BOUNDS

        def fetch(i):
            slot, step, here = lax.rem(i, jnp.int32(self.slots)), i, columns
            if self.pieces > 1:
                pieces = jnp.int32(self.pieces)
                step, here = lax.div(i, pieces), self._piece(lax.rem(i, pieces))
            for j, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row(step), self.step), here],
                    ring.at[w, slot, j],
                    full.at[w * self.slots + slot],
                    oob_mode=mode,
                )

        number = count if self.pieces == 1 else count * self.pieces
        for i in range(self.slots):
            pl.when(i < number)(lambda i=i: fetch(jnp.int32(i)))

        def take(i):
            slot = lax.rem(i, jnp.int32(self.slots))
            plgpu.barrier_wait(full.at[w * self.slots + slot])
            arrays = [
                plgpu.load(self.view(ring.at[w, slot, j]), layout=self.layout()).astype(jnp.float32)
                for j in range(self.inputs)
            ]
            plgpu.commit_smem()  # all has been read before the slot is written again
            pl.when(i + self.slots < number)(lambda: fetch(i + self.slots))
            return arrays

        return row, count, take

    def _piece(self, index):
        return pl.ds(index * self.columns, self.columns)

    def here(self):
        """The columns of a thread block."""
        return pl.ds(lax.axis_index("block") * self.columns, self.columns)

    def load_vector(self, ref):
        """A block's columns of a vector in global memory; `wide` makes rows of it."""
        layout = self.vector_layout()
        return compat.mosaic_gpu().load(ref.at[self.here()], layout=layout, optimized=False)

    def zeros(self) -> tuple:
        """Where the sums begin, [4, columns] each."""
        zeros = jnp.zeros((4, self.columns), jnp.float32)
        return (compat.mosaic_gpu().layout_cast(zeros, self.layout()),) * self.sums

    def fold(self, x):
        """[4, columns], the sums over a warp's rows, of [step, columns]."""
        return functools.reduce(jnp.add, [x[i : i + 4] for i in range(0, self.step, 4)])

    def add_up(self, totals, out_ref, scratch) -> None:
        """Adds the warps' sums [4, columns], always in the same order.

        Args:
          totals: of this warpgroup.
          out_ref: [groups, sums, blocks * columns] float32; a row of it is written.
          scratch: the last two of `scratch`.
        """
        plgpu = compat.mosaic_gpu()
        parts, meet = scratch
        w, group, summed = lax.axis_index("warpgroup"), lax.axis_index("group"), self.partial[-1]
        columns = pl.ds(lax.axis_index("block") * summed, summed)
        for n, total in enumerate(totals):
            compat.store(parts.at[w], total)
            plgpu.barrier_arrive(meet)
            plgpu.barrier_wait(meet)

            @pl.when(w == n % self.warpgroups)
            def _(n=n):
                layout = self.vector_layout()
                rows = [
                    plgpu.load(parts.at[i, *j], layout=layout, optimized=False)
                    for i in range(self.warpgroups)
                    for j in itertools.product(*map(range, self.partial[:-1]))
                ]
                compat.store(out_ref.at[group, n, columns], functools.reduce(jnp.add, rows))

            if n + 1 < len(totals):
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)


def wide(vector, like) -> jax.Array:
    """A vector of columns, or of a group's, for every row of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, (like.ndim - 1,))
