"""The second pass: outputs, block by block, from the state at every segment's edge.

Four warpgroups: two hold the state and make outputs, each for its own value columns; one makes
for both, a block ahead, the masked scores and the values weighted by their decay to the block's
edge, and zeroes padding; one loads. So decays cost the first two a few multiplications. Runs
backwards in time with `reverse`, which makes the gradients of keys and values.
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

_SCORES = COMPUTE_WARPGROUPS  # index of the scores' warpgroup
_MEMORY = COMPUTE_WARPGROUPS + 1


def outputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    states: jax.Array,
    weights: common.Weights,
    tiling: Tiling,
    *,
    reverse: bool,
    interpret,
    beside: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Outputs of token-causal linear attention from the state at each segment's edge.

    Args:
      q, k: [batch, time, heads, key_dim] bf16, widths padded, time a multiple of 8 (or below 8).
      v: [batch, time, heads, value_dim] bf16.
      states: [batch, heads, segments, key_dim, value_dim] float32, the state ahead of each
        segment (in reverse: behind it).
      weights: decays and padding.
      tiling: see `tiling.choose`.
      reverse: a token sees itself and later ones.
      interpret: None, or the interpreter's parameters.
      beside: None, or an array like v whose products with the outputs are wanted too.

    Returns:
      (out, final): [batch, time, heads, value_dim] bf16, and the state that is left at the end of
      the pass, [batch, heads, key_dim, value_dim] float32; with `beside` a third array, `out .
      beside` of each token, [parts, batch, heads, blocks * 64] float32 to be summed over parts.
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = q.shape
    if beside is not None:
        tiling = tiling.with_beside()
    plan = common.Plan.of(tiling, q, weights, reverse)
    groups, columns, stages = tiling.heads_per_cta, tiling.columns, tiling.stages

    def linear_attention_outputs(*refs):
        _body(plan, beside is not None, refs)

    slots = (stages, COMPUTE_WARPGROUPS, BLOCK, columns)
    vectors = plgpu.SMEM((stages, groups, BLOCK), jnp.float32)
    decays = plan.decay
    copies = 2 * groups + COMPUTE_WARPGROUPS + 2 * groups * decays
    scratch = [
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, stages, groups, BLOCK, key_dim),
        common.tile(tiling, *slots),
        *((vectors, vectors, common.tile(tiling, *slots)) if decays else ()),
        common.tile(tiling, stages, groups, BLOCK, BLOCK),
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        common.tile(tiling, COMPUTE_WARPGROUPS, key_dim, columns),
        common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns),
    ]
    out_type = [jax.ShapeDtypeStruct(v.shape, v.dtype),
                jax.ShapeDtypeStruct((batch, heads, key_dim, v.shape[-1]), jnp.float32)]
    if beside is not None:
        dots = (plan.parts, batch, heads, blocks(length) * BLOCK)
        out_type.append(jax.ShapeDtypeStruct(dots, jnp.float32))
        scratch += [common.tile(tiling, COMPUTE_WARPGROUPS, BLOCK, columns),
                    plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
                    plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS)]
    call = compat.gpu_kernel(
        linear_attention_outputs,
        out_type=out_type,
        scratch_types=scratch,
        interpret=interpret,
        **plan.grid(tiling.segments, _MEMORY + 1),
    )
    extra = () if beside is None else (beside,)
    return tuple(call(q, k, v, states, *weights.arrays(), *extra))


class _Tiles(NamedTuple):
    """The ring's slots in shared memory, all with a leading stage axis, and its barriers."""

    q: object
    k: object
    v: object
    rows: object  # sums of log decays, to be read along rows of a tile
    columns: object  # the same along columns: layout inference gives one layout to one reference
    weighted: object  # v with the decay to the block's edge
    scores: object
    full: object
    ready: object  # scores and weighted values are there
    free: object


class _Ahead(NamedTuple):
    """What a compute warpgroup reads of global memory for a block, one block ahead.

    A read of the ring's slots would have to be fenced before they are released.
    """

    padded: object  # see `common.is_padded`
    sums: object  # [64] f32, one a row, and the last of them; None without decays
    total: object

    @classmethod
    def load(cls, weights: common.Weights, batch, head, block) -> _Ahead:
        """Starts the reads."""
        padded = common.is_padded(weights, batch, block)
        if weights.sums is None:
            return cls(padded, None, None)
        sums = weights.sums.at[batch, head, pl.ds(block * BLOCK, BLOCK)]
        total = weights.sums[batch, head, block * BLOCK + BLOCK - 1]
        return cls(padded, registers.load_vector(sums, 1), total)


def _body(plan: common.Plan, dots: bool, refs) -> None:
    """The kernel: one branch for each kind of warpgroup."""
    plgpu = compat.mosaic_gpu()
    q_ref, k_ref, v_ref, state_ref = refs[:4]
    weights, rest = plan.split(refs[4:])
    beside_ref, rest = (rest[0], rest[1:]) if dots else (None, rest)
    (out_ref, final_ref), rest = rest[:2], rest[2:]
    dots_ref, rest = (rest[0], rest[1:]) if dots else (None, rest)
    (q, k, v), rest = rest[:3], rest[3:]
    decays, rest = (rest[:3], rest[3:]) if plan.decay else ((None, None, v), rest)
    scores, full, ready, free, state_smem, out_smem, *rest = rest
    ring = _Tiles(q, k, v, *decays, scores, full, ready, free)
    beside = common.Beside(*rest) if dots else None
    slab, group = lax.axis_index("slab"), lax.axis_index("group")
    segment, b = lax.axis_index("segment"), lax.axis_index("batch")
    w = lax.axis_index("warpgroup")
    first, count = plan.segment_blocks(segment)
    order = common.backwards if plan.reverse else common.forwards

    def block_of(i):
        return first + order(i, count)

    @pl.when(w == _MEMORY)
    def _():
        def copies(slot, token, barrier):
            common.copy_keys(plan, q_ref, ring.q, slot, b, group, token, barrier)
            common.copy_keys(plan, k_ref, ring.k, slot, b, group, token, barrier)
            common.copy_values(plan, v_ref, ring.v, slot, b, group, slab, token, barrier)
            if plan.decay:
                for vectors in (ring.rows, ring.columns):
                    common.copy_sums(plan, weights.sums, vectors, slot, b, group, token, barrier)

        def copy_beside(token, barrier):
            common.copy_values(plan, beside_ref, beside.tile, None, b, group, slab, token, barrier)

        common.load_blocks(plan, copies, full, free, first, count, order, beside, copy_beside)

    @pl.when(w == _SCORES)
    def _():
        plgpu.set_max_registers(common.HELPER_REGISTERS, action="decrease")
        body = functools.partial(_make_scores, plan, ring, weights, b)
        load = functools.partial(common.is_padded, weights, b)
        common.walk(count, block_of, load, body, ())

    @pl.when(w < COMPUTE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(common.STATE_REGISTERS, action="increase")
        own_columns = pl.ds(plan.column(slab, w), plan.tiling.columns)
        h = plan.head(group, w)
        part = 0 if plan.tiling.heads_per_cta == 2 else slab * COMPUTE_WARPGROUPS + w
        state = compat.load(state_ref.at[b, h, segment, :, own_columns],
                            layout=plgpu.Layout.WGMMA, optimized=False)
        tiles = (state_smem.at[w], out_smem.at[w])
        _store(tiles[0], state)

        def step(i, block, ahead, state):
            tokens = pl.ds(block * BLOCK, BLOCK)
            out, state = _pass_block(plan, ring, i, w, ahead, state, tiles[0])
            if dots:
                dots_ref[part, b, h, tokens] = _dots(beside, w, out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _store(tiles[1], out)
            if dots:  # behind the commit, which orders the read before the next copy
                plgpu.barrier_arrive(beside.free)
            plgpu.copy_smem_to_gmem(tiles[1], out_ref.at[b, tokens, h, own_columns])
            return state

        load = functools.partial(_Ahead.load, weights, b, h)
        state = common.walk(count, block_of, load, step, state)

        @pl.when(segment == (0 if plan.reverse else plan.tiling.segments - 1))
        def _():
            final_ref[b, h, :, own_columns] = state

        plgpu.wait_smem_to_gmem(0)


def _dots(beside: common.Beside, w, out):
    """Products of a block's outputs with the tile beside them, summed along rows."""
    plgpu = compat.mosaic_gpu()
    plgpu.barrier_wait(beside.full)
    x = compat.load(beside.tile.at[w], layout=plgpu.Layout.WGMMA, optimized=False)
    return jnp.sum(out * x.astype(jnp.float32), axis=1)


def _store(tile, value) -> None:
    """Writes a bf16 tile for the tensor core or the copy engine."""
    tile[...] = value.astype(jnp.bfloat16)
    compat.mosaic_gpu().commit_smem()


def _make_scores(plan: common.Plan, ring: _Tiles, weights, b, i, block, padded, carry):
    """The scores' warpgroup at step `i`: masked scores a head, weighted values a column slab."""
    plgpu = compat.mosaic_gpu()
    slot = lax.rem(i, jnp.int32(plan.tiling.stages))
    plgpu.barrier_wait(ring.full.at[slot])
    groups = range(plan.tiling.heads_per_cta)
    if plan.documents:
        tiles = [x.at[slot, g] for x in (ring.q, ring.k) for g in groups]
        tiles += [ring.v.at[slot, w] for w in range(COMPUTE_WARPGROUPS)]
        common.clean_tiles(weights, padded, b, block, tiles)
    for g in groups:
        sums = None
        if plan.decay:
            sums = (registers.load_vector(ring.rows.at[slot, g], 1),
                    registers.load_vector(ring.columns.at[slot, g], 0))

        def inside(acc, g=g):
            plgpu.wgmma(acc, ring.q.at[slot, g], ring.k.at[slot, g].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(inside, plgpu.ACC((BLOCK, BLOCK), jnp.float32))
        ring.scores.at[slot, g][...] = (
            scores * registers.decay_between(sums, plan.reverse)
        ).astype(jnp.bfloat16)
        if not plan.decay:
            continue
        total = ring.columns[slot, g, BLOCK - 1]
        factors = jnp.exp(sums[0] if plan.reverse else total - sums[0])
        single = plan.tiling.heads_per_cta == 1
        for w in range(COMPUTE_WARPGROUPS) if single else (g,):
            registers.weigh_values(ring.v.at[slot, w], factors, ring.weighted.at[slot, w])
    plgpu.commit_smem()
    plgpu.barrier_arrive(ring.ready.at[slot])
    return carry


def _pass_block(plan: common.Plan, ring: _Tiles, i, w, ahead: _Ahead, state, state_smem):
    """One warpgroup's outputs and next state for the block of step `i`.

    `o = q S + P v` and `S' = S + k^T v`, each term with its decay.
    """
    plgpu = compat.mosaic_gpu()
    slot = lax.rem(i, jnp.int32(plan.tiling.stages))
    g = common.own(plan, w)
    q, k, v = ring.q.at[slot, g], ring.k.at[slot, g].transpose((1, 0)), ring.v.at[slot, w]
    portable = plan.tiling.portable

    def products(out_acc, state_acc):
        plgpu.barrier_wait(ring.full.at[slot])
        common.wait_prepared(ring.ready.at[slot], ahead.padded, first=True)
        plgpu.wgmma(out_acc, q, state_smem)
        added = state
        if plan.decay:
            read, total = registers.state_factors(ahead.sums, ahead.total, plan.reverse)
            added = added * total
        if not portable:
            state_acc[...] = added
        common.wait_prepared(ring.ready.at[slot], ahead.padded, first=False)
        plgpu.wgmma(state_acc, k, ring.weighted.at[slot, w])
        if plan.decay:
            out = plgpu.wgmma_accumulator_load(out_acc, wait_n=1)
            out = out * registers.rows(read, plan.tiling.columns)
            if portable:
                def inside(acc):
                    plgpu.wgmma(acc, ring.scores.at[slot, g], v)
                    return acc[...]

                shape = (BLOCK, plan.tiling.columns)
                out = out + pl.run_scoped(inside, plgpu.ACC(shape, jnp.float32))
            else:
                out_acc[...] = out
                plgpu.wgmma(out_acc, ring.scores.at[slot, g], v)
                out = out_acc[...]
        else:
            plgpu.wgmma(out_acc, ring.scores.at[slot, g], v)
            out = out_acc[...]
        new = state_acc[...]
        return out, (added + new if portable else new)

    out, state = pl.run_scoped(
        products,
        plgpu.ACC((BLOCK, plan.tiling.columns), jnp.float32),
        plgpu.ACC((plan.tiling.key_dim, plan.tiling.columns), jnp.float32),
    )
    plgpu.barrier_arrive(ring.free.at[slot])
    state_smem[...] = state.astype(jnp.bfloat16)  # committed together with the outputs
    return out, state


