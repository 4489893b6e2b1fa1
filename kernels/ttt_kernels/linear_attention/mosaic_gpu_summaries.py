"""The first pass: what each segment adds to the state, and the state at every segment's edge."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_common as common
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling

_PREFIX_ROWS = 8
_PREFIX_GROUP = 8


def summaries(
    k: jax.Array,
    v: jax.Array,
    weights: common.Weights,
    tiling: Tiling,
    *,
    reverse: bool,
    interpret,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums `k_i^T v_i`, decayed to the segment's edge, over each segment but the last in time.

    Args:
      k: [batch, time, heads, key_dim] bf16, widths padded, time a multiple of 8 (or below 8).
      v: [batch, time, heads, value_dim] bf16.
      weights: decays and padding.
      tiling: at least 2 segments.
      reverse: decays to the segment's start and leaves out the first segment, not the last.
      interpret: None, or the interpreter's parameters.

    Returns:
      (summaries [batch, heads, segments - 1, key_dim, value_dim], each of these segments' whole
      decay [batch, heads, segments - 1] or None), float32.
    """
    plgpu = compat.mosaic_gpu()
    batch, _, heads, key_dim = k.shape
    plan = common.Plan.of(tiling, k, weights, reverse)
    groups, columns = tiling.heads_per_cta, tiling.columns
    stages = max(tiling.stages, 4 if key_dim <= 128 else 2)

    def linear_attention_summaries(*refs):
        _summaries_body(plan, stages, refs)

    slots = (stages, COMPUTE_WARPGROUPS, BLOCK, columns)
    copies = groups + COMPUTE_WARPGROUPS + groups * plan.decay
    scratch = [
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, *slots),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]
    shape = (batch, heads, tiling.segments - 1)
    out_type = [jax.ShapeDtypeStruct((*shape, key_dim, v.shape[-1]), jnp.float32)]
    if plan.decay:
        scratch.append(plgpu.SMEM((stages, groups, BLOCK), jnp.float32))
        scratch.append(common.tile(tiling, *slots))
        scratch.append(plgpu.Barrier(num_arrivals=1, num_barriers=stages))
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    call = compat.gpu_kernel(
        linear_attention_summaries,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments - 1, COMPUTE_WARPGROUPS + 1 + plan.decay),
    )
    parts, *factors = call(k, v, *weights.arrays())
    return parts, factors[0] if factors else None


class _Weighing(NamedTuple):
    """Shared memory of the values' weights: one slot a stage."""

    sums: object
    weighted: object  # values with the decay to the segment's edge
    ready: object  # barrier: the weighted values are there


def _summaries_body(plan: common.Plan, stages: int, refs) -> None:
    """The kernel: the loops of memory, weighing (with decays) and compute warpgroups."""
    plgpu = compat.mosaic_gpu()
    (k_ref, v_ref), (weights, (out_ref, *rest)) = refs[:2], plan.split(refs[2:])
    factor_ref = rest.pop(0) if plan.decay else None
    ks, vs, full, free = rest[:4]
    weighing = _Weighing(*rest[4:]) if plan.decay else None
    slab, group = lax.axis_index("slab"), lax.axis_index("group")
    segment, b = lax.axis_index("segment"), lax.axis_index("batch")
    w = lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment + (1 if plan.reverse else 0))
    # Against the order of the output kernel, whose first blocks are then still in the L2.
    order = common.forwards if plan.reverse else common.backwards

    @pl.when(w == COMPUTE_WARPGROUPS + plan.decay)
    def _():
        def copies(slot, token, barrier):
            common.copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
            common.copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)
            if plan.decay:
                sums = weighing.sums
                common.copy_sums(plan, weights.sums, sums, slot, b, group, token, barrier)

        common.load_blocks(plan, copies, full, free, first, count, order)

    if plan.decay:
        @pl.when(w == COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(common.HELPER_REGISTERS, action="decrease")

            def weigh(i, block, padded, passed):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                if plan.documents:
                    tiles = [ks.at[slot, g] for g in range(plan.tiling.heads_per_cta)]
                    tiles += [vs.at[slot, j] for j in range(COMPUTE_WARPGROUPS)]
                    common.clean_tiles(weights, padded, b, block, tiles)
                passed = _weigh_block(plan, weighing, vs, slot, passed)
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighing.ready.at[slot])
                return passed

            start = (jnp.float32(0),) * plan.tiling.heads_per_cta
            passed = common.walk(plan, weights, b, lambda i: first + order(i, count), count,
                                 weigh, start)

            @pl.when(slab == 0)
            def _():
                for g, x in enumerate(passed):
                    factor_ref[b, plan.head(group, g), segment] = jnp.exp(x)

    @pl.when(w < COMPUTE_WARPGROUPS)
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


def _weigh_block(plan: common.Plan, weighing: _Weighing, vs, slot, passed) -> tuple:
    """Weighs one block's values with their decay to the segment's edge.

    `passed` holds the log decay of the blocks done, between this one and the edge, a head each;
    returned with this block's added.
    """
    single = plan.tiling.heads_per_cta == 1
    after = []
    for g, x in enumerate(passed):
        sums = common.load_vector(weighing.sums.at[slot, g], 1)
        total = weighing.sums[slot, g, BLOCK - 1]
        factors = jnp.exp((sums if plan.reverse else total - sums) + x)
        for w in range(COMPUTE_WARPGROUPS) if single else (g,):
            common.weigh_values(vs.at[slot, w], factors, weighing.weighted.at[slot, w])
        after.append(x + total)
    return tuple(after)


def prefix(
    summaries: jax.Array,
    edge: jax.Array | None,
    factors: jax.Array | None,
    *,
    reverse: bool,
    interpret,
) -> jax.Array:
    """The state ahead of each segment (in reverse: behind it) from the segments' summaries.

    Args:
      summaries: [batch, heads, segments - 1, key_dim, value_dim] float32.
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (behind) the row, or
        None for zero.
      factors: [batch, heads, segments - 1] float32, these segments' decays, or None for 1.
      reverse: runs from the last segment to the first.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, heads, segments, key_dim, value_dim] float32.
    """
    batch, heads, steps, key_dim, value_dim = summaries.shape

    def linear_attention_prefix(*refs):
        parts_ref, *rest, out_ref = refs
        edge_ref = rest.pop(0) if edge is not None else None
        factor_ref = rest
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * _PREFIX_ROWS, _PREFIX_ROWS)

        def pass_segments(first, count, state):
            """Carries the state over `count` segments; all loads first, so that they overlap.

            A state of None is zero.
            """
            steps_done = [first + i for i in range(count)]
            passed = [steps - i if reverse else i for i in steps_done]
            taken = [s - 1 if reverse else s for s in passed]
            parts = [parts_ref[b, h, s, rows] for s in taken]
            factors = [ref[b, h, s] for ref in factor_ref for s in taken]
            for i, (s, part) in enumerate(zip(passed, parts, strict=True)):
                out_ref[b, h, s, rows] = jnp.zeros_like(part) if state is None else state
                if state is not None and factors:
                    state = state * factors[i]
                state = part if state is None else state + part
            return state

        begin = 1 if edge is None else 0
        state = pass_segments(0, 1, None) if edge is None else edge_ref[b, h, rows]
        groups, left = divmod(steps - begin, _PREFIX_GROUP)
        state = lax.fori_loop(
            0, groups,
            lambda i, x: pass_segments(begin + i * _PREFIX_GROUP, _PREFIX_GROUP, x), state,
        )
        state = pass_segments(begin + groups * _PREFIX_GROUP, left, state)
        out_ref[b, h, 0 if reverse else steps, rows] = state

    call = compat.gpu_kernel(
        linear_attention_prefix,
        out_type=jax.ShapeDtypeStruct((batch, heads, steps + 1, key_dim, value_dim), jnp.float32),
        grid=(key_dim // _PREFIX_ROWS, heads, batch),
        grid_names=("slab", "head", "batch"),
        interpret=interpret,
    )
    return call(summaries, *(x for x in (edge, factors) if x is not None))
