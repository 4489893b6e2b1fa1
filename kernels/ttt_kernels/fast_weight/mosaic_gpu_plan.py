"""How the Hopper kernels of the fast weight are cut into thread blocks, and what fits in them.

A thread block takes one head, one stretch of the tokens and one slab of hidden channels, whose
columns of all matrices lie side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

ROWS = 64
"""Tokens of a tile."""
DEPTH = 64
"""Key channels of one step of a product."""
PIECE = 32
"""Hidden channels whose results are made and stored together."""
WARPGROUPS = 2
_MULTIPROCESSORS = 132
_SHARED_BYTES = 232_448 - 2_048 - 1_024  # what reductions and barriers leave
# Slots of tokens and tiles to store through: eight slots keep enough bytes in flight, with one tile
# alone each store waits for the one before.
_RINGS = ((8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1))
_MAX_COLUMNS = 192  # of an accumulator, so that results fit beside it in registers


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of a launch: sizes, padded already, and how they are cut.

    Attributes:
      batch, length, heads, key_dim, hidden: sizes.
      slab: hidden channels of a thread block.
      stages: slots of the ring of tokens.
      buffers: tiles through which a warpgroup stores, in turn.
      stores: pieces that a warpgroup stores of a tile.
      segments: stretches of the tokens.
      parts: matrices whose columns lie side by side in a slab.
    """

    batch: int
    length: int
    heads: int
    key_dim: int
    hidden: int
    slab: int
    stages: int
    buffers: int
    segments: int
    parts: int
    stores: int

    @property
    def steps(self) -> int:
        """Steps of a product over the key channels."""
        return self.key_dim // DEPTH

    @property
    def columns(self) -> int:
        """Columns of a slab's matrices."""
        return self.parts * self.slab

    @property
    def slabs(self) -> int:
        """Slabs of a head."""
        return self.hidden // self.slab

    @property
    def tiles(self) -> int:
        """Tiles of tokens of a row, the last one possibly partial."""
        return -(-self.length // ROWS)


def _shared_bytes(key_dim: int, columns: int, stages: int, buffers: int) -> int:
    tiles = stages * ROWS * DEPTH + WARPGROUPS * buffers * ROWS * PIECE
    return 2 * (key_dim * columns + tiles)


def choose(
    batch: int, length: int, heads: int, key_dim: int, hidden: int, *, parts: int, results: int
) -> Plan | None:
    """The plan of a call, or None where a slab does not fit in shared memory.

    The widest slab that fits is taken, so that tokens are read as few times as can be, and as many
    stretches of the tokens as fill the chip once.

    Args:
      batch, length, heads, key_dim, hidden: sizes, the widths padded.
      parts: matrices side by side: gate's and up's, or these and their gradients'.
      results: arrays of the hidden width that are stored.

    >>> plan = choose(1, 32768, 4, 384, 384, parts=2, results=1)
    >>> plan.slab, plan.stages, plan.buffers, plan.segments
    (96, 8, 2, 8)
    """
    for slab in (96, 64, 32):
        for stages, buffers in _RINGS:
            fits = _shared_bytes(key_dim, parts * slab, stages, buffers) <= _SHARED_BYTES
            if hidden % slab == 0 and parts * slab <= _MAX_COLUMNS and fits:
                ctas = batch * heads * hidden // slab
                segments = max(1, min(-(-length // ROWS), _MULTIPROCESSORS // ctas))
                stores = results * slab // PIECE
                sizes = (batch, length, heads, key_dim, hidden, slab)
                return Plan(*sizes, stages, buffers, segments, parts, stores)
    return None


def slabs(matrices: Sequence[jax.Array], slab: int) -> jax.Array:
    """Columns slab by slab, [batch, heads, in, hidden] each to [.., slabs, in, n slab]."""
    parts = [w.reshape(*w.shape[:-1], -1, slab) for w in matrices]
    return jnp.moveaxis(jnp.concatenate(parts, axis=-1), -2, -3)
