"""The squared loss in parallel: updates that are affine in weights and momentum.

With a frozen kernel the gradient of a chunk is ``P W − Q`` with ``P = Σ rate k̂ᵀk̂`` and
``Q = Σ rate k̂ᵀv``. Weights and momentum together, ``x = [W; M]``, then obey
``x_c = A_c x_{c-1} + b_c``, a prefix of an associative operation. Exact, and dear: ``A_c`` is as
wide as both states, so a chunk costs ``O(d³)``. Without momentum and with one token a chunk
``delta`` is the way.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.fast_nets import FastNet, Polynomial, Weights, outer_products
from ttt_jax.inner_loop.losses import Squared
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import Slot, State, target


def obstacles(spec: InnerLoop) -> list[str]:
    """Why an update of ``spec`` is not affine in the state: one sentence a field, or nothing."""
    found = []
    if type(spec.loss) is not Squared:
        found.append(f"loss={type(spec.loss).__name__}: use losses.Squared()")
    net = spec.fast_net.net if isinstance(spec.fast_net, Polynomial) else spec.fast_net
    if not spec.static_features or type(net).gate is not FastNet.gate:
        found.append(f"fast_net={type(net).__name__}: use fast_nets.Linear()")
    if spec.order == "token_causal":
        found.append("order='token_causal': use 'update_then_apply'")
    for name, neutral in (
        ("orthogonalise", None),
        ("clip", False),
        ("weight_norm", None),
        ("erase", None),
        ("gradient_at", "state"),
        ("steps", 1),
    ):
        if getattr(spec, name) != neutral:
            found.append(f"{name} is set: use {name}={neutral!r}")
    return found


def all_states(
    spec: InnerLoop, static: Weights, slots: Slot, initial: State, start: State
) -> tuple[jax.Array, jax.Array | None]:
    """Weights, and momentum where there is one, after each slot.

    Args:
      spec: an inner loop without ``obstacles``.
      static: matrices that are not trained.
      slots: the stacked chunks.
      initial: the state before the first chunk.
      start: the state from which a new document starts.

    Returns:
      Two arrays ``[n, batch, heads, in, out]``; the second is ``None`` without momentum.
    """
    matrix, shift = _transitions(spec, static, slots)
    if slots.valid is not None:  # an empty slot changes nothing
        valid = slots.valid[:, :, None, None, None]
        matrix = jnp.where(valid, matrix, jnp.eye(matrix.shape[-1], dtype=matrix.dtype))
        shift = jnp.where(valid, shift, 0)
    if slots.fresh is not None:  # a document starts from its own state, whatever came before
        begins = slots.fresh[:, :, None, None, None]
        shift = jnp.where(begins, _times(matrix, _joint(spec, start)) + shift, shift)
        matrix = jnp.where(begins, 0, matrix)
    begin = shift[:1] + _times(matrix[:1], _joint(spec, initial))
    shift = jnp.concatenate([begin, shift[1:]])

    def combine(early, late):
        return _times(late[0], early[0]), _times(late[0], early[1]) + late[1]

    joint = jax.lax.associative_scan(combine, (matrix, shift))[1]
    if spec.momentum is None:
        return joint, None
    weights, momentum = jnp.split(joint, 2, -2)
    return weights, momentum


def _transitions(spec: InnerLoop, static: Weights, slots: Slot) -> tuple[jax.Array, jax.Array]:
    """``A`` and ``b`` of each slot: ``[n, batch, heads, width, width]``, ``[..., width, out]``.

    With ``P``, ``Q``, ``D = diag(forget)`` and ``D' = D`` (``forget_first``) or ``1``, descent is
    ``M ← β M + P D' W − Q`` and ``W ← D W − M``.
    """
    name = spec.fast_net.last
    keys, rate = spec.fast_net.features(static, slots.k), slots.rates[name]
    scale = jnp.asarray(spec.loss.scale, slots.count.dtype)
    if spec.loss.reduction == "mean":
        scale = scale / slots.count[:, :, None, None, None]
    seen = scale * outer_products(keys, keys, rate)
    wanted = scale * outer_products(keys, target(spec, slots.k, slots.v), rate)
    keep = identity = jnp.broadcast_to(jnp.eye(seen.shape[-1], dtype=seen.dtype), seen.shape)
    if slots.forget is not None:
        keep = slots.forget * identity
        seen = seen * slots.forget.mT if spec.forget_first else seen
    sign = -1 if spec.direction == "ascent" else 1
    if spec.momentum is None:
        return keep - sign * seen, sign * wanted
    carry = slots.momentum * identity
    matrix = jnp.block([[keep - sign * seen, -sign * carry], [seen, carry]])
    return matrix, jnp.concatenate([sign * wanted, -wanted], -2)


def _joint(spec: InnerLoop, state: State) -> jax.Array:
    """Weights, over momentum where there is one: ``[batch, heads, width, out]``."""
    name = spec.fast_net.last
    if spec.momentum is None:
        return state.weights[name]
    return jnp.concatenate([state.weights[name], state.momentum[name]], -2)


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
