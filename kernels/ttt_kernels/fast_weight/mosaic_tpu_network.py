"""What both TPU kernels of the fast weight share: one block of tokens through the network.

All [block, channels] float32, but for operands of products, which have the tokens' dtype.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels.tpu import COLUMNS, ROWS, dot

LANES = 128


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one call.

    Attributes:
      batch, heads, length: of the tokens.
      key_dim, hidden, value_dim: widths of the network.
      block: tokens of one grid point.
      itemsize: bytes of a number of the tokens.
    """

    batch: int
    heads: int
    length: int
    key_dim: int
    hidden: int
    value_dim: int
    block: int
    itemsize: int

    @property
    def blocks(self) -> int:
        """Blocks of a row, the last one possibly partial."""
        return pl.cdiv(self.length, self.block)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows, heads and, last, blocks: sums over tokens stay in VMEM from block to block."""
        return self.batch, self.heads, self.blocks

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of w0, w1 and w2."""
        inner = (self.key_dim, self.hidden)
        return inner, (self.hidden, self.value_dim), inner

    def token_spec(self, dim: int) -> pl.BlockSpec:
        """A block of tokens of `dim` channels, of [batch, heads, time, dim]."""
        return pl.BlockSpec((1, 1, self.block, dim), lambda b, h, t: (b, h, t, 0))

    def rate_spec(self, rates: int) -> pl.BlockSpec:
        """A block of rates, of [batch, heads, rates, blocks · block]."""
        return pl.BlockSpec((1, 1, rates, self.block), lambda b, h, t: (b, h, 0, t))

    def matrix_specs(self) -> list[pl.BlockSpec]:
        """The matrices of one head, of [batch, heads, in, out]."""
        return [pl.BlockSpec((1, 1, *s), lambda b, h, t: (b, h, 0, 0)) for s in self.matrices]

    def vmem_bytes(self, backward: bool) -> int:
        """Estimate from above of the VMEM that a kernel takes; blocks count twice."""
        key, hidden, value = (-(-d // LANES) * LANES for d in
                              (self.key_dim, self.hidden, self.value_dim))  # fmt: skip
        matrix = 2 * key * hidden + hidden * value
        tokens = self.block * (key + value) * self.itemsize
        matrices = matrix * (self.itemsize + 4)  # operands, and sums in float32
        live = 4 * self.block * (5 * hidden + 2 * key + value) + 4 * max(key, value) * hidden
        if backward:
            tokens, matrices = 2 * tokens, matrices + matrix * self.itemsize
            live += 4 * self.block * 8 * hidden
        return 2 * (tokens + matrices) + (live if self.itemsize == 2 else 3 * live)


class Hidden(NamedTuple):
    """A block's values between the layers."""

    gate: jax.Array  # x W0
    up: jax.Array  # x W2
    sigmoid: jax.Array  # of the gate
    activated: jax.Array  # silu(gate)

    @property
    def value(self) -> jax.Array:
        """`silu(x W0) * (x W2)`, the input of the last layer."""
        return self.activated * self.up

    @property
    def slope(self) -> jax.Array:
        """`silu'(gate) = s (1 + gate (1 - s))`."""
        return self.sigmoid * (1 + self.gate * (1 - self.sigmoid))

    @property
    def curvature(self) -> jax.Array:
        """`silu''(gate) = s (1 - s) (2 + gate (1 - 2 s))`."""
        s = self.sigmoid
        return s * (1 - s) * (2 + self.gate * (1 - 2 * s))


def hidden(x: jax.Array, w0: jax.Array, w2: jax.Array) -> Hidden:
    """A block of tokens through the two first layers."""
    gate, up = dot(x, w0, COLUMNS, ROWS), dot(x, w2, COLUMNS, ROWS)
    sigmoid = jax.nn.sigmoid(gate)
    return Hidden(gate, up, sigmoid, gate * sigmoid)


def column(ref, index: int) -> jax.Array:
    """One of a block's rates, a number a token, [block, 1]."""
    return ref[0, 0, index, :][:, None].astype(jnp.float32)
