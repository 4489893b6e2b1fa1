"""Inner loops that are one call of ``ttt_kernels.delta_rule``: a linear state, token by token.

The squared loss makes an update affine in the state, ``S ← D S − rate kᵀ(k S − v)``; so do
erase keys. Products of such updates have a compact (WY) form, which ``delta_rule`` evaluates in
chunks. A forget gate with a number for each channel comes here, too.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.chunks import Tokens, squeeze, take
from ttt_jax.inner_loop.fast_nets import Linear, Weights
from ttt_jax.inner_loop.losses import DotProduct, Squared
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State, target
from ttt_kernels.delta_rule import delta_rule

_SMALLEST = -1e4  # exp of it is 0 in every dtype; log(0) would have no gradient


def obstacles(spec: InnerLoop) -> list[str]:
    """Why ``spec`` is not one call of ``delta_rule``: one sentence a field, or nothing."""
    found = []
    if not isinstance(spec.fast_net, Linear):
        found.append(f"fast_net={type(spec.fast_net).__name__}: use fast_nets.Linear()")
    if type(spec.loss) is not Squared and not (spec.erase and type(spec.loss) is DotProduct):
        found.append(f"loss={type(spec.loss).__name__}: use losses.Squared()")
    if (spec.chunk_size, spec.order) != (1, "update_then_apply"):
        found.append(
            f"chunk_size={spec.chunk_size}, order={spec.order!r}: use chunk_size=1 and "
            "'update_then_apply'"
        )
    if spec.gradient_at != "state":
        found.append("gradient_at='start': use 'state'")
    for name, neutral in (
        ("momentum", None),
        ("orthogonalise", None),
        ("clip", False),
        ("weight_norm", None),
        ("window", None),
        ("steps", 1),
    ):
        if getattr(spec, name) != neutral:
            found.append(f"{name}={getattr(spec, name)!r}: use {neutral}")
    return found


def has_channel_gate(forget: jax.Array | None) -> bool:
    """Whether the argument ``forget`` of ``ttt`` has a number for each channel."""
    return forget is not None and forget.ndim == 4 and forget.shape[3] > 1


def run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    first: State,
    start: State,
    implementation: str | None,
) -> tuple[jax.Array, State]:
    """As ``kernel.run``, for a token-causal loop that ``linear_attention`` does not serve.

    Args:
      spec: the inner loop, without ``obstacles``, or with a dot-product loss and a frozen kernel.
      static: matrices that are not trained.
      tokens: the tokens of this call, head-major.
      segment_ids: ``[batch, time]`` or ``None``.
      first: the state before the first token.
      start: the state from which a new document starts.
      implementation: of ``ttt_kernels.delta_rule``.
    """
    place = None
    if segment_ids is not None:  # padding inside a document does not end it
        tokens, segment_ids, place = squeeze(tokens, segment_ids, None)
    net, name = spec.fast_net, spec.fast_net.last
    log_decay = log_forget(spec, tokens)
    queries, gate = net.features(static, tokens.q), net.gate(static, tokens.q)
    written, values, erased = _updates(spec, static, tokens, log_decay)
    out, state = delta_rule(
        jnp.swapaxes(queries, 1, 2),
        jnp.swapaxes(written, 1, 2),
        jnp.swapaxes(values, 1, 2),
        log_decay=None if log_decay is None else _by_token(log_decay),
        initial_state=first.weights[name],
        reset_state=start.weights[name],
        segment_ids=segment_ids,
        implementation=implementation,
        **{field: _by_token(x) for field, x in erased.items()},
    )
    out = jnp.swapaxes(out, 1, 2)
    out = out if gate is None else out * gate
    out = out if place is None else take(out, place)
    return out, first._replace(weights={name: state.astype(start.weights[name].dtype)})


def _updates(
    spec: InnerLoop, static: Weights, tokens: Tokens, log_decay: jax.Array | None
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Keys and values that are written, and what is erased: ``beta``, or a pair of erase keys."""
    keys, rate = spec.fast_net.features(static, tokens.k), signed_rates(spec, tokens)
    goal = target(spec, tokens.k, tokens.v)
    if spec.loss.state_free:
        written = (keys * rate).astype(keys.dtype)
        values, gate = -spec.loss.cotangent(goal, goal), spec.fast_net.gate(static, tokens.k)
        values = values if gate is None else values * gate
        if spec.erase is None:
            return written, values, {}
        read, write = tokens.erase
        write = write if spec.direction == "descent" else -write
        return written, values, {"erase_read": read, "erase_write": write}
    rate = rate * spec.loss.scale
    if jnp.shape(rate)[3:] in ((), (1,)) and (log_decay is None or spec.forget_first):
        beta = jnp.broadcast_to(rate, (*keys.shape[:3], 1))
        return keys, goal, {"beta": beta}
    written = (keys * rate).astype(keys.dtype)
    read = keys  # of the state before it is forgotten
    if spec.forget_first:
        read = (keys * jnp.exp(log_decay)).astype(keys.dtype)
    return written, goal, {"erase_read": read, "erase_write": -written}


def log_forget(spec: InnerLoop, tokens: Tokens) -> jax.Array | None:
    """``log(forget)``, head-major, ``[batch, heads, time, 1 or channels]``."""
    if spec.forget is None:
        return None
    wide = jnp.promote_types(tokens.k.dtype, jnp.float32)
    if spec.forget == "per_token":
        gate = tokens.forget.astype(wide)
    else:
        by_head = jnp.reshape(jnp.asarray(spec.forget, wide), (1, -1, 1, 1))
        gate = jnp.broadcast_to(by_head, (*tokens.k.shape[:3], 1))
    positive = gate > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, gate, 1)), _SMALLEST)


def _by_token(x: jax.Array) -> jax.Array:
    """Head-major to ``[batch, time, heads]``, or ``[batch, time, heads, channels]``."""
    turned = jnp.swapaxes(x, 1, 2)
    return turned[..., 0] if turned.shape[3] == 1 else turned


def signed_rates(spec: InnerLoop, tokens: Tokens) -> jax.Array | float:
    """Rates of the one trained matrix, ``[batch, heads, time, 1 or channels]``; − for ascent."""
    rate = spec.rate[0] if isinstance(spec.rate, tuple) else spec.rate
    if rate == "per_token":
        rate = tokens.lr[:, :, :, 0]
        rate = rate if rate.ndim == 4 else rate[..., None]
    return rate if spec.direction == "descent" else -rate
