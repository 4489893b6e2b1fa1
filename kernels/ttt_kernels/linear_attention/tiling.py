"""How the Mosaic GPU kernels cut a call into thread blocks, and what fits in shared memory.

One thread block (CTA) takes one segment of the sequence, one head (two where heads are 64 wide)
and one slab of value columns. Two warpgroups compute, each for its own columns, one prepares what
they both need and one loads. Blocks of 64 tokens pass through a ring of `stages` slots in shared
memory.
"""

from __future__ import annotations

import dataclasses

BLOCK = 64
"""Tokens a block: the height of one wgmma accumulator tile."""
COMPUTE_WARPGROUPS = 2
HOPPER_MULTIPROCESSORS = 132
SHARED_MEMORY_BYTES = 232_448
# Scratch that Mosaic GPU reserves for reductions, and the barriers.
_RESERVED_BYTES = 2_048 + 1_024
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static choices of one kernel launch.

    Attributes:
      key_dim: padded width of q and k, a multiple of 64 up to 256.
      value_dim: padded width of v, a multiple of `2 * columns` (of 64 with `heads_per_cta=2`).
      heads_per_cta: 1, or 2 where both widths are 64: each warpgroup then has its own head.
      columns: value columns of one warpgroup, 32 or 64.
      stages: slots in the ring of loaded blocks.
      segments: pieces into which the sequence is cut.
      portable: whether the kernel keeps to what JAX's interpreter can run: accumulators start from
        zero, and what they would start from is added to their result.
    """

    key_dim: int
    value_dim: int
    heads_per_cta: int
    columns: int
    stages: int
    segments: int
    portable: bool

    @property
    def swizzle(self) -> int:
        """Swizzle in bytes of bf16 tiles with `columns` columns."""
        return 2 * self.columns

    @property
    def slabs(self) -> int:
        """Value slabs, each a CTA of its own."""
        if self.heads_per_cta == 2:
            return 1
        return self.value_dim // (COMPUTE_WARPGROUPS * self.columns)

    def shared_memory(self, decay: bool, beside: bool = False) -> int:
        """Bytes of shared memory that the output kernel takes; `beside`: with one more tile."""
        values = COMPUTE_WARPGROUPS * BLOCK * self.columns
        slot = 2 * self.heads_per_cta * BLOCK * self.key_dim + values
        slot += self.heads_per_cta * BLOCK * BLOCK + (values if decay else 0)
        sums = 8 * self.heads_per_cta * BLOCK if decay else 0
        state = COMPUTE_WARPGROUPS * self.key_dim * self.columns
        total = self.stages * (2 * slot + sums) + 2 * (state + values * (2 if beside else 1))
        return total + _RESERVED_BYTES

    def with_beside(self) -> Tiling:
        """The tiling for a launch with decays and a tile beside: fewer stages where it must."""
        stages = self.stages
        while self.replace(stages=stages).shared_memory(True, True) > SHARED_MEMORY_BYTES:
            stages -= 1
        return self.replace(stages=stages)

    def replace(self, **changes) -> Tiling:
        """The tiling with some fields changed."""
        return dataclasses.replace(self, **changes)


def padded_dim(dim: int) -> int:
    """The head width that the kernels run for `dim`: the next multiple of 64.

    >>> padded_dim(48), padded_dim(128), padded_dim(129)
    (64, 128, 192)
    """
    return -(-dim // 64) * 64


def blocks(length: int) -> int:
    """Blocks of a sequence, the last one possibly partial."""
    return -(-length // BLOCK)


def choose(
    batch: int,
    length: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    decay: bool,
    portable: bool = False,
    segments: int | None = None,
    stages: int | None = None,
) -> Tiling:
    """The tiling for a call, dims already padded and heads even where they are paired.

    Segments are as many as keep one CTA on every multiprocessor and no more: a second wave of
    CTAs that each fill the shared memory would run mostly empty.

    Raises:
      ValueError: `segments` or `stages` out of range.

    >>> choose(1, 32768, 12, 128, 128, decay=False).segments
    11
    """
    pair = key_dim == 64 and value_dim == 64
    columns = 64 if pair or (key_dim <= 128 and value_dim % 128 == 0) else 32
    tiling = Tiling(key_dim, value_dim, 2 if pair else 1, columns, 1, 1, portable)
    ctas = batch * heads // tiling.heads_per_cta * tiling.slabs
    if segments is None:
        segments = max(1, min(blocks(length), HOPPER_MULTIPROCESSORS // ctas))
    if not 1 <= segments <= blocks(length):
        raise ValueError(f"segments={segments} must be from 1 to {blocks(length)} blocks")
    fitting = stage_options(dataclasses.replace(tiling, segments=segments), decay)
    if stages is None:
        stages = fitting[-1]
    if stages not in fitting:
        raise ValueError(f"stages={stages} must be one of {fitting} to fit in shared memory")
    return dataclasses.replace(tiling, segments=segments, stages=stages)


def stage_options(tiling: Tiling, decay: bool) -> tuple[int, ...]:
    """Ring lengths that fit in shared memory, shortest first."""
    return tuple(
        stages
        for stages in (1, 2, 3, 4)
        if dataclasses.replace(tiling, stages=stages).shared_memory(decay) <= SHARED_MEMORY_BYTES
    )
