"""The dual form: inside a chunk every token reads its own weights, and none of them is built.

Gradients are taken at the chunk's starting weights, so that token ``i`` reads
``W_i = W − c_i Σ_{j≤i} rate_j left_jᵀ right_j`` and ``x_i W_i`` is a masked product, as in
attention.
"""

import jax

from ttt_jax.inner_loop.fast_nets import TokenMatrix, Weights, outer_products
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Slot, State, select, target


def step(
    spec: InnerLoop, static: Weights, state: State, slot: Slot, start: State
) -> tuple[State, jax.Array]:
    """The state after a chunk (unchanged by an unfinished one) and the outputs of its tokens.

    Args:
      spec: the inner loop, with ``order="token_causal"``.
      static: arrays that are not trained, ``position_rate`` among them.
      state: the state before the chunk.
      slot: the chunk; its queries are those of its own tokens.
      start: the state from which a new document starts.

    Source: Sun et al., *Learning to (Learn at Test Time)* (arXiv 2407.04620), section 2.5.
    """
    if slot.fresh is not None:
        state = select(slot.fresh, start, state)
    weights = {**static, **state.weights}
    goal = target(spec, slot.k, slot.v)
    factors = spec.fast_net.factors(weights, slot.k, lambda f: spec.loss.cotangent(f, goal))
    position_rate = static["position_rate"]
    if spec.direction == "ascent":
        position_rate = -position_rate
    by_token, moved = {}, {}
    for name in spec.trained:
        left, right = factors[name]
        rate = slot.rates[name]
        rated = left if rate is None else (left * rate).astype(left.dtype)
        by_token[name] = TokenMatrix(weights[name], rated, right, position_rate)
        gradient = outer_products(rated, right, None)
        moved[name] = state.weights[name] - position_rate[..., -1:, :] * gradient
    out = spec.fast_net.apply({**weights, **by_token}, slot.q)
    complete = slot.count == slot.k.shape[2]
    if slot.valid is not None:
        complete &= slot.valid
    return select(complete, state._replace(weights=moved), state), out
