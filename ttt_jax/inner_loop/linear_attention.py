"""The theorems as code: an inner loop rewritten as the linear attention that it is.

``o_t = q̂_t (A S₀ D + Σ_i A_i k̂_iᵀ v̂_i D_i)``: queries and keys are the features of the fast network
at the moments when they are read and learnt, values are what the inner loss asks for, momentum
repeats them, Newton-Schulz multiplies them by a matrix ``P`` (``NS(G) = G P(GᵀG)``), forgetting and
weight norm are factors on either side of the state. Nothing here calls the inner loop's own output.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.checks import check_arguments
from ttt_jax.inner_loop.chunks import Tokens, arrange, head_major, stack_slots
from ttt_jax.inner_loop.fast_nets import OuterProductNet, Weights
from ttt_jax.inner_loop.linear_form import LinearAttentionForm
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import (
    Slot,
    State,
    column_norm,
    initial_state,
    inner_step,
    learning_weights,
    shape_update,
    target,
)


class NotReducibleError(ValueError):
    """The inner loop is not a linear attention; the message names the part that stands in the way.

    Example:
      >>> issubclass(NotReducibleError, ValueError)
      True
    """


def obstacles(spec: InnerLoop) -> list[str]:
    """Why ``spec`` is not a linear attention: one sentence a part, or nothing."""
    net = spec.fast_net
    if net.last is None and getattr(net, "residual_norm", False):
        return [
            f"fast_net={net!r} has a norm after its last layer (output x + LN(z)), so the output "
            "is not a product of features with a state"
        ]
    if net.last is None:
        return [
            f"fast_net={type(net).__name__} has no linear, bias-free last layer, so its output is "
            "not a product of features with a state"
        ]
    if spec.order == "token_causal" and not spec.static_features:
        return [
            "order='token_causal' with a trained kernel gives every token its own features of "
            "every key; use update='last_layer'"
        ]
    return []


def linear_attention_form(
    spec: InnerLoop,
    weights: Weights,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    lr: jax.Array | None = None,
    momentum: jax.Array | None = None,
    forget: jax.Array | None = None,
    erase: tuple[jax.Array, jax.Array] | None = None,
) -> LinearAttentionForm:
    """Rewrites ``ttt(spec, weights, q, k, v, ...)`` on one document as a linear attention.

    Exact for one and several inner steps, static and trained kernels (Theorems 5.1 and 5.2),
    momentum (5.3), Newton-Schulz, weight norm, forgetting, ascent and Q replaced by K. The arrays
    grow with ``updates²``: a tool to look at short sequences, not a way to run long ones.

    Args:
      spec: the inner loop.
      weights: initial fast weights, as for ``ttt``.
      q: ``[batch, time, heads, key_dim]``.
      k: like ``q``.
      v: ``[batch, time, heads, value_dim]``.
      lr: as for ``ttt``.
      momentum: as for ``ttt``.
      forget: as for ``ttt``.
      erase: as for ``ttt``.

    Returns:
      A ``LinearAttentionForm`` with ``form.apply()`` equal to ``ttt``'s output.

    Raises:
      NotReducibleError: the output is not a product of features with a state.
      ValueError: an argument does not fit.

    Source: the paper's Theorems 5.1-5.3; Newton-Schulz and weight norm: this project.

    Example:
      >>> import jax, ttt_jax
      >>> spec = ttt_jax.presets.lact_llm(variant=6, chunk_size=2)
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 1, 4))
      >>> weights = spec.init(jax.random.key(1), heads=1, key_dim=4)
      >>> form = linear_attention_form(spec, weights, q, k, v)
      >>> form.reads.tolist(), form.scores().shape
      ([0, 0, 1, 1, 2], (1, 1, 5, 4))
    """
    check_arguments(spec, weights, q, k, v, lr, momentum, forget, None, None, erase)
    found = obstacles(spec)
    if found:
        raise NotReducibleError("; ".join(found))
    tokens = head_major(q, k, v, lr, momentum, forget, erase)
    if spec.query == "key":
        tokens = tokens._replace(q=tokens.k)
    static = {name: w for name, w in weights.items() if name not in spec.trained}
    start = initial_state(spec, weights, k.shape[0])
    walk = _by_chunks if isinstance(spec.order, str) else _by_spans
    queries, events, token_of, reads = walk(spec, static, tokens, start)
    S0 = start.weights[spec.fast_net.last]
    return _assemble(spec, queries, events, token_of, reads, S0)


@dataclasses.dataclass(frozen=True)
class _Event:
    """One inner step of one update; head-major."""

    k_hat: jax.Array  # [batch, heads, tokens, features]
    error: jax.Array  # [batch, heads, tokens, value_dim]: the sign of the update is in it
    momentum: jax.Array | None  # [batch, heads, 1, 1]
    polynomial: jax.Array | None  # P, [batch, heads, value_dim, value_dim]
    forget: jax.Array | None  # [batch, heads, 1 or features]
    norm: jax.Array | None  # [batch, heads, value_dim]


jax.tree_util.register_dataclass(
    _Event, [field.name for field in dataclasses.fields(_Event)], meta_fields=[]
)


def _observe(
    spec: InnerLoop, static: Weights, start: State, state: State, slot: Slot
) -> tuple[State, list[_Event]]:
    """The state after a slot's inner steps, and each step seen as a linear attention's update."""
    name, events = spec.fast_net.last, []
    for index in range(spec.steps):
        forget = slot.forget if index == 0 else None
        learnt_at = start if spec.gradient_at == "start" else state
        weights = {**static, **learning_weights(spec, learnt_at, forget)}
        k_hat, error = _sources(spec, weights, slot)
        if slot.erase is not None:
            read, write = slot.erase
            k_hat = jnp.concatenate([k_hat, write], 2)
            error = jnp.concatenate([error, -(read @ state.weights[name])], 2)
        new = inner_step(spec, static, state, slot, forget, learnt_at)
        total = jnp.einsum("bhtf,bhtv->bhfv", k_hat, error)
        if spec.momentum is not None:
            total = slot.momentum * state.momentum[name] + total
        norm = None
        if spec.weight_norm is not None:
            base = (state.weights if state.main is None else state.main)[name]
            moved = base if forget is None else forget * base
            moved = moved + shape_update(spec, total, slot.k.dtype)
            norm = state.norms[name] / (column_norm(moved) + spec.weight_norm.eps)
            norm = norm[:, :, 0]
        sign = 1 if spec.direction == "ascent" else -1
        kept = None if slot.forget is None else jnp.ones_like(slot.forget[..., 0])
        kept = forget[..., 0] if forget is not None else kept
        polynomial = _value_side(spec, total)
        events.append(_Event(k_hat, sign * error, slot.momentum, polynomial, kept, norm))
        state = new
    return state, events


def _sources(spec: InnerLoop, weights: Weights, slot: Slot) -> tuple[jax.Array, jax.Array]:
    """``k̂`` and ``∂L/∂(φ W)`` of the last layer, from the weights at which the step learns."""
    net, name = spec.fast_net, spec.fast_net.last
    goal = target(spec, slot.k, slot.v)

    def cotangent(prediction):
        return spec.loss.cotangent(prediction, goal)

    if isinstance(net, OuterProductNet):
        left, right = net.factors(weights, slot.k, cotangent)[name]
    else:
        left, right = net.features(weights, slot.k), cotangent(net.apply(weights, slot.k))
        gate = net.gate(weights, slot.k)
        right = right if gate is None else right * gate
    rate = slot.rates[name]
    left = left if rate is None else left * rate
    if spec.loss.reduction == "mean":
        right = right / slot.count[:, None, None, None]
    return left, right


def _read(spec: InnerLoop, static: Weights, state: State, queries: jax.Array):
    """``φ(q)`` and the output gate at the weights of ``state``."""
    weights = {**static, **state.weights}
    return spec.fast_net.features(weights, queries), spec.fast_net.gate(weights, queries)


def _value_side(spec: InnerLoop, total: jax.Array) -> jax.Array | None:
    """The matrix by which clip and Newton-Schulz multiply an update from the right."""
    result = None
    if spec.clip:
        result = jnp.eye(total.shape[-1], dtype=total.dtype) / (column_norm(total) + 1)
        total = total @ result
    if spec.orthogonalise is not None:
        muon = spec.orthogonalise
        polynomial = _polynomial(total, muon.coefficients, muon.eps)
        result = polynomial if result is None else result @ polynomial
    return result


def _polynomial(matrix: jax.Array, coefficients, eps: float) -> jax.Array:
    """``P`` with ``NS(G) = G P``: the iteration applied to the value side only."""
    size = matrix.shape[-1]
    identity = jnp.eye(size, dtype=matrix.dtype)
    squares = jnp.sum(matrix * matrix, (-2, -1), keepdims=True)
    result = identity / (jnp.sqrt(squares) + eps)
    for a, b, c in coefficients:
        x = matrix @ result
        gram = x.mT @ x
        result = result @ (a * identity + b * gram + c * gram @ gram)
    return result


# Else every call outside of a `jax.jit` would trace and compile the scan anew.
@functools.partial(jax.jit, static_argnames="spec", inline=True)
def _scan(spec: InnerLoop, static: Weights, start: State, slots: Slot):
    """The events of each slot, stacked, and what its queries read afterwards."""

    def visit(state, slot):
        state, events = _observe(spec, static, start, state, slot)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *events)
        return state, (stacked, _read(spec, static, state, slot.q))

    return jax.lax.scan(visit, start, slots)[1]


def _by_chunks(spec: InnerLoop, static: Weights, tokens: Tokens, start: State):
    """Chunks of a named order: a scan over the slots of the inner loop's own arrangement."""
    time, chunk = tokens.k.shape[2], spec.chunk_size or tokens.k.shape[2]
    chunks = arrange(spec, tokens, None, None, False)
    token = jnp.arange(time)
    inclusive = spec.order == "update_then_apply"
    reads = (token // chunk + inclusive) * spec.steps

    def collect(first, later):
        if first is None and later is None:
            return None
        return chunks.collect(first, None if later is None else later[: chunks.reads])

    base = (None, None) if chunks.base is None else _read(spec, static, start, chunks.base)
    if chunks.slots is None:
        return tuple(map(collect, base, (None, None))), None, token[:0], reads * 0
    events, outputs = _scan(spec, static, start, chunks.slots)
    outputs = outputs if chunks.reads else (None, None)
    events = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), events)
    end = (jnp.repeat(jnp.arange(chunks.slots.k.shape[0]), spec.steps) + 1) * chunk
    width = chunks.slots.k.shape[3]  # more than the chunk where a window looks back
    token_of = jnp.clip(end[:, None] - width + jnp.arange(width), 0, time - 1)
    return tuple(map(collect, base, outputs)), events, _twice(spec, token_of), reads


def _by_spans(spec: InnerLoop, static: Weights, tokens: Tokens, start: State):
    """An explicit order: a loop over its spans; shorter updates are padded with zero sources."""
    longest = max([s.end - s.start for s in spec.order if s.update], default=0)
    state, events, token_of, done = start, [], [], 0
    reads = jnp.zeros((tokens.k.shape[2],), jnp.int32)
    queries = jax.tree.map(jnp.zeros_like, _read(spec, static, start, tokens.q))
    for span in spec.order:
        part = jax.tree.map(lambda x, s=span: x[:, :, s.start : s.end], tokens)
        if span.update:
            stacked = stack_slots(spec, part, span.end - span.start, None)
            slot = jax.tree.map(lambda x: x[0], stacked)
            state, found = _observe(spec, static, start, state, slot)
            pad = [(0, 0), (0, 0), (0, longest - (span.end - span.start)), (0, 0)]
            for event in found:
                padded = jnp.pad(event.k_hat, pad), jnp.pad(event.error, pad)
                events.append(dataclasses.replace(event, k_hat=padded[0], error=padded[1]))
                token_of.append(jnp.minimum(span.start + jnp.arange(longest), span.end - 1))
            done += len(found)
        if span.apply:
            queries = jax.tree.map(
                lambda whole, some, s=span: whole.at[:, :, s.start : s.end].set(some),
                queries,
                _read(spec, static, state, part.q),
            )
            reads = reads.at[span.start : span.end].set(done)
    if not events:
        return queries, None, jnp.zeros((0,), int), reads
    recorded = jax.tree.map(lambda *leaves: jnp.stack(leaves), *events)
    return queries, recorded, jnp.stack(token_of), reads


def _twice(spec: InnerLoop, token_of: jax.Array) -> jax.Array:
    """With erase keys each token is two sources: its value, and what it reads and takes away."""
    return token_of if spec.erase is None else jnp.concatenate([token_of, token_of], 1)


def _assemble(spec, queries, events: _Event | None, token_of, reads, S0) -> LinearAttentionForm:
    """From recorded events ``[updates, batch, heads, ...]`` to the arrays of the form."""
    q_hat, gate = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), queries)
    batch, _, heads, features = q_hat.shape
    shared = {"q_hat": q_hat, "S0": S0, "gate": gate, "static_kernel": spec.static_features}
    if events is None:
        empty = jnp.zeros((batch, 0, heads, features), q_hat.dtype)
        values = jnp.zeros((batch, 1, 0, heads, S0.shape[-1]), q_hat.dtype)
        index = jnp.zeros((0,), int)
        return LinearAttentionForm(
            k_hat=empty, v_hat=values, A=None, D=None, reads=reads, update_of=index,
            token_of=index, updates=0, **shared,
        )
    updates, tokens = token_of.shape
    update_of = jnp.repeat(jnp.arange(updates), tokens)
    polynomial = events.polynomial
    if spec.momentum is None:  # each source counts in its own update
        values = events.error if polynomial is None else events.error @ polynomial
        values = _flatten(values)[:, None]
    else:  # and decays through the later ones
        gates = jnp.broadcast_to(events.momentum[..., 0, 0], (updates, batch, heads))
        repeated = _running_products(gates[..., None])[1:, 1:, ..., 0]  # [later, own, batch, heads]
        mixed = events.error[None]
        if polynomial is not None:
            mixed = mixed @ polynomial[:, None]
        mixed = mixed * repeated[..., None, None]
        values = jax.vmap(_flatten, out_axes=1)(mixed)
    A = None if events.forget is None else _running_products(events.forget)
    D = None
    if spec.weight_norm is not None and spec.weight_norm.form == "post":
        D = _running_products(events.norm, own=True)
    elif spec.weight_norm is not None:  # normalised for reading only: the last norm counts
        last = jnp.concatenate([jnp.ones_like(events.norm[:1]), events.norm])
        D = jnp.broadcast_to(last[:, None], (updates + 1, updates + 1, *last.shape[1:]))
    return LinearAttentionForm(
        k_hat=_flatten(events.k_hat), v_hat=values, A=A, D=D, reads=reads,
        update_of=update_of, token_of=token_of.reshape(-1), updates=updates, **shared,
    )


def _flatten(x: jax.Array) -> jax.Array:
    """``[updates, batch, heads, tokens, d]`` to ``[batch, sources, heads, d]``."""
    x = jnp.moveaxis(x, (1, 2), (0, 3))  # [batch, updates, tokens, heads, d]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _running_products(factors: jax.Array, own: bool = False) -> jax.Array:
    """``Π factors[s]`` for ``s`` from ``u`` (``own``: and from ``u - 1``) to ``n``, 0 above.

    ``[updates, batch, heads, d]`` to ``[updates + 1, updates + 1, batch, heads, d]``; index ``u``
    of the second axis is update ``u - 1``, and 0 the initial state.
    """
    updates = factors.shape[0]
    steps = jnp.concatenate([jnp.ones_like(factors[:1]), factors])
    number = jnp.arange(updates + 1)
    later = number[:, None] >= number if own else number[:, None] > number
    later = later[:, :, None, None, None]
    products = jnp.cumprod(jnp.where(later, steps[:, None], 1), 0)
    return jnp.where((number[:, None] >= number)[:, :, None, None, None], products, 0)
