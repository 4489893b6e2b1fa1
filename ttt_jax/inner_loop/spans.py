"""An explicit order: a list of spans, each updating on and/or applied to its tokens, as written.

LaCT-NVS runs one update on the tokens of the input views and then applies to all tokens.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.chunks import Tokens, stack_slots
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State, apply, update


def run(
    spec: InnerLoop, static: Weights, tokens: Tokens, state: State
) -> tuple[jax.Array, State]:
    """Outputs (0 at tokens in no applied span) and the state after the last span.

    Args:
      spec: the inner loop; its ``order`` is a tuple of ``Span``.
      static: matrices that are not trained.
      tokens: head-major tokens, at least as many as the largest ``end``.
      state: the state before the first span.
    """
    out = jnp.zeros((*tokens.q.shape[:3], tokens.v.shape[3]), tokens.q.dtype)
    start = state
    for span in spec.order:
        part = jax.tree.map(lambda x, span=span: x[:, :, span.start : span.end], tokens)
        if span.update:
            stacked = stack_slots(spec, part, span.end - span.start, None)
            state = update(spec, static, state, jax.tree.map(lambda x: x[0], stacked), start)
        if span.apply:
            read = apply(spec, static, state, part.q)
            out = out.at[:, :, span.start : span.end].set(read.astype(out.dtype))
    return out, state
