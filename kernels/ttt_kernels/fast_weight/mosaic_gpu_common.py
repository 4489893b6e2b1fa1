"""The Hopper kernels of the SwiGLU's first two layers: gate, up and what is made of them, one pass.

One thread block (CTA) takes one head, one stretch of the tokens and one slab of hidden channels,
whose gate and up columns lie side by side and stay in shared memory: both halves of an accumulator
meet in one thread. Two warpgroups compute, a third one loads. They take tiles of 64 tokens in turn:
while one makes and stores the results of its tile, the tensor cores multiply the other's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.fast_weight.mosaic_gpu_plan import DEPTH, PIECE, ROWS, WARPGROUPS, Plan

_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


def _tile_of(*shape: int):
    """A bf16 tile in shared memory, swizzled by as many bytes as its last axis allows."""
    plgpu = compat.mosaic_gpu()
    width = 64 if shape[-1] % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Place(NamedTuple):
    """Where a tile lies: traced indices."""

    row: jax.Array
    head: jax.Array
    slab: jax.Array
    tile: jax.Array

    @property
    def tokens(self):
        """Its tokens."""
        return pl.ds(self.tile * ROWS, ROWS)

    def columns(self, plan: Plan, start: int, size: int, part: int = 0):
        """Hidden channels of its slab; `part` 1 are those of up behind all of gate's."""
        return pl.ds(part * plan.hidden + self.slab * plan.slab + start, size)


def load_rates(ref, place: Place):
    """Rates of a tile's tokens, one a row, over the columns of a piece."""
    plgpu = compat.mosaic_gpu()
    source = ref.at[place.row, place.head, place.tokens]
    rates = compat.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(rates, (ROWS, PIECE), (0,))


class Stores:
    """A warpgroup's stores of pieces, through its buffers in turn; `number` counts its tiles."""

    def __init__(self, plan: Plan, tiles, number):
        self._plan, self._tiles, self._next = plan, tiles, number * plan.stores

    def __call__(self, value, out_ref, place: Place, start: int, part: int = 0) -> None:
        """Writes [64, 32] of a tile, from column `start` of the slab on."""
        plgpu = compat.mosaic_gpu()
        tile = self._tiles.at[lax.rem(self._next, jnp.int32(self._plan.buffers))]
        self._next += 1
        plgpu.wait_smem_to_gmem(self._plan.buffers - 1, wait_read_only=True)
        tile[...] = value.astype(jnp.bfloat16)
        plgpu.commit_smem()
        columns = place.columns(self._plan, start, PIECE, part)
        plgpu.copy_smem_to_gmem(tile, out_ref.at[place.row, place.tokens, place.head, columns])


def launch(plan: Plan, body, out_type, interpret):
    """The launch of `body(*inputs, *outputs, *scratch)`, with the scratch that `run` takes."""
    plgpu = compat.mosaic_gpu()
    scratch = [
        _tile_of(WARPGROUPS, plan.buffers, ROWS, PIECE),
        _tile_of(plan.steps, DEPTH, plan.columns),
        _tile_of(plan.stages, ROWS, DEPTH),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.steps),
        plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS * plan.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
    ]
    return compat.gpu_kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(plan.slabs, plan.heads, plan.segments, plan.batch),
        grid_names=("slab", "head", "segment", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )


class _Scratch(NamedTuple):
    """Of a thread block; a slot is filled for one warpgroup, which waits at its own barriers."""

    stores: object  # tiles of each compute warpgroup
    weights: object  # the slab, 64 key channels each
    slots: object  # the ring of tokens' channels
    loaded: object  # barriers of the slab
    full: object  # of the slots, each warpgroup's own
    free: object
    turn: object  # of each warpgroup


def run(plan: Plan, refs, scratch, finish) -> None:
    """The loops of all warpgroups.

    Args:
      plan: of the launch.
      refs: the tokens, the slabs of the matrices, and what arrives from above or None: one or
        more arrays of the hidden width, slab by slab side by side. It has whole tiles of tokens,
        for it is loaded straight into registers, before the products.
      scratch: what `launch` appended.
      finish: `finish(pieces, place, store)` makes the results of a tile from an iterator over
        `(start, products, above)`: the first column in the slab, and [64, 32] float32 of each
        matrix' product and of what arrives, as many as there are.
    """
    plgpu = compat.mosaic_gpu()
    at = _Scratch(*scratch)
    place = Place(*(lax.axis_index(name) for name in ("batch", "head", "slab")), 0)
    segment, w = lax.axis_index("segment"), lax.axis_index("warpgroup")
    low = lax.div(segment * plan.tiles, plan.segments)
    count = lax.div((segment + 1) * plan.tiles, plan.segments) - low

    @pl.when(w == WARPGROUPS)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        _load(plan, *refs[:2], at, place._replace(tile=low), count)

    @pl.when(w < WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        @pl.loop(0, lax.div(count - w + 1, WARPGROUPS))
        def _(i):
            number = WARPGROUPS * i + w
            own = place._replace(tile=low + number)
            above = None if refs[2] is None else _load_above(plan, refs[2], own)
            acc = _product(plan, at, w, number)
            finish(_pieces(plan, acc, above), own, Stores(plan, at.stores.at[w], i))

        plgpu.wait_smem_to_gmem(0)


def _load(plan: Plan, x_ref, w_ref, at: _Scratch, first: Place, count) -> None:
    """The memory warpgroup: the slab beside the first tile's tokens, then tile after tile."""
    plgpu = compat.mosaic_gpu()
    total = count * plan.steps
    row = 0 if w_ref.shape[0] == 1 else first.row

    @pl.loop(0, total)
    def _(i):
        slot = lax.rem(i, jnp.int32(plan.stages))
        number, k = lax.div(i, jnp.int32(plan.steps)), lax.rem(i, jnp.int32(plan.steps))
        place = first._replace(tile=first.tile + number)
        full = at.full.at[lax.rem(number, WARPGROUPS) * plan.stages + slot]

        @pl.when(i < plan.steps)
        def _():
            source = w_ref.at[row, first.head, first.slab, pl.ds(k * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(source, at.weights.at[k], at.loaded.at[k])

        @pl.when(i >= plan.stages)
        def _():
            plgpu.barrier_wait(at.free.at[slot])

        source = x_ref.at[place.row, place.tokens, place.head, pl.ds(k * DEPTH, DEPTH)]
        plgpu.copy_gmem_to_smem(source, at.slots.at[slot], full)

    # A producer must outlive its consumers' last arrivals.
    @pl.loop(lax.max(total - plan.stages, jnp.int32(0)), total)
    def _(i):
        plgpu.barrier_wait(at.free.at[lax.rem(i, jnp.int32(plan.stages))])


def _product(plan: Plan, at: _Scratch, w, number):
    """The products of a warpgroup's tile, [64, columns] float32, when it is its turn."""
    plgpu = compat.mosaic_gpu()

    @pl.when(number > 0)
    def _():
        plgpu.barrier_wait(at.turn.at[w])

    def compute(acc):
        for k in range(plan.steps):
            slot = lax.rem(number * plan.steps + k, jnp.int32(plan.stages))

            @pl.when(number < WARPGROUPS)
            def _(k=k):
                plgpu.barrier_wait(at.loaded.at[k])

            plgpu.barrier_wait(at.full.at[w * plan.stages + slot])
            plgpu.wgmma(acc, at.slots.at[slot], at.weights.at[k])
            if k == plan.steps - 1:
                plgpu.barrier_arrive(at.turn.at[1 - w])
            if k:
                plgpu.wgmma_wait(1)
                before = lax.rem(number * plan.steps + k - 1, jnp.int32(plan.stages))
                plgpu.barrier_arrive(at.free.at[before])
        found = acc[...]
        plgpu.barrier_arrive(at.free.at[slot])
        return found

    return pl.run_scoped(compute, plgpu.ACC((ROWS, plan.columns), jnp.float32))


def _load_above(plan: Plan, ref, place: Place):
    """What arrives at a tile, bf16 in registers: [64, slab], or twice that."""
    plgpu = compat.mosaic_gpu()
    width = ref.shape[-1] // plan.slabs
    source = ref.at[place.row, place.tokens, place.head, pl.ds(place.slab * width, width)]
    return compat.load(source, layout=plgpu.Layout.WGMMA, optimized=False)


def _pieces(plan: Plan, acc, above):
    """Of a tile in registers; see `run`."""
    def split(x, start):
        firsts = range(start, x.shape[1], plan.slab)
        return [x[:, first : first + PIECE].astype(jnp.float32) for first in firsts]

    for start in range(0, plan.slab, PIECE):
        yield start, split(acc, start), [] if above is None else split(above, start)
