"""``mode="parallel"``: every chunk at once, where no update depends on the state.

With a frozen kernel ``φ`` and the dot-product loss the chunk gradients ``G_c`` are known before the
loop starts. Momentum ``M_c = β_c M_{c-1} + G_c`` and forgetting ``W_c = f_c W_{c-1} − U_c`` are
then prefixes of an associative operation, and the outputs one batched product (Theorems 5.1-5.3).
Updates of the squared loss are affine in the state and compose, too: ``delta`` and ``affine``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import affine, delta, recurrent
from ttt_jax.inner_loop.backends import backend_of
from ttt_jax.inner_loop.chunks import Chunks
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.prefix import Scan, scan_of
from ttt_jax.inner_loop.recurrent import finish, read_base
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import (
    Slot,
    State,
    chunk_gradients,
    has_operations,
    predict,
    shaped,
    target,
)
from ttt_kernels.chunk_products import chunk_outputs, chunk_summaries


def obstacles(spec: InnerLoop) -> list[str]:
    """Why the chunks of ``spec`` cannot be evaluated at once: one sentence a field, or nothing."""
    if not delta.obstacles(spec) or _one_update(spec) or not affine.obstacles(spec):
        return []
    found = []
    if spec.order == "token_causal":
        found.append("order='token_causal' is parallel inside a chunk only; use 'recurrent'")
    if not spec.loss.state_free:
        found.append(
            f"loss={type(spec.loss).__name__}: its gradient depends on the prediction, so on the "
            "state; use losses.DotProduct(), or what an affine scan needs ("
            f"{'; '.join(affine.obstacles(spec))})"
        )
    if not spec.static_features:
        moving = [name for name in spec.trained if name != spec.fast_net.last]
        where = f"trains {', '.join(moving)} inside the kernel φ" if moving else "has no last layer"
        found.append(
            f"update={spec.update!r}: {type(spec.fast_net).__name__} {where}, so φ changes from "
            "chunk to chunk; use update='last_layer' or fast_nets.Linear()"
        )
    if spec.erase is not None:
        found.append("erase reads the state; use erase=None")
    if spec.weight_norm is not None:
        found.append("weight_norm divides by the norm of the state; use weight_norm=None")
    if found and not isinstance(spec.order, str):
        number = sum(span.update for span in spec.order)
        found.append(f"order has {number} updates, each from the state of the one before; use one")
    return found


def is_dear(spec: InnerLoop) -> bool:
    """Whether the affine scan is the only way to run ``spec`` in parallel: exact, ``O(d³)``."""
    known = spec.loss.state_free or _one_update(spec)
    return not known and bool(delta.obstacles(spec)) and not affine.obstacles(spec)


def _one_update(spec: InnerLoop) -> bool:
    """Whether a document has one update at most, of all its tokens: nothing is left to order."""
    if isinstance(spec.order, str):
        return spec.chunk_size is None
    return sum(span.update for span in spec.order) <= 1


def run(
    spec: InnerLoop,
    static: Weights,
    chunks: Chunks,
    initial: State,
    start: State,
    implementation: str | None = None,
    scan: Scan | None = None,
    backend: str | None = "xla",
) -> tuple[jax.Array, State]:
    """As ``recurrent.run``, for a specification without ``obstacles``.

    Args:
      spec: the inner loop.
      static: matrices that are not trained.
      chunks: the arranged tokens.
      initial: the state before the first chunk, without its buffer.
      start: the state from which a new document starts.
      implementation: of the prefix over chunks: ``"associative_scan"``, ``"triangular"``, or
        ``None`` for the faster one.
      scan: the prefix itself, where it is not ``prefix`` of the chunks at hand: see ``Scan``.
      backend: of the operations of ``ttt_kernels``; ``None`` lets each of them pick.
    """
    if spec.chunk_size is None:
        return recurrent.run(spec, static, chunks, initial, start, backend)
    state, outputs, before = initial, None, initial
    if chunks.slots is not None:
        scan = scan or scan_of(chunks.slots.k.dtype, implementation, backend)
        found = all_states(spec, static, chunks.slots, initial, start, scan, backend)
        state, before = found.final, initial._replace(weights={spec.fast_net.last: found.ahead})
        if chunks.reads:
            read = found.weights[: chunks.reads]
            outputs = _outputs(spec, static, read, chunks.slots.q[: chunks.reads], backend)
    base = read_base(spec, static, chunks, before, start, backend)
    return chunks.collect(base, outputs), finish(chunks, state, start)


class States(NamedTuple):
    """What the updates of all chunks lead to."""

    ahead: jax.Array  # weights that the first slot starts from, [batch, heads, in, out]
    weights: jax.Array  # of the last layer after each slot (or ahead), [n, batch, heads, in, out]
    momenta: jax.Array | None  # likewise, where there is momentum
    final: State  # after the last slot, without buffer


def all_states(
    spec: InnerLoop,
    static: Weights,
    slots: Slot,
    initial: State,
    start: State,
    scan: Scan,
    backend: str | None = "xla",
) -> States:
    """Weights of the last layer, and momentum where there is one, after each slot.

    Args:
      spec: an inner loop without ``obstacles``.
      static: matrices that are not trained.
      slots: the stacked chunks.
      initial: the state before the first slot.
      start: the state from which a new document starts.
      scan: the prefix over slots.
      backend: of the operations of ``ttt_kernels``.
    """
    name = spec.fast_net.last
    if not spec.loss.state_free:
        weights, momenta = affine.all_states(spec, static, slots, initial, start)
        momentum = None if momenta is None else {name: momenta[-1]}
        final = initial._replace(weights={name: weights[-1]}, momentum=momentum)
        return States(initial.weights[name], weights, momenta, final)
    gradients = _known_gradients(spec, {**static, name: start.weights[name]}, slots, backend)
    by_slot = [slots.momentum, slots.forget, _rows(slots.valid), _rows(slots.fresh)]
    gates = Gates(*(None if x is None else jnp.moveaxis(x, 0, 2) for x in by_slot))
    descents = jnp.moveaxis(-gradients, 0, 2)
    found = accumulate(
        spec, descents, gates, slots.k.dtype, initial, start, scan, backend=backend
    )
    first = [None if x is None else jnp.moveaxis(x, 2, 0) for x in (found.weights, found.momenta)]
    return States(found.ahead, *first, found.final)


def _known_gradients(
    spec: InnerLoop, weights: Weights, slots: Slot, backend: str | None
) -> jax.Array:
    """``G_c`` of each slot, which does not depend on the state: ``[n, batch, heads, in, out]``."""
    name, rate = spec.fast_net.last, slots.rates[spec.fast_net.last]
    if has_operations(spec, weights, slots):
        return chunk_gradients(spec, weights, slots, backend)[name]
    keys, values = spec.fast_net.features(weights, slots.k), values_of(spec, weights, slots)
    rates = None
    if rate is not None and rate.shape[-1] == 1:
        rates = _one_chunk_a_row(jnp.broadcast_to(rate, (*keys.shape[:-1], 1)))[..., 0]
    elif rate is not None:
        keys = (keys * rate).astype(keys.dtype)
    keys, values = _one_chunk_a_row(keys), _one_chunk_a_row(values)
    backend = backend_of("chunk_products", backend)
    sums = chunk_summaries(keys, values, keys.shape[1], rates=rates, implementation=backend)
    gradient = -sums.reshape(*slots.k.shape[:3], *sums.shape[-2:])
    if spec.loss.reduction == "mean":
        gradient = gradient / slots.count[:, :, None, None, None]
    return gradient


def _outputs(
    spec: InnerLoop, static: Weights, states: jax.Array, q: jax.Array, backend: str | None
) -> jax.Array:
    """What the queries of each slot, ``[n, batch, heads, reads, key_dim]``, read from its state."""
    weights = {**static, spec.fast_net.last: states}
    if has_operations(spec, weights):
        return predict(spec, weights, q, backend)
    gate = spec.fast_net.gate(static, q)
    queries = _one_chunk_a_row(spec.fast_net.features(static, q))
    states = states.reshape(-1, 1, 1, *states.shape[-2:])
    backend = backend_of("chunk_products", backend)
    out = chunk_outputs(queries, states, queries.shape[1], implementation=backend)
    out = out.reshape(*q.shape[:-1], out.shape[-1])
    return out if gate is None else out * gate


def _one_chunk_a_row(x: jax.Array) -> jax.Array:
    """``[n, batch, heads, tokens, channels]`` as token-major rows of one chunk and one head."""
    return x.reshape(-1, x.shape[-2], 1, x.shape[-1])


def values_of(spec: InnerLoop, weights: Weights, tokens) -> jax.Array:
    """``v̂ = −∂L/∂f`` of each token, times the network's gate: what the last layer learns."""
    goal, gate = target(spec, tokens.k, tokens.v), spec.fast_net.gate(weights, tokens.k)
    values = spec.loss.descent(goal)
    return values if gate is None else values * gate


class Gates(NamedTuple):
    """What each chunk does with what it starts from; ``None``: not used."""

    momentum: jax.Array | None = None  # [batch, heads, n, 1, 1]
    forget: jax.Array | None = None  # [batch, heads, n, 1 or in, 1]
    valid: jax.Array | None = None  # [batch, 1, n, 1, 1] bool: there is a chunk
    fresh: jax.Array | None = None  # [batch, 1, n, 1, 1] bool: it is the first of its document


def accumulate(
    spec: InnerLoop,
    descents: jax.Array,
    gates: Gates,
    token_dtype: jnp.dtype,
    initial: State,
    start: State,
    scan: Scan,
    backend: str | None = "xla",
    ahead: bool = False,
) -> States:
    """Momentum, shape and sum of known gradients: ``M_c = β_c M_{c-1} + G_c`` and so on.

    Args:
      spec: an inner loop without ``obstacles``.
      descents: ``-G_c``, ``[batch, heads, n, in, out]``.
      gates: of the chunks.
      token_dtype: of the tokens.
      initial: the state before the first chunk.
      start: the state from which a new document starts.
      scan: the prefix over chunks.
      backend: of the operations of ``ttt_kernels``.
      ahead: give the weights ahead of each chunk, not those after it.

    Returns:
      ``States``, with chunks on axis 2: ``[batch, heads, n, in, out]``.
    """
    name, (momentum_gate, forget, valid, fresh) = spec.fast_net.last, gates
    momenta = final_momentum = None
    update = descents if valid is None else jnp.where(valid, descents, 0)
    if spec.steps > 1:
        update = jnp.repeat(update, spec.steps, axis=2)
    if spec.momentum is not None:
        decay = _at_steps(spec, momentum_gate, valid, fresh, first_only=False)
        _, update, last = scan(decay, update, -initial.momentum[name], False)
        momenta, final_momentum = -update, {name: -last}
    moved = shaped(spec, update, token_dtype, backend)
    if spec.direction == "ascent":
        moved = -moved
    if valid is not None:  # an empty slot moves nothing, though a momentum is there
        moved = jnp.where(jnp.repeat(valid, spec.steps, axis=2), moved, 0)
    decay = _at_steps(spec, forget, valid, fresh, first_only=True)
    if fresh is not None:  # a document starts from the initial weights, forgotten once
        gate = 1 if forget is None else forget
        entry = jnp.where(fresh, gate * start.weights[name][:, :, None], 0)
        by_slot = moved.reshape(*entry.shape[:3], spec.steps, *moved.shape[3:])
        first, rest = by_slot[:, :, :, :1] + entry[:, :, :, None], by_slot[:, :, :, 1:]
        moved = jnp.concatenate([first, rest], axis=3).reshape(moved.shape)
    begin, weights, last = scan(decay, moved, initial.weights[name], ahead)
    final = initial._replace(weights={name: last}, momentum=final_momentum)
    first, end = slice(None, None, spec.steps), slice(spec.steps - 1, None, spec.steps)
    momenta = None if momenta is None else momenta[:, :, end]
    return States(begin, weights[:, :, first if ahead else end], momenta, final)


def _rows(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, :, None, None, None]


def _at_steps(
    spec: InnerLoop,
    gate: jax.Array | None,
    valid: jax.Array | None,
    fresh: jax.Array | None,
    first_only: bool,
) -> jax.Array | None:
    """The factor of the carried value at each inner step: 1 on empty slots, 0 at a new document."""
    if gate is None and fresh is None:
        return None
    shape = fresh.shape if gate is None else gate.shape
    dtype = jnp.float32 if gate is None else gate.dtype
    gate = jnp.ones(shape, dtype) if gate is None else gate
    later = jnp.ones_like(gate) if first_only else gate
    first = gate
    if fresh is not None:
        first = jnp.where(fresh, 0, first)
    if valid is not None:
        first, later = jnp.where(valid, first, 1), jnp.where(valid, later, 1)
    steps = jnp.stack([first] + [later] * (spec.steps - 1), 3)
    return steps.reshape(*gate.shape[:2], -1, *gate.shape[3:])
