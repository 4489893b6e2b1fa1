"""Test-time training on a sequence that is cut over the devices of a mesh axis.

``ttt`` is called inside ``jax.shard_map`` with each device's stretch of the tokens and gives what
``ttt_jax.ttt`` gives for the whole sequence. Where no update depends on the state it is one pass:
each device sums up its chunks, a prefix over devices gives it the state at its left edge.
Sequential updates run as a pipeline over heads and rows; an explicit list of spans, each of which
all devices share, sums every update over the devices.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.inner_loop import delta, spans
from ttt_jax.inner_loop import sequence_parallel_forms as forms
from ttt_jax.inner_loop import sequence_parallel_pipeline as pipeline
from ttt_jax.inner_loop.api import Choice, Mode, choose
from ttt_jax.inner_loop.checks import check_arguments
from ttt_jax.inner_loop.chunks import Tokens, head_major
from ttt_jax.inner_loop.fast_nets import Linear, Weights
from ttt_jax.inner_loop.sequence_parallel_documents import left_edge
from ttt_jax.inner_loop.sequence_parallel_exchange import EXCHANGES, Exchange
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_jax.inner_loop.updates import initial_state as start_state


def ttt(
    spec: InnerLoop,
    weights: Weights,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    lr: jax.Array | None = None,
    momentum: jax.Array | None = None,
    forget: jax.Array | None = None,
    erase: tuple[jax.Array, jax.Array] | None = None,
    segment_ids: jax.Array | None = None,
    initial_state: State | None = None,
    mode: Mode = "auto",
    implementation: str | None = None,
    exchange: Exchange | None = None,
    groups: int | None = None,
) -> tuple[jax.Array, State]:
    """``ttt_jax.ttt`` on one device's stretch of a sequence, inside ``jax.shard_map``.

    Device ``p`` of ``axis_name`` holds the ``p``-th of equal stretches. Chunks and documents are
    those of the whole sequence: both may lie across the cuts (tokens of unfinished chunks then
    move to the right, too; without documents a stretch that is a multiple of ``chunk_size`` saves
    that). Spans count a device's own tokens: span ``n`` of the whole is the union of the devices'
    spans ``n``, within which order does not matter. Use ``check_vma=False``.

    Args:
      spec: the inner loop.
      weights: initial fast weights, the same on all devices of the axis.
      q: the stretch's queries, ``[batch, time / devices, heads, key_dim]``.
      k, v: its keys and values, as in ``ttt_jax.ttt``.
      axis_name: the mesh axis over which time is cut.
      lr, momentum, forget, erase: its gates, as in ``ttt_jax.ttt``.
      segment_ids: ``[batch, time / devices]``, ids of the whole sequence's documents.
      initial_state: the state that the sequence continues, the same on all devices.
      mode: ``"parallel"``, ``"kernel"`` (kernels on each device), ``"recurrent"`` (the pipeline)
        or ``"auto"``; a named mode runs or raises. Spans run one after another in each.
      implementation: as in ``ttt_jax.ttt``.
      exchange: of states: ``"all_gather"``, ``"ring"``, or ``None`` for the fewest bytes.
      groups: of rows times heads in the pipeline, or ``None`` for ``number_of_groups``.

    Returns:
      The stretch's outputs, and the state after its last token; the sequence's final state is the
      last device's, see ``final_state``.

    Raises:
      ValueError: as ``ttt_jax.ttt``, and for a specification that needs all tokens on one device;
        the message names the field, the cut and the way out.

    Source: *Test-Time Training with KV Binding Is Secretly Linear Attention*, Theorems 5.2 and 5.3:
    what a stretch adds to the state does not depend on the state.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from ttt_jax.inner_loop import presets
      >>> spec = presets.lact_llm(variant=6, chunk_size=4)
      >>> weights = spec.init(jax.random.key(0), heads=2, key_dim=8)
      >>> x = jax.random.normal(jax.random.key(1), (1, 8, 2, 8))
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("seq",), auto, devices=jax.devices()[:1])
      >>> local = lambda w, x: ttt(spec, w, x, x, x, axis_name="seq")[0]
      >>> jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "seq")),
      ...                       out_specs=P(None, "seq"), check_vma=False))(weights, x).shape
      (1, 8, 2, 8)
    """
    check_arguments(
        spec, weights, q, k, v, lr, momentum, forget, segment_ids, initial_state, erase
    )
    if exchange not in (None, *EXCHANGES):
        raise ValueError(f"{exchange=}: use one of {EXCHANGES} or None")
    chosen = _choose(spec, mode, implementation, delta.has_channel_gate(forget))
    devices = lax.axis_size(axis_name)
    check_cut(spec, k.shape[1], devices, segment_ids is not None, axis_name)
    tokens = head_major(q, k, v, lr, momentum, forget, erase)
    if spec.query == "key":
        tokens = tokens._replace(q=tokens.k)
    start = start_state(spec, weights, k.shape[0])
    static = {name: w for name, w in weights.items() if name not in spec.trained}
    if chosen.form == "spans":
        carried = initial_state or start
        out, state = spans.run(spec, static, tokens, carried, start, chosen.backend, axis_name)
    else:
        out, state = _run(
            spec, static, tokens, segment_ids, initial_state, start, axis_name, chosen, exchange,
            groups,
        )  # fmt: skip
    return jnp.swapaxes(out, 1, 2), state


def _run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    segment_ids: jax.Array | None,
    initial_state: State | None,
    start: State,
    axis_name: str,
    chosen: Choice,
    exchange: Exchange | None,
    groups: int | None,
) -> tuple[jax.Array, State]:
    """``ttt`` on head-major tokens of consecutive stretches."""
    form, prefix, backend = chosen
    rows, heads = tokens.k.shape[:2]
    if form == "pipeline" and rows * heads % (groups or 1):
        raise ValueError(f"{groups=} must divide rows times heads of a device, {rows} * {heads}")
    edge = left_edge(spec, tokens, segment_ids, initial_state, axis_name)
    first = (initial_state or start)._replace(buffer=None, document=None)
    arguments = (spec, static, tokens, edge, first, start, axis_name)
    if form == "pipeline":
        out, state = pipeline.run(*arguments, groups, backend)
    elif form == "chunks":
        out, state = forms.run_chunks(*arguments, exchange, prefix, backend)
    else:
        by_token = forms.run_tokens if form == "tokens" else forms.run_delta
        out, state = by_token(*arguments, exchange, backend)
    return out, state._replace(document=edge.document)


def final_state(state, axis_name: str):
    """The state after the whole sequence, on every device: the last one's.

    Args:
      state: the state that ``ttt`` returned on each device, or a part of it.
      axis_name: the mesh axis.

    Returns:
      The last device's; an all-reduce of its size.
    """
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return jax.tree.map(lambda x: lax.psum(jnp.where(last, x, 0), axis_name), state)


def form_of(spec: InnerLoop) -> str:
    """How ``mode="auto"`` runs an inner loop on a cut sequence.

    Args:
      spec: the inner loop; its forget gate has one number a head.

    Returns:
      ``"chunks"``, ``"tokens"`` or ``"delta"``, one pass each, ``"spans"`` or ``"pipeline"``.

    >>> from ttt_jax.inner_loop import presets
    >>> [form_of(presets.lact_llm(n)) for n in (0, 2)]
    ['pipeline', 'chunks']
    >>> form_of(presets.mamba2()), form_of(presets.deltanet())
    ('tokens', 'delta')
    """
    return _choose(spec, "auto", None, False).form


def _choose(
    spec: InnerLoop, mode: Mode, implementation: str | None, channel_gate: bool
) -> Choice:
    """The form that runs, with its implementation; raises where a named mode has none."""
    chosen = choose(spec, mode, implementation, channel_gate)
    if not isinstance(spec.order, str):
        return chosen._replace(form="spans")
    if chosen.form == "recurrent":
        return chosen._replace(form="pipeline")
    if spec.loss.state_free and not spec.erase and not channel_gate:
        by_token = spec.chunk_size == 1 and spec.order == "update_then_apply"
        one_call = chosen.form == "call" and by_token
        return chosen._replace(form="tokens" if one_call else "chunks")
    linear = isinstance(spec.fast_net, Linear) and spec.target == "value"
    if chosen.form == "call" and linear:
        return chosen._replace(form="delta")
    if mode == "auto":
        return Choice("pipeline")
    raise ValueError(
        f"mode={mode!r} with fast_net={type(spec.fast_net).__name__}, loss="
        f"{type(spec.loss).__name__}, target={spec.target!r}, chunk_size={spec.chunk_size} on a "
        "cut sequence: use mode='recurrent', or what ttt_kernels.delta_rule runs with "
        "fast_nets.Linear() and target='value'"
    )


def check_cut(
    spec: InnerLoop, length: int, devices: int, documents: bool, axis_name: str = "seq"
) -> None:
    """Refuses inner loops that cannot run on a cut sequence.

    Args:
      spec: the inner loop.
      length: tokens of one device.
      devices: along the axis.
      documents: whether there are segment ids.
      axis_name: the mesh axis.

    Raises:
      ValueError: naming the field, sequence length, chunk size and devices.
    """
    cut = f"sequence_length={length * devices} over mesh.{axis_name}={devices}"
    by_spans = not isinstance(spec.order, str)
    if spec.fast_net.mixes_tokens or (spec.chunk_size is None and not by_spans):
        raise ValueError(
            f"one chunk of all tokens with {cut}: the update reads tokens of several devices at "
            f"once; use mesh.{axis_name}=1"
        )
    inclusive = spec.order == "update_then_apply" and spec.chunk_size > 1
    if inclusive and (documents or length % spec.chunk_size):
        why = "packed documents" if documents else f"{length} tokens a device"
        raise ValueError(
            f"order='update_then_apply' with chunk_size={spec.chunk_size} and {cut}: with {why} a "
            "chunk may lie across a cut, and its first tokens would wait for its last; use "
            "'apply_then_update', or cuts at multiples of chunk_size and no segment_ids"
        )
