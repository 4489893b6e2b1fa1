"""The kernel of the states at the edges of chunks: running sums of the summaries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

_GROUP = 8  # summaries whose loads are in flight together
_VECTOR = 4  # neighbours that one load takes


def states(
    summaries: jax.Array,
    decay: jax.Array | None,
    edge: jax.Array | None,
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
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (in reverse: behind) all,
        or None for zero.
      include: the states behind each chunk (in reverse: ahead of it), which hold its summary.
      reverse: from the last chunk to the first.
      dtype: of the states.
      interpret: None, or the interpreter's parameters.

    Returns:
      (states, shaped as summaries, in `dtype`; the last state, shaped as edge, float32).
    """
    plgpu = compat.mosaic_gpu()
    batch, heads, chunks, key_dim, value_dim = summaries.shape
    rows_each = 4 if value_dim % 128 == 0 else 8  # of a state, by one thread block
    layout = plgpu.Layout.WG_STRIDED((rows_each, value_dim), vec_size=_VECTOR)

    def load(ref):
        return compat.load(ref, layout=layout, optimized=False)

    def chunk_states(*refs):
        parts_ref, *rest, states_ref, final_ref = refs
        edge_ref = None if edge is None else rest.pop(0)
        factors_ref = rest
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * rows_each, rows_each)

        def add(first, count: int, state):
            """Carries the state over `count` chunks; all loads first, so that they overlap."""
            order = [first + i for i in range(count)]
            order = [chunks - 1 - c for c in order] if reverse else order
            parts = [load(parts_ref.at[b, h, c, rows]) for c in order]
            factors = [ref[b, h, c] for ref in factors_ref for c in order]
            for i, (c, part) in enumerate(zip(order, parts, strict=True)):
                part = part.astype(jnp.float32)
                state = jnp.zeros_like(part) if state is None else state
                new = (state * factors[i] if factors else state) + part
                states_ref[b, h, c, rows] = (new if include else state).astype(dtype)
                state = new
            return state

        groups, rest = divmod(chunks, _GROUP)
        state = None if edge is None else load(edge_ref.at[b, h, rows])
        if rest:
            state = add(0, rest, state)
        elif edge is None:
            rest, groups, state = _GROUP, groups - 1, add(0, _GROUP, None)
        final_ref[b, h, rows] = lax.fori_loop(
            0, groups, lambda i, x: add(rest + i * _GROUP, _GROUP, x), state
        )

    call = compat.gpu_kernel(
        chunk_states,
        out_type=[
            jax.ShapeDtypeStruct(summaries.shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, key_dim, value_dim), jnp.float32),
        ],
        grid=(key_dim // rows_each, heads, batch),
        grid_names=("slab", "head", "batch"),
        interpret=interpret,
    )
    return tuple(call(summaries, *(x for x in (edge, decay) if x is not None)))
