"""One update of the fast weights from one chunk, as pure functions on pytrees.

The lines of ``spec.InnerLoop``'s table, each a small function. Token arrays are head-major,
``[batch, heads, tokens, channels]``; weights are ``[batch, heads, in, out]``. ``backend`` is the
implementation of the operations of ``ttt_kernels``: ``"xla"`` (any device), the name of one with
kernels, or ``None``, with which each operation picks its fastest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.backends import backend_of
from ttt_jax.inner_loop.fast_nets import SwiGLU, Weights, dense, outer_products
from ttt_jax.inner_loop.spec import InnerLoop, WeightNorm
from ttt_kernels import compat
from ttt_kernels.fast_weight import fast_weight_apply, fast_weight_gradients
from ttt_kernels.newton_schulz import newton_schulz

# Columns of so many rows are summed up in so many pieces by a GPU.
_LONG, _PIECES = 512, 16


class Buffer(NamedTuple):
    """The tokens of the unfinished chunk, ``count`` of them at the front of each row.

    With ``window`` the tokens before it that later updates still read are in front of it. ``None``
    where the specification does not use a field.

    Attributes:
      k: keys, ``[batch, heads, room, key_dim]``.
      v: values, ``[batch, heads, room, value_dim]``.
      lr: ``[batch, heads, room, R]`` or ``[batch, heads, room, R, channels]``.
      momentum: ``[batch, heads, room, 1]``.
      forget: ``[batch, heads, room, 1 or key_dim]``.
      count: ``[batch]``, int32.
    """

    k: jax.Array
    v: jax.Array
    lr: jax.Array | None
    momentum: jax.Array | None
    forget: jax.Array | None
    count: jax.Array


class State(NamedTuple):
    """All that an inner loop carries from token to token; float32 (float64 in float64).

    Attributes:
      weights: the trained matrices in use, name to ``[batch, heads, in, out]``.
      main: un-normalised copies of them (weight norm of the form "pre"), or ``None``.
      momentum: the momentum M of each, likewise, or ``None``.
      norms: the norms that the weight norm gives to their columns, ``[batch, heads, 1, out]``, or
        ``None``.
      buffer: the unfinished chunk, and what a window still reads, or ``None``.
      document: id of the last token's document, ``[batch]`` int32, -1 where no ids were given.
    """

    weights: dict[str, jax.Array]
    main: dict[str, jax.Array] | None
    momentum: dict[str, jax.Array] | None
    norms: dict[str, jax.Array] | None
    buffer: Buffer | None
    document: jax.Array | None = None


class Slot(NamedTuple):
    """What one update reads and where its weights are applied next. ``None``: not used.

    In a stack of slots every field has a leading axis of slots.
    """

    q: jax.Array  # [batch, heads, reads, key_dim]
    k: jax.Array  # [batch, heads, tokens, key_dim]; with a window, those before the chunk, too
    v: jax.Array  # [batch, heads, tokens, value_dim]
    rates: dict[str, jax.Array | None]  # [batch, heads, tokens, 1 or in]
    count: jax.Array  # [batch] tokens that the update reads, the compute dtype of the state
    momentum: jax.Array | None  # [batch, heads, 1, 1], the chunk's mean
    forget: jax.Array | None  # [batch, heads, 1 or in, 1], the chunk's mean
    valid: jax.Array | None  # [batch] bool: the slot holds a chunk
    fresh: jax.Array | None  # [batch] bool: the chunk is the first of its document
    erase: tuple[jax.Array, jax.Array] | None = None  # read and write keys, like ``k``


def initial_state(spec: InnerLoop, weights: Weights, batch: int) -> State:
    """The state before the first token, without a buffer.

    Args:
      spec: the inner loop.
      weights: name to ``[heads, in, out]`` or ``[batch, heads, in, out]``.
      batch: rows.

    Returns:
      A ``State``, each row a copy of ``weights``.
    """
    def for_all(weights):
        return {n: jnp.broadcast_to(x, (batch, *x.shape[-3:])) for n, x in weights.items()}

    given = {name: weights[name] for name in spec.trained}
    given = {n: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for n, x in given.items()}
    trained = for_all(given)
    norms = main = momentum = None
    if spec.weight_norm is not None:
        norms = for_all(column_norms(given))
        if spec.weight_norm.detach:
            norms = jax.lax.stop_gradient(norms)
        if spec.weight_norm.form == "pre":
            main = trained
    if spec.momentum is not None:
        momentum = {name: jnp.zeros_like(weight) for name, weight in trained.items()}
    return State(trained, main, momentum, norms, None)


def apply(
    spec: InnerLoop,
    static: Weights,
    state: State,
    q: jax.Array,
    backend: str | None = "xla",
) -> jax.Array:
    """``f_θ(q)`` with the weights of ``state``: ``[batch, heads, tokens, value_dim]``."""
    return predict(spec, {**static, **state.weights}, q, backend)


def predict(
    spec: InnerLoop, weights: Weights, q: jax.Array, backend: str | None = "xla"
) -> jax.Array:
    """``f(q)`` for weights of any kind: ``[..., batch, heads, tokens, value_dim]``."""
    if not has_operations(spec, weights):
        return spec.fast_net.apply(weights, q)
    flat = {name: _as_rows(w, q) for name, w in weights.items()}
    backend = backend_of("fast_weight", backend)
    out = fast_weight_apply(flat, _as_rows(q, q), implementation=backend)
    return out.reshape(*q.shape[:-1], out.shape[-1])


def update(
    spec: InnerLoop,
    static: Weights,
    state: State,
    slot: Slot,
    start: State,
    backend: str | None = "xla",
    axis_name: str | None = None,
) -> State:
    """The state after one chunk.

    Args:
      spec: the inner loop.
      static: the matrices that are not trained.
      state: the state before the chunk.
      slot: the chunk.
      start: the state from which a new document starts.
      backend: of the operations of ``ttt_kernels``.
      axis_name: a mesh axis whose devices have the rest of the chunk's tokens, or ``None``.
    """
    if slot.fresh is not None:
        state = select(slot.fresh, start, state)
    new = state
    for step in range(spec.steps):
        forget = slot.forget if step == 0 else None
        learnt_at = start if spec.gradient_at == "start" else new
        new = inner_step(spec, static, new, slot, forget, learnt_at, backend, axis_name)
    return new if slot.valid is None else select(slot.valid, new, state)


def inner_step(
    spec: InnerLoop,
    static: Weights,
    state: State,
    slot: Slot,
    forget: jax.Array | None,
    learnt_at: State | None = None,
    backend: str | None = "xla",
    axis_name: str | None = None,
) -> State:
    """The state after one inner step on one chunk.

    ``forget`` is the factor of this step, ``learnt_at`` holds the weights at which the gradient is
    taken where they are not those of ``state``; ``axis_name`` is a mesh axis to sum it over.
    """
    weights = learning_weights(spec, learnt_at or state, forget)
    gradients = chunk_gradients(spec, {**static, **weights}, slot, backend)
    if slot.erase is not None:
        read, write = slot.erase
        name = spec.fast_net.last
        found = dense(read, state.weights[name])
        gradients[name] = gradients[name] - outer_products(write, found, None)
    if axis_name is not None:
        gradients = jax.lax.psum(gradients, axis_name)
    updates = gradients
    if spec.momentum is not None:
        updates = {name: slot.momentum * state.momentum[name] + gradients[name] for name in updates}
    momentum = updates if spec.momentum is not None else None
    updates = _shape_together(spec, updates, slot.k.dtype, backend)
    base = state.weights if state.main is None else state.main
    if forget is not None:
        base = {name: forget * weight for name, weight in base.items()}
    moved = {name: base[name] + updates[name] for name in base}
    weights, main = moved, None
    if spec.weight_norm is not None:
        weights = normalise(spec.weight_norm, moved, state.norms)
        main = moved if spec.weight_norm.form == "pre" else None
    return state._replace(weights=weights, main=main, momentum=momentum)


def learning_weights(spec: InnerLoop, state: State, forget: jax.Array | None) -> Weights:
    """The trained matrices at which a step takes its gradient."""
    if forget is None or not spec.forget_first:
        return state.weights
    return {name: forget * weight for name, weight in state.weights.items()}


def chunk_gradients(
    spec: InnerLoop, weights: Weights, slot: Slot, backend: str | None = "xla"
) -> dict[str, jax.Array]:
    """``Σ_i rate_i ∇L(f(k_i), v_i)`` over a slot's tokens (their mean where the loss says so).

    Where ``has_operations``, a stack of slots has the gradients of each of them.
    """
    goal = target(spec, slot.k, slot.v)
    if spec.loss.state_free and has_operations(spec, weights, slot):
        gradients = _swiglu_gradients(spec, weights, slot, goal, backend)
    else:
        gradients = spec.fast_net.gradient(
            weights, slot.k, lambda f: spec.loss.cotangent(f, goal), slot.rates
        )
    if spec.loss.reduction == "mean":
        gradients = {n: g / slot.count[..., None, None, None] for n, g in gradients.items()}
    return gradients


def has_operations(spec: InnerLoop, weights: Weights, slot: Slot | None = None) -> bool:
    """Whether ``ttt_kernels.fast_weight`` serves: LaCT's network with one rate a token."""
    rates = [] if slot is None else [r for r in slot.rates.values() if r is not None]
    by_token = all(r.shape[-1] == 1 for r in rates)
    plain = all(isinstance(w, jax.Array) for w in weights.values())
    return type(spec.fast_net) is SwiGLU and plain and by_token


def _swiglu_gradients(
    spec: InnerLoop, weights: Weights, slot: Slot, goal: jax.Array, backend: str | None
) -> dict[str, jax.Array]:
    """The gradients of LaCT's network by ``ttt_kernels.fast_weight``."""
    k, rates = slot.k, list(slot.rates.values())
    if all(rate is None for rate in rates):
        rates = None
    else:
        wide = jnp.promote_types(k.dtype, jnp.float32)
        full = (*k.shape[:-1], 1)
        rates = [1.0 if rate is None else rate.astype(wide) for rate in rates]
        rates = _as_rows(jnp.concatenate([jnp.broadcast_to(r, full) for r in rates], -1), k)
    found = fast_weight_gradients(
        {name: _as_rows(w, k) for name, w in weights.items()},
        _as_rows(k, k),
        _as_rows(spec.loss.descent(goal), k),
        rates,
        trained="all" if len(spec.trained) > 1 else "last",
        implementation=backend_of("fast_weight", backend),
    )
    return {n: -g.reshape(*k.shape[:-2], *g.shape[-2:]) for n, g in found.items()}


def _as_rows(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """``[..., batch, heads, a, b]`` as ``[rows, heads, a, b]``, like ``tokens`` in what leads.

    Weights that all rows share keep one row.
    """
    if x.ndim <= 3 or (x.shape[:-3] != tokens.shape[:-3] and x[..., 0, 0, 0].size == 1):
        return x.reshape(1, *x.shape[-3:])
    x = jnp.broadcast_to(x, (*tokens.shape[:-3], *x.shape[-3:]))
    return x.reshape(-1, *x.shape[-3:])


def target(spec: InnerLoop, k: jax.Array, v: jax.Array) -> jax.Array:
    """What the fast network is to predict at ``k``."""
    return v - k if spec.target == "value_minus_key" else v


def shape_update(
    spec: InnerLoop, update: jax.Array, token_dtype: jnp.dtype, backend: str | None = "xla"
) -> jax.Array:
    """What is added to the weights for an accumulated gradient: shaped, with its sign."""
    update = shaped(spec, update, token_dtype, backend)
    return update if spec.direction == "ascent" else -update


def _shape_together(
    spec: InnerLoop, updates: dict[str, jax.Array], token_dtype: jnp.dtype, backend: str | None
) -> dict[str, jax.Array]:
    """``shape_update`` of all matrices, those of one shape at once: a third of the launches.

    Tall matrices are orthogonalised transposed, so together with wide ones.
    """
    if spec.orthogonalise is None:
        return {n: shape_update(spec, u, token_dtype, backend) for n, u in updates.items()}
    tall = {n for n, u in updates.items() if u.shape[-2] > u.shape[-1] and not spec.clip}
    turned = {n: u.mT if n in tall else u for n, u in updates.items()}
    made = {}
    for shape in {u.shape: None for u in turned.values()}:
        names = [n for n, u in turned.items() if u.shape == shape]
        together = jnp.stack([turned[n] for n in names])
        made |= zip(names, shape_update(spec, together, token_dtype, backend), strict=True)
    return {n: made[n].mT if n in tall else made[n] for n in updates}


def shaped(
    spec: InnerLoop, update: jax.Array, token_dtype: jnp.dtype, backend: str | None = "xla"
) -> jax.Array:
    """An accumulated gradient, clipped or orthogonalised: an odd function of it.

    Orthogonalised in 16 bits, it has 16 bits.
    """
    if spec.clip:
        update = update / (column_norm(update) + 1)
    if spec.orthogonalise is not None:
        muon = spec.orthogonalise
        dtype = jnp.dtype(muon.dtype or token_dtype)
        # It begins and ends with values of that dtype: 16 bits need no wider arrays around them.
        update = update.astype(dtype) if dtype.itemsize == 2 else update
        backend = backend_of("newton_schulz", backend)
        # One batch axis: with more XLA transposes and copies the matrices for a GPU's products.
        flat = update.reshape(-1, *update.shape[-2:])
        options = dict(eps=muon.eps, dtype=dtype, implementation=backend)
        update = newton_schulz(flat, muon.coefficients, **options).reshape(update.shape)
    return update


def normalise(
    norm: WeightNorm, weights: dict[str, jax.Array], targets: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """``W / (|W| + eps) · target`` of each matrix, column norms over the input axis."""
    norms = column_norms(weights)
    return {n: w * (targets[n] / (norms[n] + norm.eps)) for n, w in weights.items()}


def column_norms(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """``column_norm`` of each matrix; on a GPU long columns of several matrices at once."""
    groups: dict[tuple, list[str]] = {}
    for name, weight in weights.items():
        long = weight.shape[-2] >= _LONG and compat.target_platform() == "gpu"
        groups.setdefault(weight.shape if long else (name,), []).append(name)
    norms = {}
    for names in groups.values():
        found = column_norm(jnp.concatenate([weights[n] for n in names], axis=-1))
        norms |= zip(names, jnp.split(found, len(names), axis=-1), strict=True)
    return norms


def column_norm(weight: jax.Array) -> jax.Array:
    """Norms over the input axis, ``[..., 1, out]``; gradient 0 (not NaN) where a column is 0."""
    squares, rows = weight * weight, weight.shape[-2]
    if compat.target_platform() == "gpu" and rows >= _LONG and rows % _PIECES == 0:
        # XLA has one thread block for 32 whole columns, too few blocks for the chip: in pieces,
        # which it would put together again.
        squares = squares.reshape(*weight.shape[:-2], _PIECES, -1, weight.shape[-1])
        squares = jax.lax.optimization_barrier(jnp.sum(squares, axis=-2))
    squares = jnp.sum(squares, axis=-2, keepdims=True)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def select(rows: jax.Array, chosen: State, other: State) -> State:
    """Row by row, ``chosen`` where ``rows`` (``[batch]`` bool) is true, else ``other``."""

    def pick(a, b):
        return jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - rows.ndim)), a, b)

    return jax.tree.map(pick, chosen, other)
