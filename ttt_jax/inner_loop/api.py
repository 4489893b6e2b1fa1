"""``ttt``: the inner loop over a batch of sequences, in the mode that is asked for or fits."""

import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import delta, kernel, parallel, recurrent, spans
from ttt_jax.inner_loop.checks import check_arguments
from ttt_jax.inner_loop.chunks import arrange, head_major
from ttt_jax.inner_loop.decode import decode_one, is_decode
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_jax.inner_loop.updates import initial_state as start_state
from ttt_kernels import compat

Mode = Literal["auto", "recurrent", "parallel", "kernel"]


def ttt(
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
    segment_ids: jax.Array | None = None,
    initial_state: State | None = None,
    mode: Mode = "auto",
    implementation: str | None = None,
) -> tuple[jax.Array, State]:
    """Test-time training: a fast network learns ``k → v`` along the sequence, read at ``q``.

    ``o_t = f_θ(q_t)`` with ``θ`` updated chunk by chunk as ``InnerLoop`` says; for a linear last
    layer this equals ``o_t = q̂_t (S₀ + Σ_i k̂_iᵀ v̂_i)`` (Theorem 5.2).

    Args:
      spec: the inner loop.
      weights: initial fast weights, name to ``[heads, in, out]`` or ``[batch, heads, in, out]``.
      q: queries, ``[batch, time, heads, key_dim]``; time >= 1, any floating dtype.
      k: keys, like ``q``.
      v: values, ``[batch, time, heads, value_dim]``.
      lr: rates (no unit), ``[batch, time, heads]``, or ``[batch, time, heads, R]``, one for each
        matrix of ``spec.trained``, or ``[batch, time, heads, R, channels]`` with one an input
        channel; exactly where ``spec.rate == "per_token"``.
      momentum: ``[batch, time, heads]`` in [0, 1]; exactly where ``spec.momentum == "per_token"``.
      forget: ``[batch, time, heads]`` in [0, 1], or ``[batch, time, heads, key_dim]``; exactly
        where ``spec.forget == "per_token"``.
      erase: a pair of keys (read, write) like ``k``: each token also adds ``writeᵀ (read S)`` to
        state; exactly where ``spec.erase == "per_token"``.
      segment_ids: ``[batch, time]`` int32. A document is a run of equal ids >= 0 and starts from
        ``weights``; -1 is padding, which has no influence and output 0.
      initial_state: the state that an earlier call returned: its last document goes on here.
      mode: ``"recurrent"`` (``lax.scan``), ``"parallel"`` (all chunks at once), ``"kernel"``
        (Pallas), or ``"auto"``: the fastest that is exact. A named mode runs or raises.
      implementation: ``"associative_scan"`` or ``"triangular"`` in ``"parallel"`` mode; the backend
        of ``ttt_kernels`` in ``"kernel"`` mode; ``None`` picks.

    Returns:
      Outputs ``[batch, time, heads, value_dim]`` in the dtype of ``q``, and the ``State`` after the
      last token, float32 (float64 for float64 inputs).

    Raises:
      ValueError: an argument does not fit ``spec`` or another argument, or ``mode`` cannot run it;
        the message names the argument, the rule and the way out.

    Source: *Test-Time Training with KV Binding Is Secretly Linear Attention*, eqs. of section 5.

    Example:
      >>> import jax
      >>> from ttt_jax.inner_loop import presets
      >>> spec = presets.lact_llm(variant=6, chunk_size=4)
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> weights = spec.init(keys[0], heads=2, key_dim=8)
      >>> q, k, v = (jax.random.normal(key, (1, 10, 2, 8)) for key in keys[1:])
      >>> out, state = ttt(spec, weights, q, k, v)
      >>> out.shape, int(state.buffer.count[0])
      ((1, 10, 2, 8), 2)
    """
    check_arguments(
        spec, weights, q, k, v, lr, momentum, forget, segment_ids, initial_state, erase
    )
    channel_gate = delta.has_channel_gate(forget)
    mode, implementation = choose(spec, mode, implementation, channel_gate)
    tokens = head_major(q, k, v, lr, momentum, forget, erase)
    if spec.query == "key":
        tokens = tokens._replace(q=tokens.k)
    start = start_state(spec, weights, k.shape[0])
    static = {name: w for name, w in weights.items() if name not in spec.trained}
    if initial_state is not None and is_decode(spec, tokens):
        out, state = decode_one(spec, static, tokens, segment_ids, initial_state, start)
    elif not isinstance(spec.order, str):
        first = initial_state or start
        if mode == "parallel":
            out, state = spans.run_parallel(spec, static, tokens, first, start, implementation)
        else:
            out, state = spans.run(spec, static, tokens, first, start)
    elif mode == "kernel":
        first, continued = initial_state or start, initial_state is not None
        out, state = kernel.run(
            spec, static, tokens, segment_ids, first, start, continued, implementation
        )
    else:
        first, continued = initial_state or start, initial_state is not None
        chunks = arrange(spec, tokens, segment_ids, first.buffer, continued)
        first = first._replace(buffer=None)
        if mode == "parallel":
            out, state = parallel.run(spec, static, chunks, first, start, implementation)
        else:
            out, state = recurrent.run(spec, static, chunks, first, start)
    return jnp.swapaxes(out, 1, 2), state


def choose(
    spec: InnerLoop, mode: Mode, implementation: str | None, channel_gate: bool
) -> tuple[str, str | None]:
    """The mode that runs and its implementation; raises where a named one cannot."""
    if mode not in ("auto", "recurrent", "parallel", "kernel"):
        raise ValueError(f"{mode=}: use 'auto', 'recurrent', 'parallel' or 'kernel'")
    serial, no_kernel = parallel.obstacles(spec), kernel.obstacles(spec, channel_gate)
    if mode == "auto":
        if implementation is not None:
            raise ValueError(f"{implementation=} needs a named mode; mode='auto' picks both")
        mode = "recurrent" if serial or parallel.is_dear(spec) else "parallel"
        if not no_kernel and None in (compat.hopper_problem(), compat.tpu_problem()):
            mode = "kernel"
        _log_choice(spec, mode)
    if mode == "kernel" and no_kernel:
        raise ValueError("mode='kernel' cannot run this specification: " + "; ".join(no_kernel))
    if mode == "parallel" and serial:
        raise ValueError("mode='parallel' cannot run this specification: " + "; ".join(serial))
    if mode == "parallel" and implementation is None and spec.chunk_size == 1 and not no_kernel:
        return "kernel", "xla"  # tiles of many one-token chunks: one state a token would not fit
    prefixes = tuple(parallel.PREFIXES) if delta.obstacles(spec) else ()
    prefixes = ("associative_scan",) if parallel.is_dear(spec) else prefixes
    allowed = {"recurrent": (), "parallel": prefixes}.get(mode)
    if implementation is not None and allowed is not None and implementation not in allowed:
        raise ValueError(f"{implementation=} with {mode=}: use one of {allowed} or None")
    return mode, implementation


@functools.cache
def _log_choice(spec: InnerLoop, mode: str) -> None:
    why = " (the parallel form is an affine scan, O(d³) a chunk)" if parallel.is_dear(spec) else ""
    logging.getLogger("ttt_jax").info("ttt: mode='auto' runs mode=%r%s for %s", mode, why, spec)
