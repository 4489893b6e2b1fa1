"""What the Mosaic GPU kernels share whose passes need sums over rows and over columns both.

By rings they were faster than by `rows`, which loads straight into registers; passes that keep no
sums of columns are faster that way.

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
    """

    rows: int
    columns: int
    inputs: int
    warpgroups: int
    stages: int
    sums: int = 0
    step: int = 4

    @property
    def groups(self) -> int:
        """Thread blocks."""
        return max(1, min(CTAS, self.rows // self.step))

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
            grid=(self.groups,),
            grid_names=("group",),
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
          sources: arrays of `rows` in global memory, [rows, columns].
          scratch: the first two of `scratch`.
          step: gets [step, columns] of each source.
          carry: of the first step.
        """
        plgpu = compat.mosaic_gpu()
        ring, full = scratch
        w = lax.axis_index("warpgroup")
        share = lax.axis_index("group") * self.warpgroups + w
        least, longer = divmod(self.rows // self.step, self.groups * self.warpgroups)
        low = share * least + jnp.minimum(share, longer)
        count = least + (share < longer).astype(jnp.int32)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(self.slots))
            for j, source in enumerate(sources):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds((low + i) * self.step, self.step)],
                    ring.at[w, slot, j],
                    full.at[w * self.slots + slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,  # copies of any length
                )

        for i in range(self.slots):
            pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))

        def body(i, carry):
            slot = lax.rem(i, jnp.int32(self.slots))
            plgpu.barrier_wait(full.at[w * self.slots + slot])
            arrays = [
                plgpu.load(self.view(ring.at[w, slot, j]), layout=self.layout()).astype(jnp.float32)
                for j in range(self.inputs)
            ]
            plgpu.commit_smem()  # all has been read before the slot is written again
            pl.when(i + self.slots < count)(lambda: fetch(i + self.slots))
            return step((low + i) * self.step, arrays, carry)

        return lax.fori_loop(0, count, body, carry)

    def load_vector(self, ref):
        """A vector in global memory; `wide` makes rows of it."""
        return compat.mosaic_gpu().load(ref, layout=self.vector_layout(), optimized=False)

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
          out_ref: [groups, sums, columns] float32; a row of it is written.
          scratch: the last two of `scratch`.
        """
        plgpu = compat.mosaic_gpu()
        parts, meet = scratch
        w, group = lax.axis_index("warpgroup"), lax.axis_index("group")
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
                compat.store(out_ref.at[group, n], functools.reduce(jnp.add, rows))

            if n + 1 < len(totals):
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)
