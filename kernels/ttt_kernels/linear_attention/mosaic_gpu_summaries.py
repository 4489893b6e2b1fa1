"""The first pass: what each segment adds to the state."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_common as common
from ttt_kernels.linear_attention import mosaic_gpu_registers as registers
from ttt_kernels.linear_attention.mosaic_gpu_decay import WIPE
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling, blocks

_DECAY_HEADS = 8
"""Heads whose log decays are copied together: the fewest columns of a tile in registers."""


def summaries(
    k: jax.Array,
    v: jax.Array,
    weights: common.Weights,
    tiling: Tiling,
    *,
    reverse: bool,
    interpret,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Sums `k_i^T v_i`, decayed to the segment's edge, over each segment but the last in time.

    The sums of log decays within blocks are made here, beside the products, and forwards kept for
    the other kernels.

    Args:
      k: [batch, time, heads, key_dim] bf16, widths padded, time a multiple of 8 (or below 8).
      v: [batch, time, heads, value_dim] bf16.
      weights: log decays, without sums, and padding.
      tiling: at least 2 segments.
      reverse: decays to the segment's start and leaves out the first segment, not the last.
      interpret: None, or the interpreter's parameters.

    Returns:
      (summaries [batch, heads, segments - 1, key_dim, value_dim]; each of these segments' whole
      decay, 64 times, [batch, heads, segments - 1, 64]; sums of log decays, see `common.Weights`):
      float32; None for the latter two without decays, for the last in reverse.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = k.shape
    if weights.log_decay is not None:
        extra = ((0, 0), (0, 0), (0, -heads % _DECAY_HEADS))
        weights = weights._replace(log_decay=jnp.pad(weights.log_decay, extra))
    plan = common.Plan.of(tiling, k, weights, reverse)
    groups, columns = tiling.heads_per_cta, tiling.columns
    stages = max(tiling.stages, 4 if key_dim <= 128 else 2)

    def linear_attention_summaries(*refs):
        _summaries_body(plan, stages, refs)

    slots = (stages, COMPUTE_WARPGROUPS, BLOCK, columns)
    copies = groups + COMPUTE_WARPGROUPS
    scratch = [
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, *slots),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]
    shape = (batch, heads, tiling.segments - 1)
    out_type = [jax.ShapeDtypeStruct((*shape, key_dim, v.shape[-1]), jnp.float32)]
    if plan.decay:
        scratch += [
            plgpu.SMEM((stages, BLOCK, _DECAY_HEADS), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.SMEM((2, groups, BLOCK), jnp.float32),
            common.tile(tiling, *slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ]
        out_type.append(jax.ShapeDtypeStruct((*shape, BLOCK), jnp.float32))
    keeps_sums = plan.decay and not reverse
    if keeps_sums:
        sums = (batch, heads, blocks(length) * BLOCK)
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    call = compat.gpu_kernel(
        linear_attention_summaries,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        # With sums to keep, the last segment's thread blocks make theirs and nothing else.
        **plan.grid(tiling.segments - (not keeps_sums), COMPUTE_WARPGROUPS + 1 + plan.decay),
    )
    results = call(k, v, *weights.arrays())
    return tuple(results) + (None,) * (3 - len(results))


class _Weighing(NamedTuple):
    """What the weighing warpgroup makes and keeps."""

    decays: object  # log decays as they lie in memory, one slot a stage, [64, 8]
    decays_full: object
    scratch: object  # log decays along time, of even and of odd steps, [2, heads, 64]
    weighted: object  # values with the decay to the segment's edge, one slot a stage
    ready: object  # barrier: the weighted values are there
    factors: object  # outputs of the kernel, see `summaries`
    sums: object  # None in reverse


class _Place(NamedTuple):
    """A thread block's place in the grid."""

    slab: object
    group: object
    segment: object
    batch: object


def _first_near(head):
    """The first of the heads whose log decays are copied together with this one's."""
    return lax.div(head, jnp.int32(_DECAY_HEADS)) * _DECAY_HEADS


def _summaries_body(plan: common.Plan, stages: int, refs) -> None:
    """The kernel: the loops of memory, weighing (with decays) and compute warpgroups."""
    plgpu = compat.mosaic_gpu()
    (k_ref, v_ref), (weights, rest) = refs[:2], plan.split(refs[2:])
    out_ref, *rest = rest
    factors_ref = rest.pop(0) if plan.decay else None
    sums_ref = rest.pop(0) if plan.decay and not plan.reverse else None
    ks, vs, full, free, *rest = rest
    weighing = _Weighing(*rest, factors_ref, sums_ref) if plan.decay else None
    place = _Place(*(lax.axis_index(name) for name in _Place._fields))
    slab, group, segment, b = place
    w = lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment + (1 if plan.reverse else 0))
    # The last segment of all has no summary, but may have sums of log decays to be made.
    summed = segment < plan.tiling.segments - 1
    # Against the order of the output kernel, whose first blocks are then still in the L2.
    order = common.forwards if plan.reverse else common.backwards

    @pl.when(w == COMPUTE_WARPGROUPS + plan.decay)
    def _():
        def copies(slot, token, barrier):
            @pl.when(summed)
            def _():
                common.copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
                common.copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)

            if plan.decay:
                near = _first_near(plan.head(group, 0))
                source = weights.log_decay.at[b, pl.ds(token, BLOCK), pl.ds(near, _DECAY_HEADS)]
                arrived = weighing.decays_full.at[slot]
                plgpu.copy_gmem_to_smem(source, weighing.decays.at[slot], arrived)

        common.load_blocks(plan, copies, full, free, first, count, order)

    if plan.decay:
        @pl.when(w == COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(common.HELPER_REGISTERS, action="decrease")
            ring = (ks, vs, full, free)
            _weigh(plan, weighing, weights, ring, place, first, count, order, summed)

    @pl.when((w < COMPUTE_WARPGROUPS) & summed)
    def _():
        plgpu.set_max_registers(common.STATE_REGISTERS if plan.decay else common.COMPUTE_REGISTERS,
                                action="increase")
        h, g = plan.head(group, w), common.own(plan, w)

        def compute(acc):
            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                if plan.decay:
                    plgpu.barrier_wait(weighing.ready.at[slot])
                value = (weighing.weighted if plan.decay else vs).at[slot, w]
                plgpu.wgmma(acc, ks.at[slot, g].transpose((1, 0)), value)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            return acc[...]

        columns = plan.tiling.columns
        state = pl.run_scoped(compute, plgpu.ACC((plan.tiling.key_dim, columns), jnp.float32))
        out_ref[b, h, segment, :, pl.ds(plan.column(slab, w), columns)] = state


def _weigh(plan, weighing: _Weighing, weights, ring, place: _Place, first, count, order, summed):
    """The weighing warpgroup: weights the values of a segment with their decay to its edge.

    What lies between a block and the edge is carried along. Unless `summed`, the segment needs no
    summary and only its sums of log decays are made. `ring` holds k, v and their barriers.
    """
    plgpu = compat.mosaic_gpu()
    slab, group, segment, b = place
    ks, vs, full, free = ring
    heads = range(plan.tiling.heads_per_cta)

    def block_of(i):
        return first + order(i, count)

    def slot_of(i):
        return lax.rem(i, jnp.int32(vs.shape[0]))

    def half_of(i):
        return weighing.scratch.at[lax.rem(i, jnp.int32(2))]

    def put(i):
        """Writes step `i`'s log decays along time; `commit_smem` is the caller's."""
        plgpu.barrier_wait(weighing.decays_full.at[slot_of(i)])
        near = compat.load(weighing.decays.at[slot_of(i)], layout=plgpu.Layout.WGMMA,
                           optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, near.shape, 1, layout=plgpu.Layout.WGMMA)
        for g in heads:
            head = plan.head(group, g)
            own = jnp.where(column == head - _first_near(head), near, 0.0)
            half_of(i).at[g][...] = jnp.maximum(jnp.sum(own, axis=1), WIPE)

    def put_next(i):
        @pl.when(i + 1 < count)
        def _():
            put(i + 1)

    def sums_of(i):
        return tuple(registers.running_sums(registers.load_vector(half_of(i).at[g], 0))
                     for g in heads)

    def keep(block, sums):
        if weighing.sums is not None:
            @pl.when(slab == 0)
            def _():
                for g in heads:
                    tokens = pl.ds(block * BLOCK, BLOCK)
                    weighing.sums[b, plan.head(group, g), tokens] = sums[g][0]

    # A step's sums are made at the end of the step before, so that one commit a step is enough.
    def only_sums(i, block, padded, sums):
        put_next(i)
        keep(block, sums)
        plgpu.commit_smem()
        for _ in range(COMPUTE_WARPGROUPS):  # which have no part in this segment
            plgpu.barrier_arrive(free.at[slot_of(i)])
        return sums_of(i + 1)

    def weigh_block(i, block, padded, carry):
        passed, sums = carry
        slot = slot_of(i)
        put_next(i)
        keep(block, sums)
        plgpu.barrier_wait(full.at[slot])
        if plan.documents:
            tiles = [ks.at[slot, g] for g in heads]
            tiles += [vs.at[slot, j] for j in range(COMPUTE_WARPGROUPS)]
            common.clean_tiles(weights, padded, b, block, tiles)
        for g in heads:
            before, behind = sums[g]
            factors = jnp.exp((before if plan.reverse else behind) + passed[g])
            for w in range(COMPUTE_WARPGROUPS) if len(heads) == 1 else (g,):
                registers.weigh_values(vs.at[slot, w], factors, weighing.weighted.at[slot, w])
        plgpu.commit_smem()
        plgpu.barrier_arrive(weighing.ready.at[slot])
        passed = tuple(x + before + behind
                       for x, (before, behind) in zip(passed, sums, strict=True))
        return passed, sums_of(i + 1)

    load = functools.partial(common.is_padded, weights, b)
    put(jnp.int32(0))
    plgpu.commit_smem()
    first_sums = sums_of(jnp.int32(0))

    @pl.when(summed)
    def _():
        nothing = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        start = ((nothing,) * len(heads), first_sums)
        passed, _ = common.walk(count, block_of, load, weigh_block, start)

        @pl.when(slab == 0)
        def _():
            for g, x in enumerate(passed):
                weighing.factors[b, plan.head(group, g), segment] = jnp.exp(x)

    if weighing.sums is not None:
        @pl.when(~summed)
        def _():
            common.walk(count, block_of, load, only_sums, first_sums)
