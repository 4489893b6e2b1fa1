"""One pass over a sequence cut over devices, where no update depends on the state.

Each device sums up its own tokens at once, gets the state at its left edge by a prefix over devices
of what all devices found, and adds what that state contributes: exact, since weights and momentum
are affine in what they start from.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import delta, kernel, parallel
from ttt_jax.inner_loop.chunks import Tokens, arrange, first_id, like
from ttt_jax.inner_loop.fast_nets import Weights, dense
from ttt_jax.inner_loop.prefix import running_product, scan_of
from ttt_jax.inner_loop.sequence_parallel_documents import Edge
from ttt_jax.inner_loop.sequence_parallel_exchange import (
    Exchange,
    exclusive_prefix,
    matrix_product,
)
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State


def run_chunks(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    edge: Edge,
    initial: State,
    start: State,
    axis_name: str,
    exchange: Exchange | None,
    implementation: str | None,
    backend: str | None = "xla",
) -> tuple[jax.Array, State]:
    """As ``parallel.run``, with the prefix over chunks going on over devices.

    Args:
      spec: the inner loop, without ``parallel.obstacles``.
      static: matrices that are not trained.
      tokens: the shard's tokens, head-major.
      edge: how the shard goes on from the left.
      initial: the state before the sequence, without its buffer, the same on all devices.
      start: the state from which a new document starts.
      axis_name: the mesh axis.
      exchange: of the states, see ``exclusive_prefix``.
      implementation: of the prefix over the shard's chunks.
      backend: of the operations of ``ttt_kernels``.
    """
    chunks = arrange(spec, tokens, edge.segment_ids, edge.buffer, edge.continued)
    if edge.restart is not None:  # the last document may have begun on another device
        chunks = chunks._replace(restart=edge.restart)

    within = scan_of(tokens.k.dtype, implementation)

    def scan(decay, values, initial, ahead_of):
        _, own, last = within(decay, values, jnp.zeros_like(initial), ahead_of)
        if decay is None:
            ahead = exclusive_prefix(None, last, initial, axis_name, exchange)
            return ahead, own + ahead[:, :, None], last + ahead
        kept = running_product(decay, 2)
        whole = kept[:, :, -1]
        if ahead_of:
            kept = jnp.concatenate([jnp.ones_like(kept[:, :, :1]), kept[:, :, :-1]], 2)
        ahead = exclusive_prefix(whole, last, initial, axis_name, exchange)
        return ahead, own + kept * ahead[:, :, None], last + whole * ahead

    return parallel.run(
        spec, static, chunks, initial, start, scan=scan, backend=backend
    )


def run_tokens(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    edge: Edge,
    initial: State,
    start: State,
    axis_name: str,
    exchange: Exchange | None,
    implementation: str | None,
) -> tuple[jax.Array, State]:
    """As ``kernel.run`` for linear attention causal by token: one call of the kernel a device.

    The shard's first document starts from zero where it began to the left, so that the kernel
    does not wait for the exchange; the left part is ``q̂_t (Π_{s≤t} forget_s) S``, one product.
    """
    name = spec.fast_net.last
    batch, _, length, _ = tokens.k.shape
    ongoing, out, state = _without_left(spec, static, tokens, edge, start, implementation)
    opening, single = _first_document(edge.segment_ids, batch, length)
    kept = _kept(spec, tokens, opening)
    whole = jnp.where(ongoing & single[:, None, None, None], kept[:, :, -1:], 0)
    own = state.weights[name]
    ahead = exclusive_prefix(whole, own, initial.weights[name], axis_name, exchange)
    mine = like(opening, out) & ongoing
    queries = spec.fast_net.features(static, jnp.where(mine, tokens.q, 0))
    added = dense(queries, ahead) * kept.astype(out.dtype)
    gate = spec.fast_net.gate(static, jnp.where(mine, tokens.q, 0))
    added = added if gate is None else added * gate
    out = out + jnp.where(mine, added, 0)
    return out, state._replace(weights={name: own + whole * ahead})


def run_delta(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    edge: Edge,
    initial: State,
    start: State,
    axis_name: str,
    exchange: Exchange | None,
    implementation: str | None,
) -> tuple[jax.Array, State]:
    """As ``delta.run``: what a shard does to the state at its left edge is a matrix for each head.

    It comes out of a second call without values, from the identity: ``S_end = A S + B`` and
    ``o_t = q_t A_t S + …``. Twice the work, and exact; ``A`` is exchanged along with ``B``.
    """
    name = spec.fast_net.last
    batch, heads, _, width = tokens.k.shape
    ongoing, out, state = _without_left(spec, static, tokens, edge, start, implementation)
    unit = jnp.eye(width, dtype=start.weights[name].dtype)
    unit, nothing = (jnp.broadcast_to(x, (batch, heads, width, width)) for x in (unit, 0 * unit))
    valueless = tokens._replace(v=jnp.zeros_like(tokens.k))
    reads, whole = kernel.run(
        spec,
        static,
        valueless,
        edge.segment_ids,
        start._replace(weights={name: unit}),
        start._replace(weights={name: nothing}),  # later documents do not see what is left of here
        False,
        implementation,
    )
    whole = jnp.where(ongoing, whole.weights[name], 0)
    own = state.weights[name]
    ahead = exclusive_prefix(
        whole, own, initial.weights[name], axis_name, exchange, matrices=True
    )
    out = out + jnp.where(ongoing, dense(reads, ahead), 0)
    return out, state._replace(weights={name: own + matrix_product(whole, ahead)})


def _without_left(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    edge: Edge,
    start: State,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, State]:
    """Runs the shard as if nothing came from the left, so that it waits for no exchange.

    Returns:
      (whether the first document of each row began on another device, [batch, 1, 1, 1]: it starts
      from zero here; outputs; final state).
    """
    name = spec.fast_net.last
    ongoing = jnp.broadcast_to(edge.ongoing, (tokens.k.shape[0], 1))[:, :, None, None]
    first = start._replace(weights={name: jnp.where(ongoing, 0, start.weights[name])})
    out, state = kernel.run(
        spec, static, tokens, edge.segment_ids, first, start, False, implementation
    )
    return ongoing, out, state


def _first_document(
    segment_ids: jax.Array | None, batch: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens of the shard's first document, ``[batch, time]``, and whether there is no other."""
    if segment_ids is None:
        return jnp.ones((batch, length), bool), jnp.ones((batch,), bool)
    valid = segment_ids >= 0
    later = jnp.cumsum(valid & (segment_ids != first_id(segment_ids)[:, None]), 1) > 0
    return valid & ~later, ~later[:, -1]


def _kept(spec: InnerLoop, tokens: Tokens, opening: jax.Array) -> jax.Array:
    """What each token's forgetting leaves of the state at the left edge: ``[b, h, time, 1]``."""
    log_forget = delta.log_forget(spec, tokens)
    if log_forget is None:
        return jnp.ones((*tokens.k.shape[:3], 1), jnp.promote_types(tokens.k.dtype, jnp.float32))
    return jnp.exp(jnp.cumsum(jnp.where(like(opening, log_forget), log_forget, 0), 2))
