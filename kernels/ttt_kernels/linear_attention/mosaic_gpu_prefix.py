"""The state at every segment's edge from what the segments add to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

_ROWS = 8  # of the state, a thread block
_GROUP = 8  # segments whose loads overlap


def prefix(
    summaries: jax.Array,
    edge: jax.Array | None,
    factors: jax.Array | None,
    *,
    reverse: bool,
    interpret,
) -> jax.Array:
    """The state ahead of each segment (in reverse: behind it) from the segments' summaries.

    Args:
      summaries: [batch, heads, segments - 1, key_dim, value_dim] float32.
      edge: [batch, heads, key_dim, value_dim] float32, the state ahead of (behind) the row, or
        None for zero.
      factors: [batch, heads, segments - 1, 64] float32, these segments' decays (64 times), or None
        for 1.
      reverse: runs from the last segment to the first.
      interpret: None, or the interpreter's parameters.

    Returns:
      [batch, heads, segments, key_dim, value_dim] float32.
    """
    batch, heads, steps, key_dim, value_dim = summaries.shape

    def linear_attention_prefix(*refs):
        parts_ref, *rest, out_ref = refs
        edge_ref = rest.pop(0) if edge is not None else None
        factor_ref = rest
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        rows = pl.ds(lax.axis_index("slab") * _ROWS, _ROWS)

        def pass_segments(first, count, state):
            """Carries the state over `count` segments; all loads first, so that they overlap.

            A state of None is zero.
            """
            steps_done = [first + i for i in range(count)]
            passed = [steps - i if reverse else i for i in steps_done]
            taken = [s - 1 if reverse else s for s in passed]
            parts = [parts_ref[b, h, s, rows] for s in taken]
            factors = [ref[b, h, s, 0] for ref in factor_ref for s in taken]
            for i, (s, part) in enumerate(zip(passed, parts, strict=True)):
                out_ref[b, h, s, rows] = jnp.zeros_like(part) if state is None else state
                if state is not None and factors:
                    state = state * factors[i]
                state = part if state is None else state + part
            return state

        begin = 1 if edge is None else 0
        state = pass_segments(0, 1, None) if edge is None else edge_ref[b, h, rows]
        groups, left = divmod(steps - begin, _GROUP)
        state = lax.fori_loop(
            0, groups,
            lambda i, x: pass_segments(begin + i * _GROUP, _GROUP, x), state,
        )
        state = pass_segments(begin + groups * _GROUP, left, state)
        out_ref[b, h, 0 if reverse else steps, rows] = state

    call = compat.gpu_kernel(
        linear_attention_prefix,
        out_type=jax.ShapeDtypeStruct((batch, heads, steps + 1, key_dim, value_dim), jnp.float32),
        grid=(key_dim // _ROWS, heads, batch),
        grid_names=("slab", "head", "batch"),
        interpret=interpret,
    )
    return call(summaries, *(x for x in (edge, factors) if x is not None))
