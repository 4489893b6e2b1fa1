"""``mode="parallel"``: every chunk at once, where no update depends on the state.

With a frozen kernel ``φ`` and the dot-product loss the chunk gradients ``G_c`` are known before the
loop starts. Momentum ``M_c = β_c M_{c-1} + G_c`` and forgetting ``W_c = f_c W_{c-1} − U_c`` are
then prefixes of an associative operation, and the outputs one batched product (Theorems 5.1-5.3).
Updates of the squared loss are affine in the state and compose, too: ``delta`` and ``affine``.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import affine, delta, recurrent
from ttt_jax.inner_loop.chunks import Chunks
from ttt_jax.inner_loop.fast_nets import Weights, dense, outer_products
from ttt_jax.inner_loop.recurrent import finish, read_base
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Slot, State, shape_update, target

# (decay, values, initial), as for ``prefix``, to what the first slot starts from and the prefix.
Scan = Callable[[jax.Array | None, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

_TRIANGULAR_LIMIT = 128  # chunks up to which a triangular product beats the scan


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
    """
    if spec.chunk_size is None:
        return recurrent.run(spec, static, chunks, initial, start)
    state, outputs, before = initial, None, initial
    if chunks.slots is not None:
        scan = scan or functools.partial(plain_scan, implementation=implementation)
        ahead, states, momenta = all_states(spec, static, chunks.slots, initial, start, scan)
        name = spec.fast_net.last
        weights = {name: states[-1]}
        momentum = None if momenta is None else {name: momenta[-1]}
        state = initial._replace(weights=weights, momentum=momentum)
        before = initial._replace(weights={name: ahead})
        if chunks.reads:
            queries = chunks.slots.q[: chunks.reads]
            gate = spec.fast_net.gate(static, queries)
            outputs = dense(spec.fast_net.features(static, queries), states[: chunks.reads])
            outputs = outputs if gate is None else outputs * gate
    base = read_base(spec, static, chunks, before, start)
    return chunks.collect(base, outputs), finish(chunks, state, start)


def all_states(
    spec: InnerLoop,
    static: Weights,
    slots: Slot,
    initial: State,
    start: State,
    scan: Scan,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Weights of the last layer, and momentum where there is one, after each slot.

    Args:
      spec: an inner loop without ``obstacles``.
      static: matrices that are not trained.
      slots: the stacked chunks.
      initial: the state before the first slot.
      start: the state from which a new document starts.
      scan: the prefix over slots.

    Returns:
      The weights ahead of the first slot, ``[batch, heads, in, out]``, and two arrays
      ``[n, batch, heads, in, out]``; the second is ``None`` without momentum.
    """
    name = spec.fast_net.last
    if not spec.loss.state_free:
        return initial.weights[name], *affine.all_states(spec, static, slots, initial, start)
    update = _known_gradients(spec, static, slots)
    valid, fresh = _rows(slots.valid), _rows(slots.fresh)
    momenta = None
    if valid is not None:
        update = jnp.where(valid, update, 0)
    if spec.steps > 1:
        update = jnp.repeat(update, spec.steps, axis=0)
    if spec.momentum is not None:
        decay = _at_steps(spec, slots.momentum, valid, fresh, first_only=False)
        _, momenta = scan(decay, update, initial.momentum[name])
        update = momenta
    moved = shape_update(spec, update, slots.k.dtype)
    if valid is not None:  # an empty slot moves nothing, though a momentum is there
        moved = jnp.where(jnp.repeat(valid, spec.steps, axis=0), moved, 0)
    forget = _at_steps(spec, slots.forget, valid, fresh, first_only=True)
    if fresh is not None:  # a document starts from the initial weights, forgotten once
        gate = 1 if slots.forget is None else slots.forget
        entry = jnp.where(fresh, gate * start.weights[name], 0)
        by_slot = moved.reshape(-1, spec.steps, *moved.shape[1:])
        first, rest = by_slot[:, :1] + entry[:, None], by_slot[:, 1:]
        moved = jnp.concatenate([first, rest], axis=1).reshape(moved.shape)
    ahead, states = scan(forget, moved, initial.weights[name])
    last = slice(spec.steps - 1, None, spec.steps)
    return ahead, states[last], None if momenta is None else momenta[last]


def _known_gradients(spec: InnerLoop, static: Weights, slots: Slot) -> jax.Array:
    """``G_c`` of each slot, which does not depend on the state: ``[n, batch, heads, in, out]``."""
    keys = spec.fast_net.features(static, slots.k)
    goal, gate = target(spec, slots.k, slots.v), spec.fast_net.gate(static, slots.k)
    error = spec.loss.cotangent(goal, goal)
    error = error if gate is None else error * gate
    gradient = outer_products(keys, error, slots.rates[spec.fast_net.last])
    if spec.loss.reduction == "mean":
        gradient = gradient / slots.count[:, :, None, None, None]
    return gradient


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
    steps = jnp.stack([first] + [later] * (spec.steps - 1), 1)
    return steps.reshape(-1, *gate.shape[1:])


def plain_scan(
    decay: jax.Array | None, values: jax.Array, initial: jax.Array, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """``prefix`` as a ``Scan``: the chunks at hand are all there are."""
    return initial, prefix(decay, values, initial, implementation)


def prefix(
    decay: jax.Array | None,
    values: jax.Array,
    initial: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """All ``S_n = decay_n · S_{n-1} + values_n`` with ``S_{-1} = initial``.

    Args:
      decay: ``[n, batch, heads, 1 or in, 1]``, or ``None`` for 1.
      values: ``[n, batch, heads, in, out]``.
      initial: ``[batch, heads, in, out]``.
      implementation: ``"associative_scan"`` (the definition), ``"triangular"`` (a product with the
        lower-triangular matrix of the decays' products: fewer launches for few chunks), ``None``.

    Returns:
      ``[n, batch, heads, in, out]``.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = jnp.ones((3, 1, 1, 1, 1))
      >>> prefix(0.5 * ones, ones, jnp.zeros((1, 1, 1, 1))).ravel().tolist()
      [1.0, 1.5, 1.75]
    """
    if implementation is None:
        small = values.shape[0] <= _TRIANGULAR_LIMIT
        scalar = decay is None or decay.shape[3] == 1
        implementation = "triangular" if small and scalar else "associative_scan"
    return PREFIXES[implementation](decay, values, initial)


def _associative_prefix(decay, values, initial):
    if decay is None:
        decay = jnp.ones((values.shape[0], 1, 1, 1, 1), values.dtype)
    decay = jnp.broadcast_to(decay, (*values.shape[:3], *decay.shape[3:]))

    def combine(early, late):
        return early[0] * late[0], late[0] * early[1] + late[1]

    values = jnp.concatenate([values[:1] + decay[:1] * initial, values[1:]])
    return jax.lax.associative_scan(combine, (decay, values))[1]


def _triangular_prefix(decay, values, initial):
    number = values.shape[0]
    order = jnp.arange(number)
    if decay is None:
        matrix = jnp.tril(jnp.ones((number, number), values.dtype))
        carried = initial
        equation = "nm,mbhio->nbhio"
    else:
        if decay.shape[3] != 1:
            raise ValueError(
                f"decay has {decay.shape[3]} channels: implementation='triangular' needs one "
                "number a head; use 'associative_scan'"
            )
        # product of decay[m+1 .. n]: a running product down each column, started below the diagonal
        factors = decay[:, None, :, :, 0, 0]
        below = (order[:, None] > order[None, :])[:, :, None, None]
        matrix = jnp.cumprod(jnp.where(below, factors, 1), axis=0)
        matrix = jnp.where((order[:, None] >= order[None, :])[:, :, None, None], matrix, 0)
        carried = jnp.cumprod(decay, axis=0) * initial
        equation = "nmbh,mbhio->nbhio"
    summed = jnp.einsum(equation, matrix, values, precision=jax.lax.Precision.HIGHEST)
    return summed + carried


PREFIXES: dict[str, Callable] = {
    "associative_scan": _associative_prefix,
    "triangular": _triangular_prefix,
}
