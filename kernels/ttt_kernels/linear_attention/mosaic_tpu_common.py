"""What the Mosaic TPU kernels of linear attention share: operands, their blocks, decays, products.

Axes: g = heads of a grid point, c = tokens of a block, n = blocks. The grid is (batch, groups of
heads, blocks); `order` maps its last axis to the block, so that a backward pass walks in reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention.mosaic_tpu_tiling import Tiling
from ttt_kernels.tpu import COLUMNS, ROWS, clean, dot, row_sums


class Inputs(NamedTuple):
    """Operands of every kernel here; inside one, the references to their blocks."""

    q: jax.Array  # [batch, time, heads · key_dim]
    k: jax.Array  # [batch, time, heads · key_dim]
    v: jax.Array  # [batch, time, heads · value_dim]
    valid: jax.Array | None  # [batch or 1, 1, n · c] int32, 0 where a token is padding
    sums: jax.Array | None  # [batch, heads, 2, n · c], `decays.LogSum` from each block's start


@dataclasses.dataclass(frozen=True)
class Call:
    """Sizes of one call and its tiling, all static."""

    tiling: Tiling
    batch: int
    length: int
    heads: int

    @property
    def blocks(self) -> int:
        """Blocks of a row, the last one possibly partial."""
        return pl.cdiv(self.length, self.tiling.block)

    @property
    def steps(self) -> int:
        """Length of the grid's last axis."""
        return self.blocks

    @property
    def groups(self) -> int:
        """Groups of heads."""
        return self.heads // self.tiling.heads_per_block

    def token_spec(self, dim: int, order: Callable) -> pl.BlockSpec:
        """A block of q, k, v or an output of `dim` channels a head."""
        tiling = self.tiling
        shape = (1, tiling.block, tiling.heads_per_block * dim)
        return pl.BlockSpec(shape, lambda b, g, t: (b, order(t), g))

    def state_spec(self) -> pl.BlockSpec:
        """The states of a group of heads, the same for all of its blocks."""
        tiling = self.tiling
        shape = (1, tiling.heads_per_block, tiling.key_dim, tiling.value_dim)
        return pl.BlockSpec(shape, lambda b, g, t: (b, g, 0, 0))

    def states_spec(self, order: Callable) -> pl.BlockSpec:
        """The states of a group of heads, one for each value of `order`."""
        tiling = self.tiling
        shape = (1, tiling.heads_per_block, 1, tiling.key_dim, tiling.value_dim)
        return pl.BlockSpec(shape, lambda b, g, t: (b, g, order(t), 0, 0))

    def vector_spec(self, vectors: int, order: Callable) -> pl.BlockSpec:
        """A block of `[batch, heads, vectors, time]`."""
        shape = (1, self.tiling.heads_per_block, vectors, self.tiling.block)
        return pl.BlockSpec(shape, lambda b, g, t: (b, g, 0, order(t)))

    def input_specs(self, x: Inputs, order: Callable, key_order: Callable | None = None) -> Inputs:
        """Blocks of all inputs; `key_order` places those of k, v and the decays elsewhere."""
        key_order = key_order or order
        valid = sums = None
        if x.valid is not None:
            rows = x.valid.shape[0]
            valid = pl.BlockSpec(
                (1, 1, self.tiling.block), lambda b, g, t: (b if rows > 1 else 0, 0, order(t))
            )
        if x.sums is not None:
            sums = self.vector_spec(2, key_order)
        return Inputs(
            self.token_spec(self.tiling.key_dim, order),
            self.token_spec(self.tiling.key_dim, key_order),
            self.token_spec(self.tiling.value_dim, key_order),
            valid, sums,
        )  # fmt: skip

    def launch(
        self, body, name: str, operands, in_specs, results, out_specs, *,
        products: int, backward: bool, scratch=(), interpret=None,
    ):  # fmt: skip
        """Runs a kernel over the grid.

        Args:
          body: the kernel; its references are those of operands, results and scratch memory.
          name: of the kernel, behind "linear_attention_".
          operands: arrays, the `Inputs` first.
          in_specs, out_specs: their blocks, and those of the results.
          results: shapes and dtypes; None is no result.
          products: multiplications of a token of one head, for XLA's cost analysis.
          backward: which of the tiling's estimates of VMEM applies.
          scratch: memory that stays from step to step.
          interpret: None, or the interpreter's parameters.
        """
        tokens = self.batch * self.heads * self.blocks * self.tiling.block
        decays = operands[0].sums is not None
        arrays = jax.tree.leaves((operands, results))
        return compat.tpu_kernel(
            body,
            name=f"linear_attention_{name}",
            semantics=("parallel", "parallel", "arbitrary"),
            vmem_bytes=self.tiling.vmem_bytes(backward),
            interpret=interpret,
            out_shape=results,
            grid=(self.batch, self.groups, self.steps),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
            cost_estimate=pl.CostEstimate(
                flops=2 * tokens * products,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
                transcendentals=tokens * self.tiling.block if decays else 0,
            ),
        )(*operands)


def forwards(t):
    """Block of step `t` where a row is walked from its start."""
    return t


def read_tokens(ref, head: int, dim: int, valid: jax.Array | None) -> jax.Array:
    """The tokens of one head, zero where not `valid` (memory there may hold NaN), [c, dim]."""
    return clean(ref[0, :, head * dim : (head + 1) * dim], valid)


def read_valid(x: Inputs) -> jax.Array | None:
    """Which tokens of the block are real, [c, 1] bool, or None for all."""
    return None if x.valid is None else x.valid[0, 0, :][:, None] > 0


class BlockDecay(NamedTuple):
    """The decays of one head's block, all float32; None where nothing decays."""

    between: jax.Array | None  # [c, c] from the column's token to the row's, 0 where it is later
    from_start: jax.Array | None  # [c, 1], from the block's start to each token
    to_end: jax.Array | None  # [c, 1], from each token to the block's end
    whole: jax.Array | None  # [1, 1], of the whole block


def lower_triangle(block: int) -> jax.Array:
    """True where the column's token is not later than the row's, [c, c] bool."""
    shape = (block, block)
    return lax.broadcasted_iota(jnp.int32, shape, 0) >= lax.broadcasted_iota(jnp.int32, shape, 1)


def read_decay(x: Inputs, head: int, block: int, between: bool = True) -> BlockDecay:
    """The decays of one head; without `between`, its matrix is left out."""
    mask = lower_triangle(block) if between else None
    if x.sums is None:
        matrix = mask.astype(jnp.float32) if between else None
        return BlockDecay(matrix, None, None, None)
    row = decays.LogSum(x.sums[0, head, 0:1, :], x.sums[0, head, 1:2, :])
    column = decays.LogSum(x.sums[0, head, 0, :][:, None], x.sums[0, head, 1, :][:, None])
    last = row.map(lambda y: y[:, block - 1 :])
    return BlockDecay(
        decays.masked_factor(column, row, mask) if between else None,
        decays.factor(column),
        decays.factor(last, column),
        decays.factor(last),
    )


def scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """`x` times a factor a row, in `x`'s dtype; `x` itself without one."""
    return x if factor is None else (x.astype(jnp.float32) * factor).astype(x.dtype)


def carried(state: jax.Array, decay: BlockDecay) -> jax.Array:
    """The state of one edge of a block as it is left at the other."""
    return state if decay.whole is None else state * decay.whole


def sum_from_right(rows: jax.Array) -> jax.Array:
    """Sums over the channels and over the rows from each one to the last, [c, d] -> [1, c]."""
    triangle = lower_triangle(rows.shape[0]).astype(jnp.float32)
    return dot(row_sums(rows), triangle, COLUMNS, ROWS)
