"""What the Hopper kernels compute: sums of matrix products, one step after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ttt_kernels import compat

BLOCK = 64  # rows of one wgmma, and the length of the sum that one load is good for


@dataclasses.dataclass(frozen=True)
class Step:
    """`out = w0 * sum(left right) + w1 * other + w2 * I` for one matrix.

    A reference is one to a matrix in global memory, or several (predicate, reference) pairs, of
    which the one whose predicate is true counts.

    Attributes:
      terms: (left, right) pairs of references; with `symmetric` (u, u), or (u, v) and (v, u), and
        the right operands are transposed.
      out: reference to the result.
      symmetric: the result is symmetric.
      weights: with `symmetric`, returns [w0], or with `other` [w0, w1, w2]; else w0 is 1.
      other: reference to a symmetric matrix, or None.
      traces: reference to [rows / 64] float32, where in the very first step the traces of the
        diagonal blocks of the sum are left before `weights` is called; or None.
      early: the right operands do not come from the step before.
    """

    terms: tuple
    out: object
    symmetric: bool = False
    weights: Callable[[], list] | None = None
    other: jax.Array | None = None
    traces: jax.Array | None = None
    early: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the result."""
        return choices(self.out)[0][1].shape

    @property
    def inner(self) -> int:
        """Length of the products' sums."""
        return choices(self.terms[0][0])[0][1].shape[1]


def choices(reference) -> tuple:
    """A reference of a step as (predicate, reference) pairs; the predicate None is true."""
    return reference if isinstance(reference, tuple) else ((None, reference),)


def copy_in(reference, index, target, barrier) -> None:
    """Starts the load of a part of a step's operand into shared memory."""
    for here, source in choices(reference):
        def start(source=source):
            compat.mosaic_gpu().copy_gmem_to_smem(source.at[index], target, barrier)

        start() if here is None else pl.when(here)(start)


def copy_out(source, reference, index) -> None:
    """Starts the store of a part of a step's result from shared memory."""
    for here, target in choices(reference):
        def start(target=target):
            compat.mosaic_gpu().copy_smem_to_gmem(source, target.at[index])

        start() if here is None else pl.when(here)(start)


def fence() -> None:
    """Orders ordinary accesses to global memory before and after it, for all CTAs.

    The barriers of Mosaic GPU order them for the threads of their own CTA alone, those of clusters
    too: an arrival overtakes a store on its way to the other CTA, which then reads what was there.
    """
    @compat.mosaic_gpu().inline_mgpu()
    def emit(_):
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)

    emit()


def span(number):
    """The slice of a block of rows or columns."""
    return pl.ds(number * BLOCK, BLOCK)


def on_diagonal(shape, offset=0):
    """Where column == row + offset."""
    plgpu = compat.mosaic_gpu()
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    return column - row == offset
