"""The two Mosaic GPU kernels of token-causal linear attention (Hopper, wgmma and TMA).

`summaries` sums what each segment of the sequence adds to the state. `outputs` starts from every
segment's state and makes the outputs, block by block, with the state in registers. Both run
backwards in time with `reverse`, which turns the same two kernels into the gradient's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling, blocks

_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = 232


class Decay(NamedTuple):
    """Sums of log decays as the kernels read them, all float32."""

    sums: jax.Array  # [batch, heads, blocks * 64], from the start of the token's block to it
    to_edge: jax.Array  # [batch, heads, blocks], from the block's far side to its segment's edge
    segment: jax.Array  # [batch, heads, segments], factor of a whole segment


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What both kernel bodies need to know, all static."""

    tiling: Tiling
    batch: int
    length: int
    heads: int
    decay: bool
    reverse: bool

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

    def grid(self, segments: int) -> dict:
        """Grid, threads and names of a launch."""
        groups = self.heads // self.tiling.heads_per_cta
        return dict(
            grid=(self.tiling.slabs, groups, segments, self.batch),
            grid_names=("slab", "group", "segment", "batch"),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
        )


def _tile(tiling: Tiling, *shape: int):
    """A bf16 tile in shared memory. Both operands of a wgmma must have the same swizzle."""
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, tiling.columns)),
                  plgpu.SwizzleTransform(tiling.swizzle))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _load_blocks(plan: _Plan, copies, full, free, first, count, order):
    """The memory warpgroup's loop: `copies(slot, token, barrier)` for each block of the ring."""
    plgpu = compat.mosaic_gpu()
    stages = full.shape[0]
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(stages))

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        copies(slot, (first + order(i, count)) * BLOCK, full.at[slot])

    # A producer must outlive its consumers' last arrivals.
    @pl.loop(lax.max(count - stages, jnp.int32(0)), count)
    def _(i):
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])


def _forwards(i, count):
    del count
    return i


def _backwards(i, count):
    return count - 1 - i


def _rows(x, columns: int):
    """Broadcasts one value a row over `columns` columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def _load_vector(ref, axis: int):
    """Reads 64 float32 values, one a row (axis 1) or column (axis 0) of an accumulator tile."""
    plgpu = compat.mosaic_gpu()
    return compat.load(ref, layout=plgpu.Layout.WGMMA.reduce(axis), optimized=False)


def _weigh_values(values, weights, scaled):
    """Writes `weights[:, None] * values` to shared memory for the tensor core."""
    plgpu = compat.mosaic_gpu()
    x = compat.load(values, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    scaled[...] = (x * _rows(weights, x.shape[1])).astype(jnp.bfloat16)
    plgpu.commit_smem()


def _copy_values(plan: _Plan, ref, slots, slot, batch, group, slab, token, barrier):
    plgpu = compat.mosaic_gpu()
    for w in range(COMPUTE_WARPGROUPS):
        columns = pl.ds(plan.column(slab, w), plan.tiling.columns)
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, w), columns]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, w], barrier)


def _copy_keys(plan: _Plan, ref, slots, slot, batch, group, token, barrier):
    plgpu = compat.mosaic_gpu()
    for g in range(plan.tiling.heads_per_cta):
        source = ref.at[batch, pl.ds(token, BLOCK), plan.head(group, g)]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, g], barrier)


def _copy_sums(plan: _Plan, ref, slots, slot, batch, group, token, barrier):
    plgpu = compat.mosaic_gpu()
    for g in range(plan.tiling.heads_per_cta):
        source = ref.at[batch, plan.head(group, g), pl.ds(token, BLOCK)]
        plgpu.copy_gmem_to_smem(source, slots.at[slot, g], barrier)


def _own(plan: _Plan, warpgroup):
    """Index of a warpgroup's head among those the CTA has loaded."""
    return warpgroup if plan.tiling.heads_per_cta == 2 else 0


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
    plan = _Plan(tiling, batch, length, heads, decay is not None, reverse)
    groups, columns = tiling.heads_per_cta, tiling.columns
    stages = max(tiling.stages, 4 if key_dim <= 128 else 2)

    def linear_attention_summaries(*refs):
        k_ref, v_ref = refs[:2]
        sums_ref, edge_ref = refs[2:4] if plan.decay else (None, None)
        out_ref, ks, vs, full, free, *tiles = refs[2 + 2 * plan.decay:]
        sums_smem, scaled = tiles or (None, None)
        slab, group = lax.axis_index("slab"), lax.axis_index("group")
        segment, b = lax.axis_index("segment"), lax.axis_index("batch")
        w = lax.axis_index("warpgroup")
        first, count = plan.segment_blocks(segment + (1 if reverse else 0))
        # Against the order of the output kernel, whose first blocks are then still in the L2.
        order = _forwards if reverse else _backwards

        @pl.when(w == COMPUTE_WARPGROUPS)
        def _():
            def copies(slot, token, barrier):
                _copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
                _copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)
                if plan.decay:
                    _copy_sums(plan, sums_ref, sums_smem, slot, b, group, token, barrier)

            _load_blocks(plan, copies, full, free, first, count, order)

        @pl.when(w < COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            h, g = plan.head(group, w), _own(plan, w)

            def compute(acc):
                @pl.loop(0, count)
                def _(i):
                    slot = lax.rem(i, jnp.int32(stages))
                    value = vs.at[slot, w]
                    if plan.decay:
                        to_edge = edge_ref[b, h, first + order(i, count)]
                    plgpu.barrier_wait(full.at[slot])
                    if plan.decay:
                        sums = _load_vector(sums_smem.at[slot, g], 1)
                        fall = sums if reverse else sums_smem[slot, g, BLOCK - 1] - sums
                        _weigh_values(value, jnp.exp(fall + to_edge), scaled.at[w])
                        value = scaled.at[w]
                    plgpu.wgmma(acc, ks.at[slot, g].transpose((1, 0)), value)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return acc[...]

            state = pl.run_scoped(compute, plgpu.ACC((key_dim, columns), jnp.float32))
            out_ref[b, h, segment, :, pl.ds(plan.column(slab, w), columns)] = state

    copies = (2 if plan.decay else 1) * groups + COMPUTE_WARPGROUPS
    scratch = [
        _tile(tiling, stages, groups, BLOCK, key_dim),
        _tile(tiling, stages, COMPUTE_WARPGROUPS, BLOCK, columns),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
    ]
    if plan.decay:
        scratch.append(plgpu.SMEM((stages, groups, BLOCK), jnp.float32))
        scratch.append(_tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns))
    shape = (batch, heads, tiling.segments - 1, key_dim, v.shape[-1])
    call = compat.gpu_kernel(
        linear_attention_summaries,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments - 1),
    )
    return call(k, v, *(() if decay is None else (decay.sums, decay.to_edge)))


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
    plan = _Plan(tiling, batch, length, heads, decay is not None, reverse)
    groups, columns, stages = tiling.heads_per_cta, tiling.columns, tiling.stages
    order = _backwards if reverse else _forwards
    last = 0 if reverse else tiling.segments - 1

    def linear_attention_outputs(*refs):
        q_ref, k_ref, v_ref, state_ref = refs[:4]
        sums_ref = refs[4] if plan.decay else None
        out_ref, final_ref, qs, ks, vs, full, free, *tiles = refs[4 + plan.decay:]
        if plan.decay:
            rows_smem, columns_smem, *tiles = tiles
        slab, group = lax.axis_index("slab"), lax.axis_index("group")
        segment, b = lax.axis_index("segment"), lax.axis_index("batch")
        w = lax.axis_index("warpgroup")
        first, count = plan.segment_blocks(segment)

        @pl.when(w == COMPUTE_WARPGROUPS)
        def _():
            def copies(slot, token, barrier):
                _copy_keys(plan, q_ref, qs, slot, b, group, token, barrier)
                _copy_keys(plan, k_ref, ks, slot, b, group, token, barrier)
                _copy_values(plan, v_ref, vs, slot, b, group, slab, token, barrier)
                if plan.decay:
                    for target in (rows_smem, columns_smem):
                        _copy_sums(plan, sums_ref, target, slot, b, group, token, barrier)

            _load_blocks(plan, copies, full, free, first, count, order)

        @pl.when(w < COMPUTE_WARPGROUPS)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            h, g = plan.head(group, w), _own(plan, w)
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
                plgpu.barrier_wait(full.at[slot])
                here = None
                if plan.decay:
                    here = _BlockSums(
                        _load_vector(rows_smem.at[slot, g], 1),
                        _load_vector(columns_smem.at[slot, g], 0),
                        rows_smem[slot, g, BLOCK - 1],
                    )
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

    copies = (4 if plan.decay else 2) * groups + COMPUTE_WARPGROUPS
    scratch = [
        _tile(tiling, stages, groups, BLOCK, key_dim),
        _tile(tiling, stages, groups, BLOCK, key_dim),
        _tile(tiling, stages, COMPUTE_WARPGROUPS, BLOCK, columns),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        _tile(tiling, COMPUTE_WARPGROUPS, key_dim, columns),
        _tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns),
    ]
    if plan.decay:
        # Layout inference gives one layout to one reference: the sums come twice.
        sums = plgpu.SMEM((stages, groups, BLOCK), jnp.float32)
        scratch[5:5] = [sums, sums]
        scratch.append(_tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns))
    if tiling.portable:
        scratch.append(_tile(tiling, COMPUTE_WARPGROUPS, BLOCK, BLOCK))
    final = (batch, heads, key_dim, v.shape[-1])
    call = compat.gpu_kernel(
        linear_attention_outputs,
        out_type=[jax.ShapeDtypeStruct(v.shape, v.dtype),
                  jax.ShapeDtypeStruct(final, jnp.float32)],
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments),
    )
    return tuple(call(q, k, v, states, *(() if decay is None else (decay.sums,))))


class _BlockSums(NamedTuple):
    """One block's sums of log decays in registers."""

    rows: jax.Array  # [64], one a row of an accumulator tile
    columns: jax.Array  # [64], one a column
    total: jax.Array  # []


def _block(plan: _Plan, q, k, v, state, sums: _BlockSums | None, smem):
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
        _weigh_values(v, jnp.exp(weight), smem[2])
        add = _start_from(state_acc, state * jnp.exp(sums.total), tiling.portable)
        plgpu.wgmma(state_acc, k.transpose((1, 0)), smem[2])
        scores = masked_scores(scores_acc, 2)
        start = plgpu.wgmma_accumulator_load(out_acc, wait_n=1)
        start = start * _rows(jnp.exp(read), tiling.columns)
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
    rows, columns = _rows(sums.rows, BLOCK), lax.broadcast_in_dim(sums.columns, shape, (1,))
    fall = columns - rows if reverse else rows - columns
    # Masked before the exponential: on the other side the difference is positive without bound.
    return scores * jnp.exp(jnp.where(seen, fall, -1e30))


_PREFIX_ROWS = 8
_PREFIX_GROUP = 8


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
