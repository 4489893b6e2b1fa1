"""The kernel of the states at the edges of chunks: running sums of the summaries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

_ROWS = 8  # of a state, by one thread block
_GROUP = 8  # summaries whose loads are in flight together


def states(
    summaries: jax.Array, edge: jax.Array, include: bool, reverse: bool, dtype: jnp.dtype, interpret
) -> tuple[jax.Array, jax.Array]:
    """`S_c = edge + sum_{j < c} G_j` for every chunk c, and the same over all chunks.

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim] float32, key_dim a multiple of 8,
        value_dim one of 64.
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (in reverse: behind) all.
      include: sums over j <= c.
      reverse: sums over j > c (with `include` j >= c).
      dtype: of the states.
      interpret: None, or the interpreter's parameters.

    Returns:
      (states, shaped as summaries, in `dtype`; final, shaped as edge, float32).
    """
    batch, heads, chunks, key_dim, _ = summaries.shape

    def chunk_states(parts_ref, edge_ref, states_ref, final_ref):
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * _ROWS, _ROWS)

        def add(first, count: int, state):
            """Carries the state over `count` chunks; all loads first, so that they overlap."""
            order = [first + i for i in range(count)]
            order = [chunks - 1 - c for c in order] if reverse else order
            parts = [parts_ref[b, h, c, rows] for c in order]
            for c, part in zip(order, parts, strict=True):
                new = state + part
                states_ref[b, h, c, rows] = (new if include else state).astype(dtype)
                state = new
            return state

        groups, rest = divmod(chunks, _GROUP)
        state = lax.fori_loop(
            0, groups, lambda i, x: add(i * _GROUP, _GROUP, x), edge_ref[b, h, rows]
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
    return tuple(call(summaries, edge))
