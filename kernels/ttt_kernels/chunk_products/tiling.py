"""How the Mosaic GPU kernels cut the chunk products into thread blocks, and what fits in them.

Tokens pass in blocks of 64 through rings of slots in shared memory. The summaries' thread block
owns a tile of one state, 64 rows a warpgroup, and goes on to its next tile while the first is
stored. The outputs' thread block keeps some columns of one state in shared memory, and each of
its two compute warpgroups has its own blocks of tokens, its own ring and its own loading
warpgroup, so that one multiplies while the other stores.
"""

from __future__ import annotations

import dataclasses

BLOCK = 64
"""Tokens a block, and the height of one wgmma accumulator tile."""
MAX_HEAD_DIM = 768
HOPPER_MULTIPROCESSORS = 132
SHARED_MEMORY_BYTES = 232_448
TILE_BYTES = 2 * BLOCK * BLOCK
"""A tile of 64 x 64 bf16, the unit in which shared memory is dealt out."""
# Scratch that Mosaic GPU reserves for reductions, and the barriers.
_RESERVED_BYTES = 2_048 + 1_024
_TILES = (SHARED_MEMORY_BYTES - _RESERVED_BYTES) // TILE_BYTES
_PAIRS = 2
# A slot is a step modulo the ring's length, cheap for powers of two and for divisors of the pieces
# of a block: at 768 columns 6 slots take 147 us, 8 take 152 and 7 take 178.
_RING_LENGTHS = (8, 6, 5, 4, 3)
_MAX_STAGES = 8
_REGISTER_KEY_DIM = 384


@dataclasses.dataclass(frozen=True)
class SummaryTiling:
    """Static choices of a launch of the summaries.

    Attributes:
      warpgroups: compute warpgroups, each with 64 rows (key columns) of the tile.
      columns: columns of the tile, 64 to 256.
      stages: slots in the ring, each with 64 tokens' keys and values.
    """

    warpgroups: int
    columns: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return BLOCK * self.warpgroups

    @property
    def tiles(self) -> int:
        """Units of `TILE_BYTES` that the kernel takes, one a warpgroup for storing."""
        return self.stages * (self.warpgroups + self.columns // BLOCK) + self.warpgroups


@dataclasses.dataclass(frozen=True)
class OutputTiling:
    """Static choices of a launch of the outputs.

    Attributes:
      key_dim: contracted width, a multiple of 64.
      columns: columns of the state that a thread block keeps, 64 to 192: with four warpgroups
        there are 128 registers a thread, of which 192 columns take 96.
      stages: slots in each of the two rings, each with 64 x 64 of the tokens.
      parts: thread blocks that share the tokens of a chunk.
    """

    key_dim: int
    columns: int
    stages: int
    parts: int

    @property
    def tiles(self) -> int:
        """Units of `TILE_BYTES` that the kernel takes, one a warpgroup for storing."""
        return self.pieces * (self.columns // BLOCK) + _PAIRS * (self.stages + 1)

    @property
    def pieces(self) -> int:
        """Tiles of 64 contracted columns."""
        return self.key_dim // BLOCK


@dataclasses.dataclass(frozen=True)
class RegisterTiling:
    """Static choices of a launch of the outputs that keeps the state in registers.

    Attributes:
      key_dim: contracted width, a multiple of 64, at most 384: 96 registers a thread.
      warpgroups: compute warpgroups, each with 64 columns of the state.
      stages: slots in the ring, each with 64 tokens; at least one for each compute warpgroup.
      parts: thread blocks that share the tokens of a chunk.
    """

    key_dim: int
    warpgroups: int
    stages: int
    parts: int

    @property
    def columns(self) -> int:
        """Columns of the state that a thread block keeps."""
        return BLOCK * self.warpgroups

    @property
    def pieces(self) -> int:
        """Tiles of 64 contracted columns."""
        return self.key_dim // BLOCK

    @property
    def tiles(self) -> int:
        """Units of `TILE_BYTES` that the kernel takes, one a warpgroup for storing."""
        return self.stages * self.pieces + self.warpgroups


def padded_dim(dim: int) -> int:
    """The head width that the kernels run for `dim`: the next multiple of 64.

    >>> padded_dim(48), padded_dim(128), padded_dim(129)
    (64, 128, 192)
    """
    return -(-dim // BLOCK) * BLOCK


def _largest(dim: int, choices: tuple[int, ...]) -> int:
    return next(width for width in choices if dim % width == 0)


def summary_options(
    key_dim: int, value_dim: int, rated: bool = False
) -> tuple[SummaryTiling, ...]:
    """The tilings that fit for padded widths, with or without rates, the default first.

    >>> summary_options(384, 384)[0]
    SummaryTiling(warpgroups=3, columns=192, stages=4)
    """
    warpgroups = _largest(key_dim, (192, 128, 64)) // BLOCK
    # Three warpgroups have 152 registers a thread: 256 columns would take 128 of them.
    wide = () if warpgroups == 3 else (256,)
    columns = _largest(value_dim, (*wide, 192, 128, 64))
    fitting = [
        tiling
        for stages in range(_MAX_STAGES, 1, -1)
        if (tiling := SummaryTiling(warpgroups, columns, stages)).tiles + rated <= _TILES
    ]
    return tuple(fitting[:2])


def output_options(key_dim: int, value_dim: int, units: int, blocks: int):
    """The tilings that fit for padded widths, the default first.

    Args:
      key_dim, value_dim: widths, multiples of 64.
      units: chunks of all heads and rows.
      blocks: blocks of 64 tokens in a chunk.

    >>> output_options(384, 384, 64, 32)[0]
    OutputTiling(key_dim=384, columns=192, stages=4, parts=1)
    """
    made = []
    for columns in (192, 128, 64):
        if value_dim % columns:
            continue
        # Whatever is left over when each multiprocessor has a thread block stays idle, but a part
        # must be long enough to pay for loading the state.
        room = HOPPER_MULTIPROCESSORS // (units * (value_dim // columns))
        parts = max(1, min(room, blocks // (2 * _PAIRS)))
        fitting = (OutputTiling(key_dim, columns, stages, parts) for stages in _RING_LENGTHS)
        made += [
            t for t in fitting
            if t.tiles <= _TILES and (t.stages in (4, 8) or t.pieces % t.stages == 0)
        ][:1]
    return tuple(made)


def register_options(key_dim: int, value_dim: int, units: int, blocks: int):
    """As `output_options`, for states that stay in registers: wider ones than 384 do not fit.

    >>> register_options(384, 384, 64, 32)
    (RegisterTiling(key_dim=384, warpgroups=3, stages=4, parts=1),)
    """
    if key_dim > _REGISTER_KEY_DIM:
        return ()
    warpgroups = _largest(value_dim, (192, 128, 64)) // BLOCK
    room = HOPPER_MULTIPROCESSORS // (units * (value_dim // (warpgroups * BLOCK)))
    parts = max(1, min(room, blocks // (2 * _PAIRS)))
    stages = min(_MAX_STAGES, (_TILES - warpgroups) // (key_dim // BLOCK))
    return (RegisterTiling(key_dim, warpgroups, stages, parts),)
