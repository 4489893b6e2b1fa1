"""What the Mosaic GPU kernels of linear attention share: the plan of a launch, tiles and loads."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_registers as registers
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling, blocks

MEMORY_REGISTERS = 40
COMPUTE_REGISTERS = 232
# With a third kind of warpgroup: 2 * 184 + 104 + 40 = 512 registers for four threads.
STATE_REGISTERS = 184
HELPER_REGISTERS = 104


class Weights(NamedTuple):
    """What the kernels read beside the tensors; None what a call has not or a kernel needs not."""

    log_decay: jax.Array | None  # [batch, blocks * 64, heads] f32
    sums: jax.Array | None  # [batch, heads, blocks * 64] f32, log decays from the block's start
    real: jax.Array | None  # [batch, blocks * 64] f32, 0 for padding of packed rows
    padded: jax.Array | None  # [batch, blocks] int32, whether a block holds padding

    def arrays(self) -> tuple[jax.Array, ...]:
        """Those that are there, in order."""
        return tuple(x for x in self if x is not None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What both kernel bodies need to know, all static."""

    tiling: Tiling
    batch: int
    length: int
    heads: int
    given: tuple[bool, ...]  # which of the weights the kernel reads
    reverse: bool

    @classmethod
    def of(cls, tiling: Tiling, q, weights: Weights, reverse: bool) -> Plan:
        """The plan of a call with queries (or keys) like `q`."""
        return cls(tiling, *q.shape[:3], tuple(x is not None for x in weights), reverse)

    @property
    def decay(self) -> bool:
        """Whether the state decays."""
        given = Weights(*self.given)
        return given.log_decay or given.sums

    @property
    def documents(self) -> bool:
        """Whether rows are packed, with padding that must be zeroed."""
        return Weights(*self.given).padded

    def split(self, refs) -> tuple[Weights, tuple]:
        """References of the weights that the kernel reads, and the references behind them."""
        refs = list(refs)
        weights = Weights(*(refs.pop(0) if given else None for given in self.given))
        return weights, tuple(refs)

    def segment_blocks(self, segment):
        """First block and number of blocks of a segment; they differ by at most one block."""
        n = blocks(self.length)
        low = lax.div(segment * n, self.tiling.segments)
        high = lax.div((segment + 1) * n, self.tiling.segments)
        return low, high - low

    def head(self, group, warpgroup):
        """The head that a warpgroup works on."""
        return group * 2 + warpgroup if self.tiling.heads_per_cta == 2 else group

    def column(self, slab, warpgroup):
        """First value column of a warpgroup."""
        if self.tiling.heads_per_cta == 2:
            return 0
        return (slab * COMPUTE_WARPGROUPS + warpgroup) * self.tiling.columns

    @property
    def parts(self) -> int:
        """Pieces of a head's value columns, a warpgroup each."""
        return self.tiling.slabs * (1 if self.tiling.heads_per_cta == 2 else COMPUTE_WARPGROUPS)

    def grid(self, segments: int, warpgroups: int = COMPUTE_WARPGROUPS + 1) -> dict:
        """Grid, threads and names of a launch."""
        groups = self.heads // self.tiling.heads_per_cta
        return dict(
            grid=(self.tiling.slabs, groups, segments, self.batch),
            grid_names=("slab", "group", "segment", "batch"),
            num_threads=warpgroups,
            thread_name="warpgroup",
        )


def tile(tiling: Tiling, *shape: int):
    """A bf16 tile in shared memory. Both operands of a wgmma must have the same swizzle."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, tiling.columns)),
                  plgpu.SwizzleTransform(tiling.swizzle))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Beside(NamedTuple):
    """A tile that comes once a block outside the ring: single slot, loaded when it is free."""

    tile: object  # [compute warpgroups, 64, columns]
    full: object
    free: object


def load_blocks(plan: Plan, copies, full, free, first, count, order, beside=None, copy_beside=None):
    """The memory warpgroup's loop: `copies(slot, token, barrier)` for each block of the ring.

    With `beside`, also `copy_beside(token, barrier)` once its tile is free.
    """
    plgpu = compat.mosaic_gpu()
    stages = full.shape[0]
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(stages))
        token = (first + order(i, count)) * BLOCK

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copies(slot, token, full.at[slot])
        if beside is None:
            return

        @pl.when(i >= 1)
        def _():
            plgpu.barrier_wait(beside.free)

        copy_beside(token, beside.full)

    # A producer must outlive its consumers' last arrivals.
    @pl.loop(lax.max(count - stages, jnp.int32(0)), count)
    def _(i):
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

    if beside is not None:
        plgpu.barrier_wait(beside.free)


def forwards(i, count):
    """Block of step `i` of `count` when a segment is walked from its start."""
    del count
    return i


def backwards(i, count):
    """Block of step `i` of `count` when a segment is walked from its end."""
    return count - 1 - i


def walk(count, block_of, load, body, carry=()):
    """A warpgroup's loop over blocks: `carry = body(i, block, loaded, carry)` for `count` steps.

    `load(block)` reads what the block needs of global memory, one step ahead.
    """
    def step(i, state):
        loaded, carry = state
        ahead = load(block_of(lax.min(i + 1, count - 1)))
        return ahead, body(i, block_of(i), loaded, carry)

    return lax.fori_loop(0, count, step, (load(block_of(jnp.int32(0))), carry))[1]


def is_padded(weights: Weights, batch, block):
    """Whether a block holds padding, int32; None without documents."""
    return None if weights.padded is None else weights.padded[batch, block]


def clean_tiles(weights: Weights, padded, batch, block, tiles) -> None:
    """Zeroes the rows of a block's tiles that are padding, which may hold NaN."""
    plgpu = compat.mosaic_gpu()

    @pl.when(padded != 0)
    def _():
        real = registers.load_vector(weights.real.at[batch, pl.ds(block * BLOCK, BLOCK)], 1)
        for tile in tiles:
            x = compat.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)
            x = jnp.where(registers.rows(real, x.shape[1]) > 0, x.astype(jnp.float32), 0.0)
            tile[...] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()


def copy_values(plan: Plan, ref, slots, slot, batch, group, slab, token, barrier):
    """Starts the copies of a block's value columns, one for each compute warpgroup.

    `slot` is None for tiles without a stage axis.
    """
    plgpu = compat.mosaic_gpu()
    for w in range(COMPUTE_WARPGROUPS):
        columns = pl.ds(plan.column(slab, w), plan.tiling.columns)
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, w), columns]
        target = slots.at[w] if slot is None else slots.at[slot, w]
        plgpu.copy_gmem_to_smem(source, target, barrier)


def copy_keys(plan: Plan, ref, slots, slot, batch, group, token, barrier):
    """Starts the copies of a block's keys (or queries), one for each head of the CTA."""
    plgpu = compat.mosaic_gpu()
    for g in range(plan.tiling.heads_per_cta):
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, g)]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, g], barrier)


def copy_sums(plan: Plan, ref, slots, slot, batch, group, token, barrier):
    """Starts the copies of a block's sums of log decays, one for each head of the CTA."""
    plgpu = compat.mosaic_gpu()
    for g in range(plan.tiling.heads_per_cta):
        source = ref.at[batch, plan.head(group, g), pl.ds(token, BLOCK)]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, g], barrier)


def wait_prepared(barrier, padded, *, first: bool) -> None:
    """Waits for a block's prepared tiles: first of all where its padding is being zeroed, else
    as late as they are needed. Called twice a block."""
    plgpu = compat.mosaic_gpu()
    if padded is None:
        if not first:
            plgpu.barrier_wait(barrier)
        return

    @pl.when((padded != 0) if first else (padded == 0))
    def _():
        plgpu.barrier_wait(barrier)


def own(plan: Plan, warpgroup):
    """Index of a warpgroup's head among those the CTA has loaded."""
    return warpgroup if plan.tiling.heads_per_cta == 2 else 0
