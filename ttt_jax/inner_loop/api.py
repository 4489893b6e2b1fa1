"""``ttt``: the inner loop over a batch of sequences, in the mode that is asked for or fits."""

import functools
import logging
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop import delta, kernel, parallel, recurrent, rows, spans
from ttt_jax.inner_loop.carried import last_document, resume
from ttt_jax.inner_loop.checks import check_arguments
from ttt_jax.inner_loop.chunks import Tokens, arrange, head_major
from ttt_jax.inner_loop.decode import decode_one, is_decode
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.prefix import PREFIXES
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_jax.inner_loop.updates import initial_state as start_state

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

    ``o_t = f_θ(q_t)``, where ``θ`` starts as ``weights`` and every chunk of tokens updates it::

        G = Σ_i lr_i ∇_θ L(f_θ(k_i), v_i);  M = momentum · M + G;  θ = forget · θ − U(M)

    ``InnerLoop`` has the whole update in its order. For a linear last layer this equals
    ``o_t = q̂_t (S₀ + Σ_i k̂_iᵀ v̂_i)`` (Theorem 5.2). Gradients are taken backwards (``jax.grad``,
    ``jax.vjp``). LaCT's network, Newton-Schulz and the sums over chunks of ``"parallel"`` have
    rules of their own for that, and forward mode (``jax.jvp``) stops at them.

    Args:
      spec: the inner loop.
      weights: initial fast weights, name to ``[heads, in, out]`` or ``[batch, heads, in, out]``.
      q: queries, ``[batch, time, heads, key_dim]``; time >= 1, any floating dtype.
      k: keys, like ``q``. With spans as the order k, v and lr may hold fewer tokens than ``q``:
        updates read only these.
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
        ``weights``; a negative id is padding, which has no influence and output 0.
      initial_state: the state that an earlier call returned. Its last document goes on here: in
        rows that begin with the id with which it ended, and in all without ids in either call.
      mode: ``"recurrent"`` (``lax.scan``), ``"parallel"`` (all chunks at once), both in XLA;
        ``"kernel"``: one call of a kernel where the layer is one, else the parallel or the
        recurrent form with kernels inside; or ``"auto"``: the fastest that is exact. A named mode
        runs or raises.
      implementation: ``"associative_scan"`` or ``"triangular"`` in ``"parallel"`` mode; the backend
        of ``ttt_kernels``' operations in ``"kernel"`` mode (``"mosaic_gpu"``, ``"mosaic_tpu"``,
        ``"xla"``); ``None`` picks, operation by operation.

    Returns:
      Outputs ``[batch, time, heads, value_dim]`` in the dtype of ``q``, and the ``State`` after the
      last token, float32 (float64 for float64 inputs).

    Raises:
      ValueError: an argument does not fit ``spec`` or another argument, or ``mode`` cannot run it;
        the message names the argument, the rule and the way out.
      NotImplementedError: the kernels that ``implementation`` names cannot run here; says why.

    Source: *Test-Time Training with KV Binding Is Secretly Linear Attention* (arXiv 2602.21204),
    Theorems 5.1 to 5.3.

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
    chosen = choose(spec, mode, implementation, channel_gate)
    if mode == "auto" and not isinstance(spec.order, str):
        chosen = chosen._replace(backend=kernel.backend_of_spans(spec, weights))
    q = k if spec.query == "key" else q
    static = {name: w for name, w in weights.items() if name not in spec.trained}
    start = start_state(spec, weights, k.shape[0])
    whole = segment_ids is None and initial_state is None
    if chosen.form == "parallel" and whole and rows.fits(spec, chosen.backend):
        tokens = dict(q=q, k=k, v=v, lr=lr, momentum=momentum, forget=forget)
        out, state = rows.run(spec, static, tokens, start, chosen.prefix, chosen.backend)
    else:
        tokens = head_major(q, k, v, lr, momentum, forget, erase)
        first = None if initial_state is None else resume(initial_state, start, segment_ids)
        out, state = _run(spec, static, tokens, segment_ids, first, start, chosen)
        out = jnp.swapaxes(out, 1, 2)
    if isinstance(spec.order, str):  # explicit spans are one document
        document = last_document(initial_state, segment_ids, k.shape[0])
        state = state._replace(document=document)
    return out, state


class Choice(NamedTuple):
    """How ``ttt`` runs."""

    form: str  # "recurrent", "parallel" or "call", which is one call of a kernel
    prefix: str | None = None  # implementation of the prefix over chunks; None picks
    backend: str | None = "xla"  # of the operations of ttt_kernels; None picks


def _run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    initial_state: State | None,
    start: State,
    chosen: Choice,
) -> tuple[jax.Array, State]:
    """``ttt`` on head-major tokens."""
    first, continued = initial_state or start, initial_state is not None
    form, prefix, backend = chosen
    if continued and is_decode(spec, tokens):
        return decode_one(spec, static, tokens, segment_ids, initial_state, start)
    if not isinstance(spec.order, str):
        if form == "parallel":
            return spans.run_parallel(spec, static, tokens, first, start, prefix, backend)
        return spans.run(spec, static, tokens, first, start, backend)
    documents = segment_ids is not None or first.buffer is not None
    if form == "call" and not (documents and kernel.wants_whole_rows(spec, backend)):
        return kernel.run(spec, static, tokens, segment_ids, first, start, continued, backend)
    chunks = arrange(spec, tokens, segment_ids, first.buffer, continued)
    first = first._replace(buffer=None)
    if form in ("parallel", "call"):
        return parallel.run(spec, static, chunks, first, start, prefix, backend=backend)
    return recurrent.run(spec, static, chunks, first, start, backend)


def choose(
    spec: InnerLoop, mode: Mode, implementation: str | None, channel_gate: bool
) -> Choice:
    """How ``ttt`` runs in a mode; raises where a named one cannot."""
    if mode not in ("auto", "recurrent", "parallel", "kernel"):
        raise ValueError(f"{mode=}: use 'auto', 'recurrent', 'parallel' or 'kernel'")
    serial, no_kernel = parallel.obstacles(spec), kernel.obstacles(spec, channel_gate)
    if mode == "auto":
        if implementation is not None:
            raise ValueError(f"{implementation=} needs a named mode; mode='auto' picks both")
        mode = "recurrent" if serial or parallel.is_dear(spec) else "parallel"
        mode = "kernel" if kernel.wins(spec, channel_gate) else mode
        _log_choice(spec, mode)
    if mode == "kernel" and no_kernel:
        raise ValueError("mode='kernel' cannot run this specification: " + "; ".join(no_kernel))
    if mode == "parallel" and serial:
        raise ValueError("mode='parallel' cannot run this specification: " + "; ".join(serial))
    one_call = not kernel.one_call_obstacles(spec, channel_gate)
    if mode == "kernel":
        form = "call" if one_call else "recurrent" if serial else "parallel"
        return Choice(form, backend=implementation)
    prefixes = tuple(PREFIXES) if mode == "parallel" and delta.obstacles(spec) else ()
    if prefixes and parallel.is_dear(spec):
        prefixes = ("associative_scan",)
    named = isinstance(implementation, str) and implementation in prefixes
    if not named and implementation is not None:
        raise ValueError(f"{implementation=} with {mode=}: use one of {prefixes} or None")
    if mode == "parallel" and implementation is None and spec.chunk_size == 1 and one_call:
        return Choice("call")  # tiles of many one-token chunks: one state a token would not fit
    return Choice(mode, implementation)


@functools.cache
def _log_choice(spec: InnerLoop, mode: str) -> None:
    why = " (the parallel form is an affine scan, O(d³) a chunk)" if parallel.is_dear(spec) else ""
    logging.getLogger("ttt_jax").info("ttt: mode='auto' runs mode=%r%s for %s", mode, why, spec)
