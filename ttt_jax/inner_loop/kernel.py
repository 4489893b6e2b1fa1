"""``mode="kernel"``: what of an inner loop has kernels in ``ttt_kernels``, and where they win.

Some inner loops are one call of a kernel, run here. Delta rules and forget gates with a number a
channel are ``delta``'s; the others linear attention: with ``q̂ = φ(q)``, ``k̂ = rate · φ(k)`` and
``v̂ = scale · v`` the layer is ``o = q̂ (W₀ + Σ k̂ᵀ v̂)``, causal by token at ``chunk_size=1``, causal
by chunk otherwise. ``mode="parallel"`` evaluates the token-causal ones here too, in XLA: one state
a token would not fit. Other inner loops run in their recurrent or parallel form with kernels
inside: the fast network, sums and products of chunks, Newton-Schulz.
"""

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import delta, parallel, rows
from ttt_jax.inner_loop.chunks import Tokens, arrange, documents, like, squeeze, take
from ttt_jax.inner_loop.fast_nets import SwiGLU, Weights, dense
from ttt_jax.inner_loop.recurrent import finish
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_kernels import compat
from ttt_kernels.fast_weight import mosaic_gpu_passes
from ttt_kernels.linear_attention import linear_attention

_LONG_CHUNK = 1024  # tokens, as in ``ttt_kernels.chunk_products``; shorter ones have not been timed


def obstacles(spec: InnerLoop, channel_gate: bool = False) -> list[str]:
    """Why no operation of ``spec`` has a kernel: one sentence a field, or nothing.

    ``channel_gate`` says whether ``forget`` has a number for each channel.
    """
    return [] if _has_kernels_inside(spec) else one_call_obstacles(spec, channel_gate)


def _has_kernels_inside(spec: InnerLoop) -> bool:
    """Whether the recurrent or the parallel form of ``spec`` has an operation with kernels."""
    if parallel.is_dear(spec) or spec.order == "token_causal":
        return False
    swiglu = type(spec.fast_net) is SwiGLU
    return swiglu or spec.orthogonalise is not None or rows.fits(spec, None)


def wants_whole_rows(spec: InnerLoop, backend: str | None) -> bool:
    """Whether the kernel of one call takes neither documents nor carried tokens.

    Hopper's for chunks does not; the parallel form has the same kernels inside, and takes both.
    """
    return backend == "mosaic_gpu" and not _by_token(spec) and spec.loss.state_free


def wins(spec: InnerLoop, channel_gate: bool) -> bool:
    """Whether ``mode="auto"`` takes kernels on the device at hand: where they were seen to win."""
    if compat.hopper_problem() is None:  # BUILD_NOTES has the times, one H200
        one_call = not one_call_obstacles(spec, channel_gate)
        return rows.fits(spec, None) or one_call or _network_wins(spec)
    if compat.tpu_problem() is None:
        return not obstacles(spec, channel_gate)
    return False


def _network_wins(spec: InnerLoop) -> bool:
    """Whether the recurrent form gains by the kernels of LaCT's network: in long chunks."""
    named = isinstance(spec.order, str) and spec.order != "token_causal"
    long = (spec.chunk_size or 0) >= _LONG_CHUNK
    return type(spec.fast_net) is SwiGLU and spec.loss.state_free and named and long


def backend_of_spans(spec: InnerLoop, weights: Weights) -> str | None:
    """The backend of explicit spans with ``mode="auto"``: XLA's, or ``None``, and operations pick.

    They pick where it was timed: LaCT's network with a wide hidden layer on a Hopper GPU, which
    then has kernels between XLA's products; what else there is takes XLA at such widths.
    """
    if type(spec.fast_net) is not SwiGLU or compat.hopper_problem():
        return "xla"
    return "xla" if mosaic_gpu_passes.untimed(weights["w0"].shape[-1]) else None


def one_call_obstacles(spec: InnerLoop, channel_gate: bool = False) -> list[str]:
    """Why ``spec`` is not one call of a kernel: one sentence a field, or nothing."""
    if not delta.obstacles(spec):
        return []
    found = parallel.obstacles(spec)
    if parallel.is_dear(spec):
        found.append(
            f"loss={type(spec.loss).__name__} here is an affine scan, which no kernel runs; use "
            "mode='parallel' or losses.DotProduct()"
        )
    if not isinstance(spec.order, str):
        found.append("order is an explicit list of spans, which is no single call; use mode='auto'")
    if channel_gate and not _by_token(spec):
        found.append("forget has a number a channel: use mode='parallel' or one number a head")
    if spec.momentum is not None:
        found.append("momentum carries updates over chunks; use mode='parallel' or momentum=None")
    if spec.orthogonalise is not None:
        found.append("orthogonalise reshapes each chunk's update; use mode='parallel' or None")
    if spec.steps > 1:
        found.append(f"steps={spec.steps}: use mode='parallel' or steps=1")
    if spec.loss.reduction == "mean" and spec.chunk_size != 1:
        found.append("loss.reduction='mean' needs the chunk's length; use 'sum' or 'parallel'")
    if spec.forget is not None and spec.chunk_size != 1:
        found.append("forget with chunk_size > 1 is one factor a chunk; use mode='parallel'")
    if spec.clip:
        found.append("clip reshapes each chunk's update; use mode='parallel' or clip=False")
    if spec.window is not None:
        found.append(f"window={spec.window}: use mode='parallel' or window=None")
    if spec.chunk_size is None:
        found.append("chunk_size=None is one chunk of any length; use mode='parallel'")
    return found


def run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    first: State,
    start: State,
    continued: bool,
    implementation: str | None,
) -> tuple[jax.Array, State]:
    """As ``recurrent.run``, from tokens, for a specification without ``one_call_obstacles``.

    Args:
      spec: the inner loop.
      static: matrices that are not trained.
      tokens: the tokens of this call, head-major.
      segment_ids: ``[batch, time]`` or ``None``.
      first: the state before the first token, with its buffer.
      start: the state from which a new document starts.
      continued: whether ``first`` was carried from an earlier call.
      implementation: of ``ttt_kernels.linear_attention``, or of ``delta_rule``.
    """
    if not spec.loss.state_free or spec.erase or delta.has_channel_gate(tokens.forget):
        return delta.run(spec, static, tokens, segment_ids, first, start, implementation)
    buffer, carried = first.buffer, first._replace(buffer=None)
    chunks = arrange(spec, tokens, segment_ids, buffer, continued)
    time, place, ids = tokens.k.shape[2], None, None
    if segment_ids is not None or buffer is not None:
        tokens, ids, place = squeeze(tokens, segment_ids, buffer)
    document, position = documents(jnp.zeros((1, time), jnp.int32) if ids is None else ids)
    name = spec.fast_net.last
    queries = spec.fast_net.features(static, tokens.q)
    keys = spec.fast_net.features(static, tokens.k)
    keys = (keys * delta.signed_rates(spec, tokens)).astype(keys.dtype)
    ragged = ids is not None or time % spec.chunk_size != 0
    if spec.order == "apply_then_update" and ragged:  # an unfinished chunk stays out of the state
        keys = jnp.where(like(_unfinished(spec, ids, document, position), keys), 0, keys)
    values, gate = parallel.values_of(spec, static, tokens), spec.fast_net.gate(static, tokens.q)
    log_decay = _log_decay(spec, tokens)
    out, state = linear_attention(
        jnp.swapaxes(queries, 1, 2),
        jnp.swapaxes(keys, 1, 2),
        jnp.swapaxes(values, 1, 2),
        log_decay=log_decay,
        initial_state=carried.weights[name],
        segment_ids=ids,
        causal="token" if _by_token(spec) else "chunk",
        chunk_size=None if _by_token(spec) else spec.chunk_size,
        include_current_chunk=not _by_token(spec) and spec.order == "update_then_apply",
        implementation=implementation,
    )
    out = jnp.swapaxes(out, 1, 2)
    if ids is not None:
        kept = _since_start(log_decay, position)  # documents after the first start from W₀, not 0
        later = (document > 0) & (ids >= 0)
        inherited = dense(queries, start.weights[name]) * kept.astype(out.dtype)
        out = out + jnp.where(like(later, out), inherited, 0)
        last = jnp.maximum(jnp.sum(ids >= 0, 1, keepdims=True) - 1, 0)
        factor = jnp.where(like(later, kept), kept, 0)
        state = state + take(factor, last) * start.weights[name]
    out = out if gate is None else out * gate
    if ids is not None:
        out = take(out, place)[:, :, -time:]
    final = carried._replace(weights={name: state.astype(start.weights[name].dtype)})
    return out, finish(chunks._replace(restart=None), final, start)


def _by_token(spec: InnerLoop) -> bool:
    return spec.chunk_size == 1 and spec.order == "update_then_apply"


def _log_decay(spec: InnerLoop, tokens: Tokens) -> jax.Array | None:
    """``log(forget)`` as ``[batch, time, heads]``."""
    found = delta.log_forget(spec, tokens)
    return None if found is None else jnp.swapaxes(found[..., 0], 1, 2)


def _unfinished(spec, ids, document, position) -> jax.Array:
    """Tokens of the last document's unfinished chunk, ``[batch or 1, time]`` bool."""
    total = position.shape[1] if ids is None else jnp.sum(ids >= 0, 1, keepdims=True)
    tail = jnp.maximum(jnp.broadcast_to(total, (position.shape[0], 1)) - 1, 0)
    length = jnp.take_along_axis(position, tail, 1) + 1
    done = length // spec.chunk_size * spec.chunk_size
    return (document == jnp.take_along_axis(document, tail, 1)) & (position >= done)


def _since_start(log_decay: jax.Array | None, position: jax.Array) -> jax.Array:
    """What is left at each token of its document's initial state, ``[batch, heads, time, 1]``."""
    if log_decay is None:
        return jnp.ones((*position.shape, 1), jnp.float32)[:, None]
    total = jnp.cumsum(log_decay, 1)
    begin = jnp.arange(position.shape[1]) - position
    before = jnp.take_along_axis(total - log_decay, begin[..., None], 1)
    return jnp.exp(jnp.minimum(total - before, 0)).swapaxes(1, 2)[..., None]
