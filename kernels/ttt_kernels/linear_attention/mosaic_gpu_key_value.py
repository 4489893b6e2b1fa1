"""Gradients of keys and values in one pass backwards in time, for heads of 64 and of 128.

Both need the gradient R of the state behind each block, and the same four tiles. With the decay
in between in each term, for a block:

    dv = mask(k q^T) do + k R        dk = mask(v do^T) q + v R^T        R' = R + q^T do

Warpgroups as in `mosaic_gpu_outputs`: two hold R, each its own value columns, and make dv of
those and dk of the key columns of the same number; so each reads all of R, through shared memory.
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
from ttt_kernels.linear_attention import mosaic_gpu_registers as registers
from ttt_kernels.linear_attention.tiling import BLOCK, COMPUTE_WARPGROUPS, Tiling, blocks

_HALF = 64  # columns of every tile
_STAGES = 2
_SCORES, _MEMORY = COMPUTE_WARPGROUPS, COMPUTE_WARPGROUPS + 1
_STATE_REGISTERS, _SCORES_REGISTERS = 176, 120  # with 40 for memory: 2 * 176 + 120 + 40 = 512


def supported(tiling: Tiling) -> bool:
    """Whether the widths are those that this pass is made for."""
    return tiling.key_dim == tiling.value_dim and tiling.key_dim in (64, 128)


def key_value_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    d_states: jax.Array,
    weights: common.Weights,
    tiling: Tiling,
    *,
    interpret,
) -> tuple[jax.Array, ...]:
    """dk, dv and the gradient of the initial state from the state's gradient at segment edges.

    Args:
      q, k, v, d_out: [batch, time, heads, dim] bf16, dim 64 (heads even) or 128.
      d_states: [batch, heads, segments, dim, dim] float32, R behind each segment.
      weights: decays and padding.
      tiling: see `tiling.choose`; its number of stages is not used.
      interpret: None, or the interpreter's parameters.

    Returns:
      (dk, dv, d_initial[, dots]): dk, dv [batch, time, heads, dim] bf16, d_initial [batch, heads,
      dim, dim] float32; with decays also `v . dv` of each token, [parts, batch, heads, blocks *
      64] float32, to be summed over parts.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, dim = q.shape
    plan = common.Plan.of(tiling, q, weights, True)
    single = tiling.heads_per_cta == 1

    def linear_attention_key_value(*refs):
        _body(plan, refs)

    pair = (COMPUTE_WARPGROUPS, BLOCK, _HALF)
    slots = common.tile(tiling, _STAGES, *pair)
    vectors = plgpu.SMEM((_STAGES, tiling.heads_per_cta, BLOCK), jnp.float32)
    scratch = [
        *(slots,) * 4,
        plgpu.Barrier(num_arrivals=8 + 2 * tiling.heads_per_cta * plan.decay,
                      num_barriers=_STAGES),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=_STAGES),
        common.tile(tiling, 2, tiling.heads_per_cta, BLOCK, BLOCK),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        common.tile(tiling, COMPUTE_WARPGROUPS, dim // _HALF, BLOCK, _HALF),
        common.tile(tiling, *pair),
        *((plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),) * 2 if single else ()),
        *((vectors, vectors, common.tile(tiling, *pair)) if plan.decay else ()),
    ]
    out_type = [jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype),
                jax.ShapeDtypeStruct((batch, heads, dim, dim), jnp.float32)]
    if plan.decay:
        dots = (plan.parts, batch, heads, blocks(length) * BLOCK)
        out_type.append(jax.ShapeDtypeStruct(dots, jnp.float32))
    call = compat.gpu_kernel(
        linear_attention_key_value,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments, _MEMORY + 1),
    )
    return tuple(call(q, k, v, d_out, d_states, *weights.arrays()))


class _Shared(NamedTuple):
    """Shared memory and its barriers. Tiles of the ring: [stages, 2, 64, 64], the second axis
    numbering halves of a head's columns, or heads where they are 64 wide."""

    q: object
    k: object
    v: object
    do: object
    full: object
    free: object
    scores: object  # [2 (for dv, for dk), heads, 64, 64]
    ready: object  # barrier: scores and weighted values are there
    taken: object  # barrier: they have been used
    state: object  # [value half or head, key half, 64, 64]
    out: object  # [compute warpgroups, 64, 64]
    state_there: object  # barriers of the state that both compute warpgroups read; None for pairs
    state_read: object
    rows: object  # sums of log decays, twice; None without decays
    columns: object
    weighted: object  # do with the decay to the block's start

    @classmethod
    def of(cls, plan: common.Plan, refs) -> _Shared:
        """From the kernel's scratch references."""
        refs = list(refs)
        tail = refs[11:]
        syncs = tail[:2] if plan.tiling.heads_per_cta == 1 else [None, None]
        decays = tail[-3:] if plan.decay else [None] * 3
        return cls(*refs[:11], *syncs, *decays)


def _body(plan: common.Plan, refs) -> None:
    """The kernel: one branch for each kind of warpgroup."""
    plgpu = compat.mosaic_gpu()
    inputs, state_ref = refs[:4], refs[4]
    weights, rest = plan.split(refs[5:])
    outs, rest = rest[:3 + plan.decay], rest[3 + plan.decay:]
    sm = _Shared.of(plan, rest)
    group, b = lax.axis_index("group"), lax.axis_index("batch")
    segment, w = lax.axis_index("segment"), lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment)

    def block_of(i):
        return first + common.backwards(i, count)

    @pl.when(w == _MEMORY)
    def _():
        def copies(slot, token, barrier):
            for ref, slots in zip(inputs, (sm.q, sm.k, sm.v, sm.do), strict=True):
                common.copy_values(plan, ref, slots, slot, b, group, 0, token, barrier)
            if plan.decay:
                for vectors in (sm.rows, sm.columns):
                    common.copy_sums(plan, weights.sums, vectors, slot, b, group, token, barrier)

        common.load_blocks(plan, copies, sm.full, sm.free, first, count, common.backwards)

    @pl.when(w == _SCORES)
    def _():
        plgpu.set_max_registers(_SCORES_REGISTERS, action="decrease")
        body = functools.partial(_make_scores, plan, sm, weights, b)
        common.walk(count, block_of, functools.partial(common.is_padded, weights, b), body, ())
        plgpu.barrier_wait(sm.taken)  # every phase of a barrier must be waited for

    @pl.when(w < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        h = plan.head(group, w)
        columns = pl.ds(plan.column(0, w), _HALF)
        halves = range(plan.tiling.key_dim // _HALF)
        state = tuple(
            compat.load(state_ref.at[b, h, segment, pl.ds(j * _HALF, _HALF), columns],
                        layout=plgpu.Layout.WGMMA, optimized=False) for j in halves
        )
        _share_state(sm, w, state)

        def step(i, block, padded, state):
            tokens = pl.ds(block * BLOCK, BLOCK)
            targets = [ref.at[b, tokens, h, columns] for ref in outs[:2]]
            dots = outs[3].at[_part(plan, w), b, h, tokens] if plan.decay else None
            return _pass_block(plan, sm, i, w, padded, state, targets, dots)

        load = functools.partial(common.is_padded, weights, b)
        state = common.walk(count, block_of, load, step, state)

        @pl.when(segment == 0)
        def _():
            for j in halves:
                outs[2][b, h, pl.ds(j * _HALF, _HALF), columns] = state[j]

        if sm.state_there is not None:
            plgpu.barrier_wait(sm.state_there)
        plgpu.wait_smem_to_gmem(0)


def _part(plan: common.Plan, w):
    return 0 if plan.tiling.heads_per_cta == 2 else w


def _share_state(sm: _Shared, w, state) -> None:
    """Writes a warpgroup's columns of the state for both compute warpgroups."""
    plgpu = compat.mosaic_gpu()
    for j, x in enumerate(state):
        sm.state.at[w, j][...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    if sm.state_there is not None:
        plgpu.barrier_arrive(sm.state_there)


def _make_scores(plan: common.Plan, sm: _Shared, weights, b, i, block, padded, carry):
    """The scores' warpgroup: both kinds of masked scores and do weighted, for one block."""
    plgpu = compat.mosaic_gpu()
    slot = lax.rem(i, jnp.int32(_STAGES))
    plgpu.barrier_wait(sm.full.at[slot])
    if plan.documents:
        tiles = [x.at[slot, j] for x in (sm.q, sm.k, sm.v, sm.do) for j in range(2)]
        common.clean_tiles(weights, padded, b, block, tiles)
    for g in range(plan.tiling.heads_per_cta):
        halves = range(2) if plan.tiling.heads_per_cta == 1 else (g,)
        sums = None
        if plan.decay:
            sums = (registers.load_vector(sm.rows.at[slot, g], 1),
                    registers.load_vector(sm.columns.at[slot, g], 0))
        between = registers.decay_between(sums, True)
        made = []
        for a, other in ((sm.k, sm.q), (sm.v, sm.do)):
            def product(acc, a=a, other=other, halves=halves):
                for j in halves:
                    plgpu.wgmma(acc, a.at[slot, j], other.at[slot, j].transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(product, plgpu.ACC((BLOCK, BLOCK), jnp.float32))
            made.append((scores * between).astype(jnp.bfloat16))
        if g == 0:
            @pl.when(i >= 1)
            def _():
                plgpu.barrier_wait(sm.taken)

        for kind, x in enumerate(made):
            sm.scores.at[kind, g][...] = x
        if plan.decay:
            for w in halves:
                registers.weigh_values(sm.do.at[slot, w], jnp.exp(sums[0]), sm.weighted.at[w])
    plgpu.commit_smem()
    plgpu.barrier_arrive(sm.ready)
    return carry


def _pass_block(plan: common.Plan, sm: _Shared, i, w, padded, state, targets, dots_ref):
    """One compute warpgroup's part of dk and dv for the block of step `i`, and its next state."""
    plgpu = compat.mosaic_gpu()
    slot = lax.rem(i, jnp.int32(_STAGES))
    single = plan.tiling.heads_per_cta == 1
    halves, g = (range(2), 0) if single else ((w,), w)
    q, k, v, do = (x.at[slot] for x in (sm.q, sm.k, sm.v, sm.do))
    portable = plan.tiling.portable
    plgpu.barrier_wait(sm.full.at[slot])
    common.wait_prepared(sm.ready, padded, first=True)
    if single:
        plgpu.barrier_wait(sm.state_there)
    read, kept = None, state
    if plan.decay:
        sums, total = registers.load_vector(sm.rows.at[slot, g], 1), sm.columns[slot, g, BLOCK - 1]
        read, total = registers.state_factors(sums, total, True)
        kept = tuple(x * total for x in state)

    def add(acc, value, read, scores, x):
        """What came from the state, decayed, plus scores times x."""
        if read is None:
            plgpu.wgmma(acc, scores, x)
            return None
        started = value * registers.rows(read, _HALF)
        if portable:
            def inside(fresh):
                plgpu.wgmma(fresh, scores, x)
                return fresh[...]

            return started + pl.run_scoped(inside, plgpu.ACC((BLOCK, _HALF), jnp.float32))
        acc[...] = started
        plgpu.wgmma(acc, scores, x)
        return None

    def products(dv_acc, dk_acc, *state_accs):
        for n, j in enumerate(halves):
            plgpu.wgmma(dv_acc, k.at[j], sm.state.at[w, n])
        for n, j in enumerate(halves):
            back = sm.state.at[n, w] if single else sm.state.at[w, 0]
            plgpu.wgmma(dk_acc, v.at[j], back.transpose((1, 0)))
        if not portable:
            for acc, x in zip(state_accs, kept, strict=True):
                acc[...] = x
        common.wait_prepared(sm.ready, padded, first=False)
        values = sm.weighted.at[w] if plan.decay else do.at[w]
        for acc, j in zip(state_accs, halves, strict=True):
            plgpu.wgmma(acc, q.at[j].transpose((1, 0)), values)
        groups = len(state_accs)
        value = plgpu.wgmma_accumulator_load(dv_acc, wait_n=2 * groups) if plan.decay else None
        dv = add(dv_acc, value, read, sm.scores.at[0, g], do.at[w])
        value = plgpu.wgmma_accumulator_load(dk_acc, wait_n=groups + 1) if plan.decay else None
        dk = add(dk_acc, value, read, sm.scores.at[1, g], q.at[w])
        dv = dv_acc[...] if dv is None else dv
        dk = dk_acc[...] if dk is None else dk
        new = tuple(acc[...] for acc in state_accs)
        if portable:
            new = tuple(x + y for x, y in zip(new, kept, strict=True))
        return dv, dk, new

    accumulator = plgpu.ACC((BLOCK, _HALF), jnp.float32)
    dv, dk, state = pl.run_scoped(products, *(accumulator,) * (2 + len(state)))
    plgpu.barrier_arrive(sm.taken)
    if single:
        plgpu.barrier_arrive(sm.state_read)
    if dots_ref is not None:
        x = compat.load(v.at[w], layout=plgpu.Layout.WGMMA, optimized=False)
        dots_ref[...] = jnp.sum(dv * x.astype(jnp.float32), axis=1)
        plgpu.commit_smem()  # orders the reads of v and of sums before the next copies
    plgpu.barrier_arrive(sm.free.at[slot])
    if single:
        plgpu.barrier_wait(sm.state_read)
    _share_state(sm, w, state)
    for target, x in ((targets[1], dv), (targets[0], dk)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sm.out.at[w][...] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sm.out.at[w], target)
    return state
