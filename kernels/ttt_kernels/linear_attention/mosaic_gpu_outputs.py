"""The second pass: outputs, block by block, from the state at every segment's edge.

Runs backwards in time with `reverse`, which makes the gradients of keys and values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_common as common
from ttt_kernels.linear_attention.mosaic_gpu_common import Decay
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling


def outputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    states: jax.Array,
    decay: Decay | None,
    tiling: Tiling,
    *,
    reverse: bool,
    interpret,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of token-causal linear attention from the state at each segment's edge.

    Args:
      q, k: [batch, time, heads, key_dim] bf16, widths padded, time a multiple of 8 (or below 8).
      v: [batch, time, heads, value_dim] bf16.
      states: [batch, heads, segments, key_dim, value_dim] float32, the state ahead of each
        segment (in reverse: behind it).
      decay: decays, or None for 1.
      tiling: see `tiling.choose`.
      reverse: a token sees itself and later ones.
      interpret: None, or the interpreter's parameters.

    Returns:
      (out, final): [batch, time, heads, value_dim] bf16, and the state that is left at the end of
      the pass, [batch, heads, key_dim, value_dim] float32.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = q.shape
    plan = common.Plan(tiling, batch, length, heads, decay is not None, reverse)
    groups, columns, stages = tiling.heads_per_cta, tiling.columns, tiling.stages

    def linear_attention_outputs(*refs):
        _body(plan, refs)

    copies = 2 * groups + COMPUTE_WARPGROUPS
    scratch = [
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, stages, COMPUTE_WARPGROUPS, BLOCK, columns),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        common.tile(tiling, COMPUTE_WARPGROUPS, key_dim, columns),
        common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns),
    ]
    if plan.decay:
        scratch.append(common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns))
    if tiling.portable:
        scratch.append(common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, BLOCK))
    final = (batch, heads, key_dim, v.shape[-1])
    call = compat.gpu_kernel(
        linear_attention_outputs,
        out_type=[jax.ShapeDtypeStruct(v.shape, v.dtype),
                  jax.ShapeDtypeStruct(final, jnp.float32)],
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments),
    )
    return tuple(call(q, k, v, states, *(() if decay is None else (decay.sums,) * 2)))


def _body(plan: common.Plan, refs) -> None:
    """The kernel: the memory warpgroup's loop, and the compute warpgroups'."""
    plgpu = compat.mosaic_gpu()
    columns, stages = plan.tiling.columns, plan.tiling.stages
    order = common.backwards if plan.reverse else common.forwards
    last = 0 if plan.reverse else plan.tiling.segments - 1
    q_ref, k_ref, v_ref, state_ref = refs[:4]
    # Layout inference gives one layout to one reference: the sums come twice.
    rows_ref, columns_ref = refs[4:6] if plan.decay else (None, None)
    out_ref, final_ref, qs, ks, vs, full, free, *tiles = refs[4 + 2 * plan.decay:]
    slab, group = lax.axis_index("slab"), lax.axis_index("group")
    segment, b = lax.axis_index("segment"), lax.axis_index("batch")
    w = lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment)

    @pl.when(w == COMPUTE_WARPGROUPS)
    def _():
        def copies(slot, token, barrier):
            common.copy_keys(plan, q_ref, qs, slot, b, group, token, barrier)
            common.copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
            common.copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)

        common.load_blocks(plan, copies, full, free, first, count, order)

    @pl.when(w < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(common.COMPUTE_REGISTERS, action="increase")
        h, g = plan.head(group, w), common.own(plan, w)
        own_columns = pl.ds(plan.column(slab, w), columns)
        smem = [tile.at[w] for tile in tiles]
        state_smem, out_smem = smem[:2]
        state = compat.load(state_ref.at[b, h, segment, :, own_columns],
                            layout=plgpu.Layout.WGMMA, optimized=False)
        state_smem[...] = state.astype(jnp.bfloat16)
        plgpu.commit_smem()

        def step(i, state):
            slot = lax.rem(i, jnp.int32(stages))
            token = (first + order(i, count)) * BLOCK
            here = None
            if plan.decay:
                here = _BlockSums(
                    common.load_vector(rows_ref.at[b, h, pl.ds(token, BLOCK)], 1),
                    common.load_vector(columns_ref.at[b, h, pl.ds(token, BLOCK)], 0),
                    rows_ref[b, h, token + BLOCK - 1],
                )
            plgpu.barrier_wait(full.at[slot])
            tile, state = _block(
                plan, qs.at[slot, g], ks.at[slot, g], vs.at[slot, w], state, here, smem
            )
            plgpu.barrier_arrive(free.at[slot])
            state_smem[...] = state.astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = tile.astype(jnp.bfloat16)
            plgpu.commit_smem()
            target = out_ref.at[b, pl.ds(token, BLOCK), h, own_columns]
            plgpu.copy_smem_to_gmem(out_smem, target)
            return state

        state = lax.fori_loop(0, count, step, state)

        @pl.when(segment == last)
        def _():
            final_ref[b, h, :, own_columns] = state

        plgpu.wait_smem_to_gmem(0)


class _BlockSums(NamedTuple):
    """One block's sums of log decays in registers."""

    rows: jax.Array  # [64], one a row of an accumulator tile
    columns: jax.Array  # [64], one a column
    total: jax.Array  # []


def _block(plan: common.Plan, q, k, v, state, sums: _BlockSums | None, smem):
    """One warpgroup's outputs and next state for one block of 64 tokens.

    `o = q S + mask(q k^T) v` and `S' = S + k^T v`, each term with its decay. Products are in
    flight while the scores are masked; groups finish in the order of issue.
    """
    plgpu = compat.mosaic_gpu()
    tiling = plan.tiling
    state_smem = smem[0]

    def masked_scores(scores_acc, wait_n):
        scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=wait_n)
        scores = _mask(scores, sums, plan.reverse).astype(jnp.bfloat16)
        if not tiling.portable:
            return scores
        smem[-1][...] = scores
        plgpu.commit_smem()
        return smem[-1]

    def plain(scores_acc, out_acc, state_acc):
        plgpu.wgmma(scores_acc, q, k.transpose((1, 0)))
        plgpu.wgmma(out_acc, q, state_smem)
        plgpu.wgmma(state_acc, k.transpose((1, 0)), v)
        plgpu.wgmma(out_acc, masked_scores(scores_acc, 2), v)
        return out_acc[...], state + state_acc[...]

    def decayed(scores_acc, out_acc, state_acc):
        plgpu.wgmma(scores_acc, q, k.transpose((1, 0)))
        plgpu.wgmma(out_acc, q, state_smem)
        behind = sums.total - sums.rows
        read, weight = (behind, sums.rows) if plan.reverse else (sums.rows, behind)
        common.weigh_values(v, jnp.exp(weight), smem[2])
        add = _start_from(state_acc, state * jnp.exp(sums.total), tiling.portable)
        plgpu.wgmma(state_acc, k.transpose((1, 0)), smem[2])
        scores = masked_scores(scores_acc, 2)
        start = plgpu.wgmma_accumulator_load(out_acc, wait_n=1)
        start = start * common.rows(jnp.exp(read), tiling.columns)
        if tiling.portable:
            inside = functools.partial(_scores_times_values, scores, v)
            shape = (BLOCK, tiling.columns)
            out = start + pl.run_scoped(inside, plgpu.ACC(shape, jnp.float32))
        else:
            out_acc[...] = start
            plgpu.wgmma(out_acc, scores, v)
            out = out_acc[...]
        return out, add + state_acc[...]

    return pl.run_scoped(
        plain if sums is None else decayed,
        plgpu.ACC((BLOCK, BLOCK), jnp.float32),
        plgpu.ACC((BLOCK, tiling.columns), jnp.float32),
        plgpu.ACC((plan.tiling.key_dim, tiling.columns), jnp.float32),
    )


def _start_from(acc, value, portable: bool):
    """Makes an accumulator start from `value`; returns what is to be added to its result.

    Added afterwards, the value and the accumulator both hold registers: with decays these spill,
    which doubles the kernel's time.
    """
    if portable:
        return value
    acc[...] = value
    return 0.0


def _scores_times_values(scores, v, acc):
    compat.mosaic_gpu().wgmma(acc, scores, v)
    return acc[...]


def _mask(scores, sums: _BlockSums | None, reverse: bool):
    """Zeroes what a token may not see and applies the decay in between."""
    plgpu = compat.mosaic_gpu()
    shape = (BLOCK, BLOCK)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    seen = row <= column if reverse else row >= column
    if sums is None:
        return jnp.where(seen, scores, 0.0)
    rows = common.rows(sums.rows, BLOCK)
    columns = lax.broadcast_in_dim(sums.columns, shape, (1,))
    fall = columns - rows if reverse else rows - columns
    # Masked before the exponential: on the other side the difference is positive without bound.
    return scores * jnp.exp(jnp.where(seen, fall, -1e30))
