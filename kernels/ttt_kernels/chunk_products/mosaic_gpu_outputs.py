"""The kernel of the chunk outputs whose thread block keeps its state in shared memory.

It runs any width; `mosaic_gpu_outputs_registers` is the form for states that fit in registers. This
one also makes what the gradient of rates needs: each token's outputs times another token, summed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.chunk_products.mosaic_gpu_common import (
    MEMORY_REGISTERS,
    OutputPlan,
    drain,
    load_tile,
    load_vector,
    ring,
    tile,
)
from ttt_kernels.chunk_products.tiling import BLOCK, OutputTiling

_PAIRS = 2  # of a compute and a memory warpgroup
_COMPUTE_REGISTERS = 216


@dataclasses.dataclass(frozen=True)
class _Plan(OutputPlan):
    """With whether the outputs are also multiplied with another token array."""

    dotted: bool

    @property
    def pieces(self) -> int:
        """Tiles of 64 contracted columns."""
        return self.tiling.pieces

    @property
    def steps(self) -> int:
        """Tiles that pass through the ring for a block of tokens."""
        return self.pieces + (self.tiling.columns // BLOCK if self.dotted else 0)


def outputs(
    q: jax.Array,
    states: jax.Array,
    rates: jax.Array | None,
    other: jax.Array | None,
    chunk_size: int,
    transposed: bool,
    tiling: OutputTiling,
    interpret,
) -> tuple[jax.Array, jax.Array | None]:
    """Each token times its chunk's state, times its rate.

    Args:
      q: [batch, time, heads, key_dim] bf16, key_dim a multiple of 64, time a multiple of 8.
      states: [batch, heads, chunks, key_dim, value_dim] bf16, the last two exchanged where
        `transposed`.
      rates: [batch, heads, time] float32, time a multiple of 64, or None for 1.
      other: [batch, time, heads, value_dim] bf16, or None.
      chunk_size: tokens a chunk, a multiple of 64.
      transposed: multiplies by the transposed states.
      tiling: one of `tiling.output_options`.
      interpret: None, or the interpreter's parameters.

    Returns:
      ([batch, time, heads, value_dim] bf16; `sum(other * q S)` of each token, without its rate, a
      part for each slab of columns, [slabs, batch, heads, time to a multiple of 64] float32, or
      None).
    """
    plgpu = compat.mosaic_gpu()
    batch, length, heads, key_dim = q.shape
    chunks, value_dim = states.shape[2], states.shape[-2 if transposed else -1]
    slabs = value_dim // tiling.columns
    rated, dotted = rates is not None, other is not None
    plan = _Plan(
        tiling, length, chunk_size, chunks, heads, slabs, transposed, rated,
        interpret is not None, dotted,
    )

    def chunk_outputs(*refs):
        _body(plan, refs)

    piece = (tiling.columns, BLOCK) if transposed else (BLOCK, tiling.columns)
    rings = _PAIRS * tiling.stages
    out_type = [jax.ShapeDtypeStruct((batch, length, heads, value_dim), q.dtype)]
    if dotted:
        sums = (slabs, batch, heads, -(-length // BLOCK) * BLOCK)
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    call = compat.gpu_kernel(
        chunk_outputs,
        out_type=out_type,
        scratch_types=[
            tile(plan.pieces, *piece),
            tile(rings, BLOCK, BLOCK),
            tile(_PAIRS, BLOCK, BLOCK),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.pieces),
            plgpu.Barrier(num_arrivals=1, num_barriers=rings),
            plgpu.Barrier(num_arrivals=1, num_barriers=rings),
        ],
        grid=(batch * heads * chunks * tiling.parts * slabs,),
        grid_names=("cta",),
        num_threads=2 * _PAIRS,
        thread_name="warpgroup",
        interpret=interpret,
    )
    made = call(q, states, *(x for x in (rates, other) if x is not None))
    return made[0], made[1] if dotted else None


def _body(plan: _Plan, refs) -> None:
    """The kernel: warpgroups 0 and 1 compute, 2 loads for 0 and 3 for 1."""
    plgpu = compat.mosaic_gpu()
    tiling = plan.tiling
    q_ref, states_ref, *rest = refs
    rates_ref = rest.pop(0) if plan.rated else None
    other_ref = rest.pop(0) if plan.dotted else None
    out_ref = rest.pop(0)
    dots_ref = rest.pop(0) if plan.dotted else None
    slab, qs, staging, loaded, full, free = rest
    w = lax.axis_index("warpgroup")
    b, h, chunk, column, first, blocks = plan.locate(lax.axis_index("cta"))
    pair = lax.rem(w, _PAIRS)
    count = lax.div(blocks - pair + 1, _PAIRS)
    ring_start = pair * tiling.stages

    def token(i):
        return pl.ds(chunk * plan.chunk_size + (first + _PAIRS * i + pair) * BLOCK, BLOCK)

    @pl.when(w >= _PAIRS)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

        steps = count * plan.steps

        @ring(steps, free, ring_start, tiling.stages)
        def _(step, slot):
            i, piece = lax.div(step, plan.steps), lax.rem(step, plan.steps)
            slot = ring_start + slot

            def load(ref, first):
                source = ref.at[b, token(i), h, pl.ds(first, BLOCK)]
                plgpu.copy_gmem_to_smem(source, qs.at[slot], full.at[slot])

            if not plan.dotted:
                load(q_ref, piece * BLOCK)
                return
            behind = piece - plan.pieces
            pl.when(behind < 0)(lambda: load(q_ref, piece * BLOCK))
            pl.when(behind >= 0)(lambda: load(other_ref, column + behind * BLOCK))

        drain(steps, free, ring_start, tiling.stages)

    @pl.when(w < _PAIRS)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        # Not by a memory warpgroup: the first tokens are on their way meanwhile.
        @pl.when(w == 0)
        def _():
            _load_slab(plan, states_ref.at[b, h, chunk], column, slab, loaded)

        def slot(i, piece):
            step = i * plan.steps + piece
            return ring_start + lax.rem(step, jnp.int32(tiling.stages))

        @pl.loop(0, count)
        def _(i):
            rates = load_vector(rates_ref.at[b, h, token(i)], 1) if plan.rated else None
            value = _product(plan, slab, qs, loaded, full, free, slot, i)
            if plan.dotted:
                part = lax.div(column, tiling.columns)
                dots_ref[part, b, h, token(i)] = _dots(plan, value, qs, full, free, slot, i)
            buffer = staging.at[pair]
            for start in range(0, tiling.columns, BLOCK):
                tile_value = value[:, start:start + BLOCK]
                if plan.rated:
                    tile_value *= lax.broadcast_in_dim(rates, tile_value.shape, (0,))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer[...] = tile_value.astype(jnp.bfloat16)
                plgpu.commit_smem()
                columns = pl.ds(column + start, BLOCK)
                plgpu.copy_smem_to_gmem(buffer, out_ref.at[b, token(i), h, columns])

        plgpu.wait_smem_to_gmem(0)


def _load_slab(plan: _Plan, state_ref, column, slab, loaded) -> None:
    """Starts the copies of the thread block's columns of the state, 64 contracted ones each."""
    plgpu = compat.mosaic_gpu()
    columns = pl.ds(column, plan.tiling.columns)
    for piece in range(plan.pieces):
        own = pl.ds(piece * BLOCK, BLOCK)
        source = state_ref.at[columns, own] if plan.transposed else state_ref.at[own, columns]
        plgpu.copy_gmem_to_smem(source, slab.at[piece], loaded.at[piece])


def _product(plan: _Plan, slab, qs, loaded, full, free, slot, i):
    """Block `i` of a compute warpgroup times the slab, [64, columns] float32."""
    plgpu = compat.mosaic_gpu()

    def compute(acc):
        for piece in range(plan.pieces):
            state = slab.at[piece]
            if plan.transposed:
                state = state.transpose((1, 0))

            @pl.when(i == 0)
            def _(piece=piece):
                plgpu.barrier_wait(loaded.at[piece])

            plgpu.barrier_wait(full.at[slot(i, piece)])
            plgpu.wgmma(acc, qs.at[slot(i, piece)], state)
            if piece:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(free.at[slot(i, piece - 1)])
        value = acc[...]
        plgpu.barrier_arrive(free.at[slot(i, plan.pieces - 1)])
        return value

    return pl.run_scoped(compute, plgpu.ACC((BLOCK, plan.tiling.columns), jnp.float32))


def _dots(plan: _Plan, value, qs, full, free, slot, i):
    """`sum(other * value)` of each token of block `i`, from the ring's last tiles of the block."""
    plgpu = compat.mosaic_gpu()
    total = None
    for start in range(0, plan.tiling.columns, BLOCK):
        own = slot(i, plan.pieces + start // BLOCK)
        plgpu.barrier_wait(full.at[own])
        other = load_tile(qs.at[own]).astype(jnp.float32) * value[:, start:start + BLOCK]
        total = other if total is None else total + other
        if plan.portable:
            plgpu.commit_smem()  # the interpreter wants it between reads and the slot's next copy
        plgpu.barrier_arrive(free.at[own])
    return jnp.sum(total, axis=1)
