"""The kernel of the states at the edges of chunks: running sums of the summaries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

_ROWS = 8  # of a state, by one thread block
_GROUP = 8  # summaries whose loads are in flight together
_VECTOR = 4  # neighbours that one load takes


def states(
    summaries: jax.Array,
    decay: jax.Array | None,
    edge: jax.Array,
    include: bool,
    reverse: bool,
    dtype: jnp.dtype,
    interpret,
) -> tuple[jax.Array, jax.Array]:
    """`S_c = decay_c S_{c-1} + G_c` for every chunk c, summed in float32.

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim] float32 or bf16, key_dim a multiple of
        8, value_dim one of 64.
      decay: [batch, heads, chunks] float32, or None for 1.
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (in reverse: behind) all.
      include: the states behind each chunk (in reverse: ahead of it), which hold its summary.
      reverse: from the last chunk to the first.
      dtype: of the states.
      interpret: None, or the interpreter's parameters.

    Returns:
      (states, shaped as summaries, in `dtype`; the last state, shaped as edge, float32).
    """
    plgpu = compat.mosaic_gpu()
    batch, heads, chunks, key_dim, value_dim = summaries.shape
    layout = plgpu.Layout.WG_STRIDED((_ROWS, value_dim), vec_size=_VECTOR)

    def load(ref):
        return compat.load(ref, layout=layout, optimized=False)

    def chunk_states(*refs):
        parts_ref, edge_ref, *factors_ref, states_ref, final_ref = refs
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * _ROWS, _ROWS)

        def add(first, count: int, state):
            """Carries the state over `count` chunks; all loads first, so that they overlap."""
            order = [first + i for i in range(count)]
            order = [chunks - 1 - c for c in order] if reverse else order
            parts = [load(parts_ref.at[b, h, c, rows]) for c in order]
            factors = [ref[b, h, c] for ref in factors_ref for c in order]
            for i, (c, part) in enumerate(zip(order, parts, strict=True)):
                new = (state * factors[i] if factors else state) + part.astype(jnp.float32)
                states_ref[b, h, c, rows] = (new if include else state).astype(dtype)
                state = new
            return state

        groups, rest = divmod(chunks, _GROUP)
        state = lax.fori_loop(
            0, groups, lambda i, x: add(i * _GROUP, _GROUP, x), load(edge_ref.at[b, h, rows])
        )
        final_ref[b, h, rows] = add(groups * _GROUP, rest, state)

    call = compat.gpu_kernel(
        chunk_states,
        out_type=[
            jax.ShapeDtypeStruct(summaries.shape, dtype),
            jax.ShapeDtypeStruct(edge.shape, jnp.float32),
        ],
        grid=(key_dim // _ROWS, heads, batch),
        grid_names=("slab", "head", "batch"),
        interpret=interpret,
    )
    return tuple(call(summaries, edge, *([] if decay is None else [decay])))
