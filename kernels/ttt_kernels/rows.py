"""What the Mosaic GPU kernels share that pass over an array's rows at the speed of the memory.

Small thread blocks of one warpgroup, as many on a multiprocessor as registers allow, load rows
straight into registers and store what they make of them. A warp holds whole rows, or pieces of
them, so that sums over a row need no shared memory; those over columns stay in registers while a
thread block walks over several steps of rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

_MAX_VECTOR = 8  # bfloat16 numbers a lane loads at once


@dataclasses.dataclass(frozen=True)
class Rows:
    """How arrays of rows are dealt out to thread blocks.

    Attributes:
      rows: of the arrays, a multiple of `step`.
      columns: that a thread block holds of a row, a multiple of 64.
      step: rows that a thread block holds, a multiple of 4: a warp has one or more.
      blocks: of columns, each with thread blocks of its own.
      steps: that a thread block walks over, at most.
      ahead: whether the next step's rows are loaded before a step's are worked on.
    """

    rows: int
    columns: int
    step: int = 4
    blocks: int = 1
    steps: int = 1
    ahead: bool = False

    @property
    def groups(self) -> int:
        """Thread blocks for a block of columns."""
        return -(-self.rows // (self.step * self.steps))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what a thread block holds."""
        return (self.step, self.columns)

    def layout(self):
        """Registers of [step, columns]: a row a warp, its columns over the lanes."""
        plgpu = compat.mosaic_gpu()
        vector = min(self.columns & -self.columns, 32 * _MAX_VECTOR) // 32
        tiling = plgpu.Tiling(((4, 32 * vector), (vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def vector_layout(self):
        """Registers of what every row has, [columns]."""
        return self.layout().reduce(0)

    def launch(self, interpret) -> dict:
        """Arguments of `compat.gpu_kernel`, but for the types."""
        return dict(
            grid=(self.groups * self.blocks,),  # of two axes the first goes to 2^16 - 1 alone
            grid_names=("piece",),
            num_threads=1,
            thread_name="warpgroup",
            interpret=interpret,
        )

    def group(self):
        """The number of a thread block among those with its columns."""
        return lax.div(lax.axis_index("piece"), jnp.int32(self.blocks))

    def block(self):
        """The number of a thread block's columns."""
        return lax.rem(lax.axis_index("piece"), jnp.int32(self.blocks))

    def here(self):
        """The columns of a thread block."""
        if self.blocks == 1:
            return slice(None)
        return pl.ds(self.block() * self.columns, self.columns)

    def walk(self, sources, function, carry=()):
        """`carry = function(rows, arrays, carry)` for every step of a thread block.

        Args:
          sources: arrays in global memory, [rows, blocks * columns].
          function: gets the step's rows, as an index, and [step, columns] float32 of each source.
          carry: of the first step.
        """
        number, group, columns = self.rows // self.step, self.group(), self.here()

        def place(i):
            return pl.ds((group + i * self.groups) * self.step, self.step), columns

        def step(place, arrays, carry):
            return function(place[0], arrays, carry)

        if self.groups == number:
            return step(place(0), self.load(sources, *place(0)), carry)
        least, longer = divmod(number, self.groups)
        count = least + (group < longer).astype(jnp.int32)
        return self.loop(count, place, sources, step, carry)

    def loop(self, count, place, sources, function, carry):
        """`carry = function(place, arrays, carry)` for several places.

        Args:
          count: their number, 1 or more.
          place: makes indices of rows and columns of a number from 0 on.
          sources: arrays in global memory, [rows, columns].
          function: gets the place and [step, columns] float32 of each source.
          carry: of the first place.
        """

        def plain(i, carry):
            return function(place(i), self.load(sources, *place(i)), carry)

        def ahead(i, state):
            arrays, carry = state
            following = self._load(sources, *place(jnp.minimum(i + 1, count - 1)))
            return following, function(place(i), [x.astype(jnp.float32) for x in arrays], carry)

        if not self.ahead:
            return lax.fori_loop(0, count, plain, carry)
        return lax.fori_loop(0, count, ahead, (self._load(sources, *place(0)), carry))[1]

    def load(self, sources, rows, columns) -> list[jax.Array]:
        """What a thread block holds of arrays in global memory, in float32."""
        return [x.astype(jnp.float32) for x in self._load(sources, rows, columns)]

    def _load(self, sources, rows, columns) -> list[jax.Array]:
        load, layout = compat.mosaic_gpu().load, self.layout()
        return [load(x.at[rows, columns], layout=layout, optimized=False) for x in sources]

    def load_vector(self, ref):
        """A thread block's columns of a vector in global memory; `wide` makes rows of it."""
        load, layout = compat.mosaic_gpu().load, self.vector_layout()
        return load(ref.at[self.here()], layout=layout, optimized=False)

    def load_numbers(self, ref):
        """One number a row of a step, [step] in global memory, for all of its columns."""
        load, layout = compat.mosaic_gpu().load, self.layout().reduce(1)
        return lax.broadcast_in_dim(load(ref, layout=layout, optimized=False), self.shape, (0,))

    def zeros(self, rows: int | None = None) -> jax.Array:
        """[rows or step, columns], where sums begin."""
        zeros = jnp.zeros((rows or self.step, *self.shape[1:]), jnp.float32)
        return compat.mosaic_gpu().layout_cast(zeros, self.layout())

    def fold(self, x):
        """[4, columns], the sums over a warp's rows, of [step, columns]."""
        return functools.reduce(jnp.add, [x[i : i + 4] for i in range(0, self.step, 4)])

    def scratch(self) -> list:
        """Shared memory that `store_sums` takes."""
        return [compat.mosaic_gpu().SMEM((4, self.columns), jnp.float32)]

    def store_sums(self, ref, totals, scratch) -> None:
        """Adds the warps' sums [4, columns] of a thread block, always in the same order.

        Args:
          ref: [groups, number of sums, blocks * columns] float32; a row of it is written.
          totals: the sums.
          scratch: that of `scratch`.
        """
        load, group, columns = compat.mosaic_gpu().load, self.group(), self.here()
        layout = self.vector_layout()
        for n, total in enumerate(totals):
            compat.store(scratch, total)  # Pallas waits for all warps before and behind it
            rows = [load(scratch.at[i], layout=layout, optimized=False) for i in range(4)]
            compat.store(ref.at[group, n, columns], functools.reduce(jnp.add, rows))


def store(ref, value) -> None:
    """`ref[...] = value`, rounded to the reference's dtype."""
    compat.store(ref, value.astype(ref.dtype))


def wide(vector, like) -> jax.Array:
    """A vector of columns, for every row of `like`."""
    return lax.broadcast_in_dim(vector, like.shape, (like.ndim - 1,))
