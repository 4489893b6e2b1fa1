"""One tile of a sum of matrix products on Hopper GPUs, with what follows it in its epilogue.

A CTA is one warpgroup, which starts its own loads a few steps ahead. It takes little enough
shared memory that two share a multiprocessor: one multiplies while the other starts or ends.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

BLOCK = 64  # rows of one wgmma, and columns of the left operand in one load


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one CTA computes.

    Attributes:
      height, width: of its part of the result, multiples of `BLOCK`; equal for symmetric results.
      stages: loads in flight, each of `BLOCK` columns of both operands; at least width / `BLOCK`.
    """

    height: int
    width: int
    stages: int


def choose_tile(rows: int, columns: int) -> Tile:
    """The tile of a `[rows, columns]` result.

    >>> choose_tile(384, 384)
    Tile(height=128, width=128, stages=3)
    """
    size = 128 if rows % 128 == 0 and columns % 128 == 0 else 64
    return Tile(size, size, 3)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sum of products, all that is static of it.

    Attributes:
      tile: of a CTA.
      rows, columns: of the result.
      inner: length of each product's sum.
      transposed: multiplies by the transposes of the right factors.
      symmetric: the result is symmetric: tiles below the diagonal are mirrored, not computed.
    """

    tile: Tile
    rows: int
    columns: int
    inner: int
    transposed: bool = False
    symmetric: bool = False

    @property
    def tiles(self) -> int:
        """Number of tiles that are computed."""
        down, across = self.rows // self.tile.height, self.columns // self.tile.width
        return down * (down + 1) // 2 if self.symmetric else down * across

    def position(self, tile):
        """First row and first column of a tile, which are numbered row by row."""
        down, across = self.rows // self.tile.height, self.columns // self.tile.width
        if self.symmetric:
            row = first = jnp.int32(0)
            for i in range(1, down):
                start = i * down - i * (i - 1) // 2
                row = jnp.where(tile >= start, i, row)
                first = jnp.where(tile >= start, start, first)
            column = row + tile - first
        else:
            row, column = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
        return row * self.tile.height, column * self.tile.width


def scratch(plan: Plan) -> list:
    """Shared memory of a CTA: left and right operands, their barriers, those of `other`."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))
    tile = plan.tile

    def slots(*shape):
        return plgpu.SMEM((tile.stages, *shape), jnp.bfloat16, transforms=transforms)

    if plan.transposed:
        operands = [slots(2, tile.height, BLOCK)]
    else:
        operands = [slots(tile.height, BLOCK), slots(BLOCK, tile.width)]
    return [
        *operands,
        plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=tile.width // BLOCK),
    ]


def multiply(plan: Plan, index, terms, out, scratch_refs, weight=None, other=None) -> None:
    """Computes tile `index` of `w0 * sum(left right) + w1 * other + w2 * I` and stores it.

    Args:
      plan: of the whole product.
      index: number of the tile.
      terms: (left, right) references to matrices in global memory.
      out: reference to the result in global memory.
      scratch_refs: what `scratch` describes.
      weight: w0, or with `other` w0, w1 and w2; None for (1, 0, 0).
      other: reference to a matrix in global memory, or None.
    """
    plgpu = compat.mosaic_gpu()
    *operands, full, other_full = scratch_refs
    tile, stages, steps = plan.tile, plan.tile.stages, plan.inner // BLOCK
    total = len(terms) * steps
    top, left_edge = plan.position(index)
    rows, columns = pl.ds(top, tile.height), pl.ds(left_edge, tile.width)
    # On the diagonal of X Xᵀ both operands are the same: loaded once.
    once = plan.symmetric and len(terms) == 1 and terms[0][0] is terms[0][1]

    def left_slot(slot):
        if not plan.transposed:
            return operands[0].at[slot]
        return operands[0].at[slot, jnp.where(top == left_edge, 1, 0) if once else 0]

    def right_slot(slot):
        return operands[0].at[slot, 1] if plan.transposed else operands[1].at[slot]

    def load_pair(slot, left, right, depth):
        if not once:
            plgpu.copy_gmem_to_smem(left.at[rows, depth], left_slot(slot), full.at[slot])
            source = right.at[columns, depth] if plan.transposed else right.at[depth, columns]
            plgpu.copy_gmem_to_smem(source, right_slot(slot), full.at[slot])
            return
        half = tile.height // 2

        @pl.when(top == left_edge)
        def _():
            for part in (0, half):
                target = operands[0].at[slot, 1, pl.ds(part, half)]
                plgpu.copy_gmem_to_smem(left.at[pl.ds(top + part, half), depth], target,
                                        full.at[slot])

        @pl.when(top != left_edge)
        def _():
            plgpu.copy_gmem_to_smem(left.at[rows, depth], operands[0].at[slot, 0], full.at[slot])
            plgpu.copy_gmem_to_smem(left.at[columns, depth], operands[0].at[slot, 1],
                                    full.at[slot])

    def load(step):
        slot = lax.rem(step, jnp.int32(stages))
        for term, (left, right) in enumerate(terms):
            first = term * steps

            @pl.when((step >= first) & (step < first + steps))
            def _(left=left, right=right, first=first):
                load_pair(slot, left, right, pl.ds((step - first) * BLOCK, BLOCK))

    def accumulate(*accs):
        for step in range(min(stages, total)):
            load(jnp.int32(step))

        @pl.loop(0, total)
        def _(step):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            left, right = left_slot(slot), right_slot(slot)
            for r, acc in enumerate(accs):
                plgpu.wgmma(acc, left.at[pl.ds(r * BLOCK, BLOCK)],
                            right.transpose((1, 0)) if plan.transposed else right)
            plgpu.wgmma_wait(len(accs))  # the step before this one is done, its slot free

            @pl.when((step > 0) & (step - 1 + stages < total))
            def _():
                load(step - 1 + stages)

        plgpu.wgmma_wait(0)
        for c in range(0 if other is None else tile.width // BLOCK):
            source = other.at[rows, pl.ds(left_edge + c * BLOCK, BLOCK)]
            plgpu.copy_gmem_to_smem(source, staging(0, c), other_full.at[c])
        return tuple(acc[...] for acc in accs)

    def staging(side, c):
        return operands[0].at[c, side] if plan.transposed else operands[0].at[c]

    bands = [plgpu.ACC((BLOCK, tile.width), jnp.float32)] * (tile.height // BLOCK)
    totals = pl.run_scoped(accumulate, *bands)
    for c in range(tile.width // BLOCK):
        if other is not None:
            plgpu.barrier_wait(other_full.at[c])
        for r, band in enumerate(totals):
            corner = (top + r * BLOCK, left_edge + c * BLOCK)
            part = band[:, c * BLOCK : (c + 1) * BLOCK]
            band_rows = pl.ds(r * BLOCK, BLOCK)
            piece = staging(0, c).at[band_rows]
            if weight is not None:
                part = _weigh(part, weight, piece, corner[0] - corner[1])
            part = part.astype(jnp.bfloat16)
            _store(part, piece, out, corner)
            if plan.symmetric:
                mirror = staging(1, c).at[band_rows]

                @pl.when(top != left_edge)
                def _(part=part, mirror=mirror, corner=corner):
                    part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                    _store(part, mirror, out, corner[::-1], transposed=True)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _weigh(total, weight, other, offset):
    """`w0 * total`, with three weights `+ w1 * other + w2 * I` (I where column == row + offset)."""
    plgpu = compat.mosaic_gpu()
    if len(weight) == 1:
        return weight[0] * total
    other = compat.load(other, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    row = plgpu.broadcasted_iota(jnp.int32, total.shape, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=plgpu.Layout.WGMMA)
    diagonal = jnp.where(column - row == offset, weight[2], jnp.float32(0.0))
    return weight[0] * total + weight[1] * other + diagonal


def _store(x, staging, out, corner, transposed: bool = False) -> None:
    """Starts the store of a [64, 64] part of the result through shared memory."""
    plgpu = compat.mosaic_gpu()
    (staging.transpose((1, 0)) if transposed else staging)[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out.at[pl.ds(corner[0], BLOCK), pl.ds(corner[1], BLOCK)])
