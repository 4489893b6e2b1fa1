"""How the Mosaic TPU kernels cut a call into grid points, and what fits in on-chip memory (VMEM).

Heads lie side by side in the lanes of `[batch, time, heads · dim]`, which is the layout that the
projections around the kernel write: nothing is transposed. One grid point takes `block` tokens of
a few heads whose lanes are a multiple of 128; the grid walks the time last, so that the state
stays in VMEM from block to block while the pipeline loads the next tokens.
"""

from __future__ import annotations

import dataclasses

from ttt_kernels import compat

LANES = 128
# Heads of one grid point together: more of them hide the fixed cost of a grid point.
_MAX_LANES = 512


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static choices of one kernel launch.

    Attributes:
      key_dim: width of a head's q and k, padded so that `heads_per_block` fill whole lanes.
      value_dim: the same of v.
      heads_per_block: heads of one grid point.
      block: tokens of one grid point, a multiple of 128.
      itemsize: bytes of a number of q, k and v.
      scores: whether tokens of a block see one another: causal by token.
    """

    key_dim: int
    value_dim: int
    heads_per_block: int
    block: int
    itemsize: int
    scores: bool

    def vmem_bytes(self, backward: bool) -> int:
        """Estimate of the VMEM that a kernel takes: blocks twice, and its float32 values.

        An estimate from above for the chips known: `tests/kernels` compares it with what the
        compiler takes.
        """
        key = self.heads_per_block * self.block * self.key_dim
        value = self.heads_per_block * self.block * self.value_dim
        lanes = -(-self.value_dim // LANES) * LANES
        state = self.heads_per_block * self.key_dim * lanes
        # q, k, v, out; in the backward pass q, k, v and their gradients, and out's.
        tokens = (4 * key + 3 * value if backward else 2 * key + 2 * value) * self.itemsize
        states = 2 * 4 * state + self.itemsize * state  # first and last in float32, one a block
        vectors = 2 * 4 * 8 * self.heads_per_block * self.block  # decays and their gradient
        # The compiler works on several heads at once, on a v6e on more than on the others.
        scores = 4 * self.block**2 * (6 if backward else 3)
        scores += 4 * self.block**2 * self.heads_per_block * (2 if backward else 1)
        live = 4 * (self.block * (2 * self.key_dim + 2 * self.value_dim)
                    + self.key_dim * self.value_dim)
        live *= 2 if self.itemsize == 2 else 5  # float32 products are split in parts
        return 2 * (tokens + states + vectors) + live + (scores if self.scores else 0)


def padded_dims(heads: int, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Head widths that the kernels run: as they are where an even number of heads fills lanes.

    >>> padded_dims(4, 64, 64), padded_dims(3, 64, 64), padded_dims(4, 80, 384)
    ((64, 64), (128, 128), (128, 384))
    """
    if all(heads * dim % LANES == 0 and dim % 64 == 0 for dim in (key_dim, value_dim)):
        return key_dim, value_dim
    return tuple(-(-dim // LANES) * LANES for dim in (key_dim, value_dim))


def needed_chunk(chunk_size: int, length: int) -> int:
    """`chunk_size`; where one chunk holds the whole row, the least whole blocks that hold it.

    >>> needed_chunk(196, 196), needed_chunk(2048, 196), needed_chunk(100, 196)
    (256, 256, 100)
    """
    return chunk_size if chunk_size < length else -(-length // LANES) * LANES


def choose(
    length: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    *,
    block: int | None = None,
    chunk_size: int | None = None,
    heads_per_block: int | None = None,
) -> Tiling:
    """The tiling for a call whose head widths are those of `padded_dims`.

    Args:
      length, heads, key_dim, value_dim, itemsize: of the call.
      block: tokens of a grid point; None takes the best that fits: by the compiler's schedules
        256 causal by token, and by chunk as many as divide the chunk, up to 1024.
      chunk_size: where chunks bound the blocks; a multiple of 128.
      heads_per_block: heads of a grid point; None takes as many as lie in 512 lanes.

    Raises:
      ValueError: `block` is no multiple of 128 (or does not divide `chunk_size`), does not fit
        in VMEM, or nothing does; `heads_per_block` does not fit `heads` or the lanes.

    >>> choose(4096, 12, 128, 128, 2)
    Tiling(key_dim=128, value_dim=128, heads_per_block=4, block=256, itemsize=2, scores=True)
    """
    fitting = [
        n for n in range(1, heads + 1)
        if heads % n == 0 and all(n * dim % LANES == 0 for dim in (key_dim, value_dim))
    ]
    if heads_per_block is None:
        wide = max(key_dim, value_dim)
        heads_per_block = max([n for n in fitting if n * wide <= _MAX_LANES] or fitting[:1])
    if heads_per_block not in fitting:
        raise ValueError(f"heads_per_block={heads_per_block} must be one of {fitting}")
    allowed = [256, 128]
    if chunk_size is not None:
        allowed = [b for b in (1024, 512, 256, 128) if chunk_size % b == 0]
    if block is not None and (block % LANES or (chunk_size or block) % block):
        raise ValueError(
            f"block={block} must be a multiple of {LANES}"
            + (f" that divides chunk_size={chunk_size}" if chunk_size else "")
        )
    allowed = [b for b in allowed if b < 2 * length] or [LANES]
    made = [
        Tiling(key_dim, value_dim, heads_per_block, b, itemsize, chunk_size is None)
        for b in ([block] if block else allowed)
    ]
    for tiling in made:
        if tiling.vmem_bytes(backward=True) <= compat.TPU_VMEM_BYTES:
            return tiling
    raise ValueError(
        f"block={made[-1].block} tokens of {heads_per_block} heads of {key_dim} x {value_dim} need "
        f"{made[-1].vmem_bytes(backward=True)} bytes of VMEM and there are "
        f"{compat.TPU_VMEM_BYTES}; make block smaller (at least {LANES}), heads_per_block smaller "
        "or the head dims smaller"
    )
