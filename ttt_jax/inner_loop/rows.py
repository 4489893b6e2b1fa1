"""Whole rows at once, as they come: ``[batch, time, heads, channels]``, nothing turned or copied.

The parallel form of "apply then update" for rows that are one document from its start: each chunk's
gradient is a product of its tokens (``chunk_summaries``), the weights are prefixes over chunks, and
each token is read through the weights of its chunk (``chunk_outputs``). Theorems 5.1 to 5.3.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import parallel
from ttt_jax.inner_loop.backends import backend_of
from ttt_jax.inner_loop.chunks import head_major, pack_buffer
from ttt_jax.inner_loop.fast_nets import SwiGLU, Weights
from ttt_jax.inner_loop.prefix import scan_of
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_kernels.chunk_products import chunk_outputs, chunk_summaries
from ttt_kernels.fast_weight import fast_weight_hidden


def fits(spec: InnerLoop, backend: str | None) -> bool:
    """Whether rows without documents and carried tokens run here.

    Not LaCT's network by the kernels of TPUs, which fuse it with its products in head-major arrays.
    """
    by_chunk = (spec.order, spec.window, spec.erase) == ("apply_then_update", None, None)
    known = spec.loss.state_free and spec.static_features
    fused = backend == "mosaic_tpu" and type(spec.fast_net) is SwiGLU
    whole = spec.chunk_size is None
    return by_chunk and known and not whole and not parallel.obstacles(spec) and not fused


def run(
    spec: InnerLoop,
    static: Weights,
    tokens: dict[str, jax.Array | None],
    start: State,
    implementation: str | None,
    backend: str | None,
) -> tuple[jax.Array, State]:
    """As ``parallel.run``, for a specification that ``fits``.

    Args:
      spec: the inner loop.
      static: matrices that are not trained.
      tokens: ``q``, ``k``, ``v`` and the gates as ``ttt`` takes them.
      start: the state before the first token.
      implementation: of the prefix over chunks.
      backend: of the operations of ``ttt_kernels``.

    Returns:
      Outputs ``[batch, time, heads, value_dim]``, and the state.
    """
    chunk, time = spec.chunk_size, tokens["k"].shape[1]
    full, rest = divmod(time, chunk)
    name, dtype = spec.fast_net.last, tokens["k"].dtype
    products = backend_of("chunk_products", backend)
    state, before = start, start.weights[name][:, :, None]
    if full:
        done = _cut(tokens, 0, full * chunk)
        keys, rates = _rated_features(spec, static, done["k"], _rates(spec, done["lr"]), backend)
        values = _values(spec, static, done)
        descents = chunk_summaries(
            keys, values, chunk, rates=rates, dtype=_summary_dtype(spec, dtype),
            implementation=products,
        )
        if spec.loss.reduction == "mean":
            descents = descents / chunk
        gates = parallel.Gates(
            _chunk_means(spec.momentum, done["momentum"], start, full),
            _chunk_means(spec.forget, done["forget"], start, full),
        )
        scan = scan_of(dtype, implementation, backend)
        found = parallel.accumulate(
            spec, descents, gates, dtype, start, start, scan, backend, ahead=True
        )
        state, before = found.final, found.weights
        if rest:
            before = jnp.concatenate([before, state.weights[name][:, :, None]], 2)
    queries, _ = _rated_features(spec, static, tokens["q"], None, backend)
    out = chunk_outputs(queries, before, chunk, implementation=products)
    gate = _by_head(lambda x: spec.fast_net.gate(static, x), tokens["q"])
    unfinished = head_major(**_cut(tokens, full * chunk, time))
    count = jnp.full((out.shape[0],), rest, jnp.int32)
    state = state._replace(buffer=pack_buffer(unfinished, chunk, count))
    return out if gate is None else out * gate, state


def _summary_dtype(spec: InnerLoop, token_dtype: jnp.dtype) -> jnp.dtype | None:
    """That in which the sums are read: the tokens', or Newton-Schulz's; ``None`` is float32.

    Momentum and weights are float32 sums of them, whose error is then one rounding of each sum.
    """
    if spec.clip or spec.loss.reduction == "mean":  # what divides them comes first
        return None
    muon = spec.orthogonalise
    return jnp.dtype(muon.dtype if muon is not None and muon.dtype else token_dtype)


def _cut(tokens, begin: int, end: int) -> dict[str, jax.Array | None]:
    return jax.tree.map(lambda x: x[:, begin:end], tokens)


def _by_head(function, x: jax.Array) -> jax.Array | None:
    """A function of head-major tokens on ``[batch, time, heads, channels]``."""
    turned = jnp.swapaxes(x, 1, 2)
    found = function(turned)
    if found is None or found is turned:
        return None if found is None else x
    return jnp.swapaxes(found, 1, 2)


def _rated_features(
    spec: InnerLoop,
    static: Weights,
    x: jax.Array,
    rate: jax.Array | float | None,
    backend: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """``rate φ(x)`` for a rate of ``[batch, time, heads, 1 or channels]``, a number or none.

    The second result is what ``chunk_summaries`` is left to multiply with: ``[batch, time, heads]``
    or ``None``.
    """
    by_token = rate is not None and jnp.shape(rate)[3:] == (1,)
    if type(spec.fast_net) is SwiGLU and (by_token or rate is None or jnp.ndim(rate) == 0):
        rates = None if rate is None else jnp.broadcast_to(rate, (*x.shape[:3], 1))[..., 0]
        weights = {n: w.reshape(-1, *w.shape[-3:]) for n, w in static.items()}
        backend = backend_of("fast_weight_hidden", backend)
        return fast_weight_hidden(weights, x, rates, implementation=backend), None
    found = _by_head(lambda x: spec.fast_net.features(static, x), x)
    if rate is None or by_token:
        return found, None if rate is None else rate[..., 0]
    return (found * rate).astype(found.dtype), None


def _rates(spec: InnerLoop, lr: jax.Array | None):
    """Rates of the one trained matrix, ``[batch, time, heads, 1 or channels]``; ``None`` for 1."""
    if spec.rate == "per_token":
        rate = lr if lr.ndim == 3 else lr[:, :, :, 0]
        return rate if rate.ndim == 4 else rate[..., None]
    constant = spec.rate[0] if isinstance(spec.rate, tuple) else spec.rate
    return None if constant == 1 else constant


def _values(spec: InnerLoop, static: Weights, tokens) -> jax.Array:
    """What the last layer learns of each token: ``v̂``."""
    k, v = tokens["k"], tokens["v"]
    goal = v - k if spec.target == "value_minus_key" else v
    values = spec.loss.descent(goal)
    gate = _by_head(lambda x: spec.fast_net.gate(static, x), k)
    return values if gate is None else values * gate


def _chunk_means(gate, by_token: jax.Array | None, start: State, chunks: int) -> jax.Array | None:
    """A gate of each chunk, its mean over the tokens: ``[batch, heads, chunks, 1 or in, 1]``."""
    if gate is None:
        return None
    weight = next(iter(start.weights.values()))
    if gate != "per_token":
        by_head = jnp.reshape(jnp.asarray(gate, weight.dtype), (1, -1, 1, 1, 1))
        return jnp.broadcast_to(by_head, (*weight.shape[:2], chunks, 1, 1))
    x = by_token[..., None] if by_token.ndim == 3 else by_token
    x = x.astype(weight.dtype).reshape(x.shape[0], chunks, -1, *x.shape[2:])
    return jnp.moveaxis(jnp.mean(x, 2), 1, 2)[..., None]
