"""The Hopper kernels of the SwiGLU's first two layers: gate, up and what is made of them, one pass.

One thread block (CTA) takes one head, one stretch of the tokens and one slab of hidden channels,
whose gate and up columns lie side by side and stay in shared memory: both halves of an accumulator
meet in one thread. Two warpgroups compute, 64 tokens each; a third one loads.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

ROWS = 64
"""Tokens of a warpgroup's tile."""
DEPTH = 64
"""Key channels of one step of a product."""
WARPGROUPS = 2
BLOCK = WARPGROUPS * ROWS
HIDDEN_TILES, ERROR_TILES, LEARNING_TILES = 1, 3, 4
_MULTIPROCESSORS = 132
_SHARED_BYTES = 232_448 - 2_048 - 4 * 1_024  # what reductions and barriers leave
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of a launch: sizes, padded already, hidden channels a slab, slots, pieces."""

    batch: int
    length: int
    heads: int
    key_dim: int
    hidden: int
    slab: int
    stages: int
    segments: int

    @property
    def steps(self) -> int:
        """Steps of a product over the key channels."""
        return self.key_dim // DEPTH

    @property
    def slabs(self) -> int:
        """Slabs of a head."""
        return self.hidden // self.slab

    @property
    def blocks(self) -> int:
        """Blocks of tokens of a row, the last one possibly partial."""
        return -(-self.length // BLOCK)


def _shared_bytes(key_dim: int, slab: int, stages: int, tiles: int) -> int:
    return 2 * (key_dim * 2 * slab + stages * BLOCK * DEPTH + tiles * BLOCK * slab)


def choose(
    batch: int, length: int, heads: int, key_dim: int, hidden: int, *, tiles: int
) -> Plan | None:
    """The plan of a call, or None where a slab does not fit in shared memory.

    The widest slab that fits is taken, so that tokens are read as few times as can be, and as many
    stretches of the tokens as fill the chip once.

    Args:
      batch, length, heads, key_dim, hidden: sizes, the widths padded.
      tiles: tiles of tokens by hidden channels that the kernel holds for its results, and for what
        it reads: `HIDDEN_TILES` and so on.

    >>> plan = choose(1, 32768, 4, 384, 384, tiles=HIDDEN_TILES)
    >>> plan.slab, plan.segments
    (96, 8)
    """
    for slab in (96, 64, 32) if tiles == 1 else (64, 32):
        for stages in (4, 3, 2):
            fits = _shared_bytes(key_dim, slab, stages, tiles) <= _SHARED_BYTES
            if hidden % slab == 0 and fits:
                ctas = batch * heads * hidden // slab
                segments = max(1, min(-(-length // BLOCK), _MULTIPROCESSORS // ctas))
                return Plan(batch, length, heads, key_dim, hidden, slab, stages, segments)
    return None


def slabs(w0: jax.Array, w2: jax.Array, slab: int) -> jax.Array:
    """Gate and up columns slab by slab, [batch, heads, in, hidden] to [.., slabs, in, 2 slab]."""
    parts = [w.reshape(*w.shape[:-1], -1, slab) for w in (w0, w2)]
    return jnp.moveaxis(jnp.concatenate(parts, axis=-1), -2, -3)


def tile_of(*shape: int):
    """A bf16 tile in shared memory, swizzled by as many bytes as its last axis allows."""
    plgpu = compat.mosaic_gpu()
    width = 64 if shape[-1] % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Place(NamedTuple):
    """Where a warpgroup's tile of a block lies: traced indices."""

    row: jax.Array
    head: jax.Array
    slab: jax.Array
    block: jax.Array
    warpgroup: jax.Array

    @property
    def tokens(self):
        """Its tokens."""
        return pl.ds(first_token(self.block, self.warpgroup), ROWS)

    def columns(self, plan: Plan, part: int = 0):
        """Its hidden channels; `part` 1 are those of up behind all of gate's."""
        return pl.ds(part * plan.hidden + self.slab * plan.slab, plan.slab)


def first_token(block, warpgroup):
    """The first token of a warpgroup's tile."""
    return block * BLOCK + warpgroup * ROWS


def load_rates(plan: Plan, ref, place: Place):
    """Rates of a tile's tokens, one a row, over all of its columns."""
    plgpu = compat.mosaic_gpu()
    source = ref.at[place.row, place.head, place.tokens]
    rates = compat.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(rates, (ROWS, plan.slab), (0,))


def store(tile, value, target):
    """Writes a tile of registers to global memory through shared memory."""
    plgpu = compat.mosaic_gpu()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tile[...] = value.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)


def kernel(plan: Plan, body, out_type, tiles, interpret):
    """The launch: the slab, the ring of the tokens' slices and their barriers come last."""
    plgpu = compat.mosaic_gpu()
    ring = [
        tile_of(plan.steps, DEPTH, 2 * plan.slab),
        tile_of(plan.stages, WARPGROUPS, ROWS, DEPTH),
        plgpu.Barrier(num_arrivals=plan.steps),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages),
    ]
    return compat.gpu_kernel(
        body,
        out_type=out_type,
        scratch_types=[*tiles, *ring],
        grid=(plan.slabs, plan.heads, plan.segments, plan.batch),
        grid_names=("slab", "head", "segment", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )


def run(plan: Plan, x_ref, w_ref, ring, finish, extra=None) -> None:
    """The two loops; `finish(accumulator, place)` makes the results of a warpgroup's tile.

    `extra` is what else the memory warpgroup loads: a function `(first, place)` called late in each
    block, and the barrier at which each block's is given back.
    """
    plgpu = compat.mosaic_gpu()
    weights, xs, loaded, full, free = ring
    slab, h = lax.axis_index("slab"), lax.axis_index("head")
    segment, b = lax.axis_index("segment"), lax.axis_index("batch")
    w = lax.axis_index("warpgroup")
    low = lax.div(segment * plan.blocks, plan.segments)
    count = lax.div((segment + 1) * plan.blocks, plan.segments) - low

    @pl.when(w == WARPGROUPS)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        row = 0 if w_ref.shape[0] == 1 else b
        for k in range(plan.steps):
            source = w_ref.at[row, h, slab, pl.ds(k * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(source, weights.at[k], loaded)
        _load_tokens(plan, x_ref, xs, full, free, (b, h, slab), low, count, extra)

    @pl.when(w < WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        plgpu.barrier_wait(loaded)

        @pl.loop(0, count)
        def _(i):
            def product(acc):
                for k in range(plan.steps):
                    slot = lax.rem(i * plan.steps + k, jnp.int32(plan.stages))
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, xs.at[slot, w], weights.at[k])
                    if k:
                        plgpu.wgmma_wait(1)
                        before = lax.rem(i * plan.steps + k - 1, jnp.int32(plan.stages))
                        plgpu.barrier_arrive(free.at[before])
                found = acc[...]
                plgpu.barrier_arrive(free.at[slot])
                return found

            acc = pl.run_scoped(product, plgpu.ACC((ROWS, 2 * plan.slab), jnp.float32))
            finish(acc, Place(b, h, slab, low + i, w))

        plgpu.wait_smem_to_gmem(0)


def _load_tokens(plan: Plan, x_ref, xs, full, free, head_and_slab, low, count, extra) -> None:
    """The memory warpgroup's loop over blocks and slices of their key channels."""
    plgpu = compat.mosaic_gpu()
    b, h, slab = head_and_slab
    total = count * plan.steps

    @pl.loop(0, total)
    def _(i):
        slot = lax.rem(i, jnp.int32(plan.stages))

        @pl.when(i >= plan.stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        number, k = lax.div(i, jnp.int32(plan.steps)), lax.rem(i, jnp.int32(plan.steps))
        for w in range(WARPGROUPS):
            tokens, channels = pl.ds(first_token(low + number, w), ROWS), pl.ds(k * DEPTH, DEPTH)
            source = x_ref.at[b, tokens, h, channels]
            plgpu.copy_gmem_to_smem(source, xs.at[slot, w], full.at[slot])
        if extra is not None:
            @pl.when(k == plan.steps - 1)
            def _():
                extra[0](number == 0, Place(b, h, slab, low + number, 0))

    # A producer must outlive its consumers' last arrivals.
    @pl.loop(lax.max(total - plan.stages, jnp.int32(0)), total)
    def _(i):
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(plan.stages))])

    if extra is not None:
        plgpu.barrier_wait(extra[1])
