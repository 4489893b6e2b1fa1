"""The first pass: what each segment adds to the state, and the state at every segment's edge."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_common as common
from ttt_kernels.linear_attention.mosaic_gpu_common import Decay
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling

_PREFIX_ROWS = 8
_PREFIX_GROUP = 8


def summaries(
    k: jax.Array,
    v: jax.Array,
    decay: Decay | None,
    tiling: Tiling,
    *,
    reverse: bool,
    interpret,
) -> jax.Array:
    """Sums `k_i^T v_i`, decayed to the segment's edge, over each segment but the last in time.

    Args:
      k: [batch, time, heads, key_dim] bf16, widths padded, time a multiple of 8 (or below 8).
      v: [batch, time, heads, value_dim] bf16.
      decay: decays, or None for 1.
      tiling: at least 2 segments.
      reverse: decays to the segment's start and leaves out the first segment, not the last.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, heads, segments - 1, key_dim, value_dim] float32.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = k.shape
    plan = common.Plan(tiling, batch, length, heads, decay is not None, reverse)
    groups, columns = tiling.heads_per_cta, tiling.columns
    stages = max(tiling.stages, 4 if key_dim <= 128 else 2)

    def linear_attention_summaries(*refs):
        _summaries_body(plan, stages, refs)

    copies = groups + COMPUTE_WARPGROUPS
    scratch = [
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, stages, COMPUTE_WARPGROUPS, BLOCK, columns),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]
    if plan.decay:
        scratch.append(common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns))
    shape = (batch, heads, tiling.segments - 1, key_dim, v.shape[-1])
    call = compat.gpu_kernel(
        linear_attention_summaries,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments - 1),
    )
    return call(k, v, *(() if decay is None else (decay.sums, decay.to_edge)))


def _summaries_body(plan: common.Plan, stages: int, refs) -> None:
    """The kernel: the memory warpgroup's loop, and the compute warpgroups'."""
    plgpu = compat.mosaic_gpu()
    reverse, columns, key_dim = plan.reverse, plan.tiling.columns, plan.tiling.key_dim
    k_ref, v_ref = refs[:2]
    sums_ref, edge_ref = refs[2:4] if plan.decay else (None, None)
    out_ref, ks, vs, full, free, *scaled = refs[2 + 2 * plan.decay:]
    slab, group = lax.axis_index("slab"), lax.axis_index("group")
    segment, b = lax.axis_index("segment"), lax.axis_index("batch")
    w = lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment + (1 if reverse else 0))
    # Against the order of the output kernel, whose first blocks are then still in the L2.
    order = common.forwards if reverse else common.backwards

    @pl.when(w == COMPUTE_WARPGROUPS)
    def _():
        def copies(slot, token, barrier):
            common.copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
            common.copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)

        common.load_blocks(plan, copies, full, free, first, count, order)

    @pl.when(w < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(common.COMPUTE_REGISTERS, action="increase")
        h, g = plan.head(group, w), common.own(plan, w)

        def compute(acc):
            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, jnp.int32(stages))
                value = vs.at[slot, w]
                if plan.decay:
                    block = first + order(i, count)
                    tokens = pl.ds(block * BLOCK, BLOCK)
                    sums = common.load_vector(sums_ref.at[b, h, tokens], 1)
                    fall = sums if reverse else sums_ref[b, h, block * BLOCK + 63] - sums
                    weights = jnp.exp(fall + edge_ref[b, h, block])
                plgpu.barrier_wait(full.at[slot])
                if plan.decay:
                    common.weigh_values(value, weights, scaled[0].at[w])
                    value = scaled[0].at[w]
                plgpu.wgmma(acc, ks.at[slot, g].transpose((1, 0)), value)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            return acc[...]

        state = pl.run_scoped(compute, plgpu.ACC((key_dim, columns), jnp.float32))
        out_ref[b, h, segment, :, pl.ds(plan.column(slab, w), columns)] = state


def prefix(
    summaries: jax.Array,
    edge: jax.Array,
    factors: jax.Array | None,
    *,
    reverse: bool,
    interpret,
) -> jax.Array:
    """The state ahead of each segment (in reverse: behind it) from the segments' summaries.

    Args:
      summaries: [batch, heads, segments - 1, key_dim, value_dim] float32.
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (behind) the row.
      factors: [batch, heads, segments] float32, each segment's decay, or None for 1.
      reverse: runs from the last segment to the first.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, heads, segments, key_dim, value_dim] float32.
    """
    batch, heads, steps, key_dim, value_dim = summaries.shape

    def linear_attention_prefix(*refs):
        parts_ref, edge_ref, *factor_ref, out_ref = refs
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * _PREFIX_ROWS, _PREFIX_ROWS)

        def pass_segments(first, count, state):
            """Carries the state over `count` segments; all loads first, so that they overlap."""
            steps_done = [first + i for i in range(count)]
            passed = [steps - i if reverse else i for i in steps_done]
            parts = [parts_ref[b, h, s - 1 if reverse else s, rows] for s in passed]
            for s, part in zip(passed, parts, strict=True):
                out_ref[b, h, s, rows] = state
                if factor_ref:
                    state = state * factor_ref[0][b, h, s]
                state = state + part
            return state

        groups, rest = divmod(steps, _PREFIX_GROUP)
        state = lax.fori_loop(
            0, groups, lambda i, x: pass_segments(i * _PREFIX_GROUP, _PREFIX_GROUP, x),
            edge_ref[b, h, rows],
        )
        state = pass_segments(groups * _PREFIX_GROUP, rest, state)
        out_ref[b, h, 0 if reverse else steps, rows] = state

    call = compat.gpu_kernel(
        linear_attention_prefix,
        out_type=jax.ShapeDtypeStruct((batch, heads, steps + 1, key_dim, value_dim), jnp.float32),
        grid=(key_dim // _PREFIX_ROWS, heads, batch),
        grid_names=("slab", "head", "batch"),
        interpret=interpret,
    )
    return call(summaries, edge, *(() if factors is None else (factors,)))
