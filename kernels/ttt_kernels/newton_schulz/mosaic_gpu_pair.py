"""Steps for square matrices in one launch on Hopper GPUs: two CTAs a matrix.

A matrix of 2 s x 2 s blocks of 64 x 64 is cut into two panels of s block columns, one a CTA. In
each step a CTA keeps the panel of the right operand in shared memory; each of its s computing
warpgroups takes one strip of 64 rows of the result after the other, in two rounds, and loads its
strips of the left operand for itself. So warpgroups wait for each other between steps only.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.newton_schulz.mosaic_gpu_pair_rounds import Memory, compute
from ttt_kernels.newton_schulz.mosaic_gpu_step import BLOCK, Step, copy_in, span

# Registers of a loading and of a computing thread, by the number of computing warpgroups.
_REGISTERS = {1: (40, 232), 2: (40, 232), 3: (40, 152)}


@dataclasses.dataclass(frozen=True)
class Pair:
    """How a launch is cut: two CTAs a matrix.

    Attributes:
      strips: s, 1 to 3: strips of 64 rows, and computing warpgroups, of a CTA.
    """

    strips: int


def launch(name, iteration, iterations, arrays, out_types, matrices, layout, interpret):
    """Runs `iterations` times the steps of `iteration` on every matrix.

    Args:
      name: of the kernel.
      iteration: (k, matrix, arrays' references, results' references) -> tuple of Steps of a single
        term, each of which may read what those before it wrote; k counts from 0.
      iterations: their number, at least 1.
      arrays: what is read.
      out_types: `jax.ShapeDtypeStruct`s of what is written.
      matrices: their number; all have 128 s rows and columns.
      layout: how it is cut.
      interpret: None, or the interpreter's parameters.

    Returns:
      The results, one array for each of `out_types`.
    """
    plgpu, strips = compat.mosaic_gpu(), layout.strips

    def body(*refs):
        inputs = refs[: len(arrays)]
        outputs = refs[len(arrays) : len(arrays) + len(out_types)]
        memory = Memory(strips, *refs[len(arrays) + len(out_types) :])
        matrix, w = lax.axis_index("matrix"), lax.axis_index("warpgroup")

        def walk(visit):
            @pl.loop(0, iterations)
            def _(k):
                for number, step in enumerate(iteration(k, matrix, inputs, outputs)):
                    visit(memory, step, (k == 0) & (number == 0))

            plgpu.barrier_wait(memory.written)  # a CTA must outlive its pair's arrivals

        @pl.when(w == strips)
        def _():
            plgpu.set_max_registers(_REGISTERS[strips][0], action="decrease")
            walk(_load_panels)

            @pl.loop(0, memory.depth)
            def _(slot):
                plgpu.barrier_wait(memory.free.at[slot])

        @pl.when(w < strips)
        def _():
            plgpu.set_max_registers(_REGISTERS[strips][1], action="increase")

            @pl.loop(0, memory.depth)
            def _(slot):
                plgpu.barrier_arrive(memory.free.at[slot])

            walk(compute)

    body.__name__ = name
    call = compat.gpu_kernel(
        body,
        out_type=list(out_types),
        scratch_types=Memory.types(strips),
        grid=(matrices,),
        grid_names=("matrix",),
        cluster=(2,),
        cluster_names=("part",),
        num_threads=strips + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return call(*arrays)


def _load_panels(memory: Memory, step: Step, is_first) -> None:
    """The loading warpgroup's part of a step: the panels of the right operands."""
    plgpu = compat.mosaic_gpu()
    width = memory.strips * BLOCK
    columns = pl.ds(lax.axis_index("part") * width, width)

    def load():
        @pl.loop(0, memory.depth)
        def _(i):
            plgpu.barrier_wait(memory.free.at[i])
            index = (columns, span(i)) if step.symmetric else (span(i), columns)
            target = memory.panels[int(step.symmetric)].at[i]
            copy_in(step.terms[0][1], index, target, memory.full.at[i])

    if step.early:
        load()

    @pl.when(jnp.logical_not(is_first))
    def _():
        plgpu.barrier_wait(memory.written)

    plgpu.barrier_arrive(memory.written)  # nobody may be two steps ahead of a waiter
    if not step.early:
        load()
