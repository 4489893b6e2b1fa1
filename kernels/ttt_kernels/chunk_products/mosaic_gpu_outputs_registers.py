"""The kernel of the chunk outputs whose thread block keeps its columns of the state in registers.

`o^T = S^T q^T`: the tensor core reads the state from registers and only the tokens from shared
memory, which is what limits the form in `mosaic_gpu_outputs`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.chunk_products.mosaic_gpu_common import (
    OutputPlan,
    drain,
    load_tile,
    load_vector,
    ring,
    tile,
)
from ttt_kernels.chunk_products.mosaic_gpu_wgmma import resident_product
from ttt_kernels.chunk_products.tiling import BLOCK, RegisterTiling

_MEMORY_REGISTERS = 24
_COMPUTE_REGISTERS = {1: 232, 2: 232, 3: 160}


def outputs(
    q: jax.Array,
    states: jax.Array,
    rates: jax.Array | None,
    chunk_size: int,
    transposed: bool,
    tiling: RegisterTiling,
    interpret,
) -> jax.Array:
    """Each token times its chunk's state, times its rate; arguments as of `mosaic_gpu_outputs`."""
    plgpu = compat.mosaic_gpu()
    batch, length, heads, _ = q.shape
    chunks, value_dim = states.shape[2], states.shape[-2 if transposed else -1]
    slabs, rated, portable = value_dim // tiling.columns, rates is not None, interpret is not None
    plan = OutputPlan(
        tiling, length, chunk_size, chunks, heads, slabs, transposed, rated, portable
    )

    def chunk_outputs(*refs):
        _body(plan, refs)

    scratch = [
        tile(tiling.stages, tiling.pieces, BLOCK, BLOCK),
        tile(tiling.warpgroups, BLOCK, BLOCK),
        plgpu.Barrier(num_arrivals=tiling.pieces, num_barriers=tiling.stages),
        plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=tiling.stages),
    ]
    if portable:
        scratch.append(tile(tiling.warpgroups, tiling.pieces, BLOCK, BLOCK))
    call = compat.gpu_kernel(
        chunk_outputs,
        out_type=jax.ShapeDtypeStruct((batch, length, heads, value_dim), q.dtype),
        scratch_types=scratch,
        grid=(batch * heads * chunks * tiling.parts * slabs,),
        grid_names=("cta",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return call(q, states, *([rates] if rated else []))


def _body(plan: OutputPlan, refs) -> None:
    """The kernel: the memory warpgroup's loop, and the compute warpgroups'."""
    plgpu = compat.mosaic_gpu()
    tiling = plan.tiling
    q_ref, states_ref, *rest = refs
    rates_ref = rest.pop(0) if plan.rated else None
    out_ref, qs, staging, full, free, *slab = rest
    w = lax.axis_index("warpgroup")
    b, h, chunk, column, first, blocks = plan.locate(lax.axis_index("cta"))

    def token(i):
        return pl.ds(chunk * plan.chunk_size + (first + i) * BLOCK, BLOCK)

    @pl.when(w == tiling.warpgroups)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        steps = blocks + tiling.warpgroups  # each warpgroup's columns of the state come first

        @ring(steps, free, 0, tiling.stages)
        def _(step, slot):
            def load(source_of):
                for piece in range(tiling.pieces):
                    source = source_of(pl.ds(piece * BLOCK, BLOCK))
                    plgpu.copy_gmem_to_smem(source, qs.at[slot, piece], full.at[slot])

            @pl.when(step < tiling.warpgroups)
            def _():
                own = pl.ds(column + step * BLOCK, BLOCK)
                state = states_ref.at[b, h, chunk]
                load(lambda keys: state.at[own, keys] if plan.transposed else state.at[keys, own])

            @pl.when(step >= tiling.warpgroups)
            def _():
                load(lambda keys: q_ref.at[b, token(step - tiling.warpgroups), h, keys])

        drain(steps, free, 0, tiling.stages)

    @pl.when(w < tiling.warpgroups)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS[tiling.warpgroups], action="increase")
        state = _own_state(plan, qs, w, full, free, *slab)

        @pl.loop(0, blocks)
        def _(i):
            slot = lax.rem(i + tiling.warpgroups, jnp.int32(tiling.stages))
            rates = load_vector(rates_ref.at[b, h, token(i)], 0) if plan.rated else None
            plgpu.barrier_wait(full.at[slot])

            value = _product(plan, state, qs.at[slot])
            plgpu.barrier_arrive(free.at[slot])
            if plan.rated:
                value = value * lax.broadcast_in_dim(rates, value.shape, (1,))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging.at[w].transpose((1, 0))[...] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            columns = pl.ds(column + w * BLOCK, BLOCK)
            plgpu.copy_smem_to_gmem(staging.at[w], out_ref.at[b, token(i), h, columns])

        plgpu.wait_smem_to_gmem(0)


def _product(plan: OutputPlan, state: list, tokens):
    """The warpgroup's columns of a block's outputs, transposed: [64 columns, 64 tokens] float32."""
    if not plan.portable:
        return resident_product(state, tokens)
    plgpu = compat.mosaic_gpu()

    def compute(acc):
        for piece, columns in enumerate(state):
            plgpu.wgmma(acc, columns, tokens.at[piece].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(compute, plgpu.ACC((BLOCK, BLOCK), jnp.float32))


def _own_state(plan: OutputPlan, qs, w, full, free, slab=None):
    """A warpgroup's columns of the state as left operands [64 columns, 64 keys], from the ring."""
    plgpu, tiling = compat.mosaic_gpu(), plan.tiling
    for step in range(tiling.warpgroups):
        plgpu.barrier_wait(full.at[step])
    made = []
    for piece in range(tiling.pieces):
        columns = qs.at[w, piece]
        made.append(load_tile(columns if plan.transposed else columns.transpose((1, 0))))
    if plan.portable:
        for piece, columns in enumerate(made):
            slab.at[w, piece][...] = columns
        made = [slab.at[w, piece] for piece in range(tiling.pieces)]
    plgpu.commit_smem()
    for step in range(tiling.warpgroups):
        plgpu.barrier_arrive(free.at[step])
    return made
