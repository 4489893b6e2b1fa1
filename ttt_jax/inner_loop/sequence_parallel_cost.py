"""What cutting a sequence over devices costs beyond the work itself: bytes moved, and waiting."""

import dataclasses
import math

import jax.numpy as jnp

from ttt_jax.inner_loop.sequence_parallel import check_cut, form_of
from ttt_jax.inner_loop.sequence_parallel_exchange import (
    Exchange,
    fewest_bytes,
    ring_hops,
    tail_hops,
)
from ttt_jax.inner_loop.sequence_parallel_pipeline import number_of_groups
from ttt_jax.inner_loop.spec import InnerLoop

_FACTS = 5 * 4  # bytes a row that each device tells the others of its documents


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes that each device receives in a forward pass; a backward pass moves them once more.

    Attributes:
      form: ``"chunks"``, ``"tokens"``, ``"delta"`` (one pass each), ``"spans"`` or ``"pipeline"``.
      states: bytes of states (and of the factors that belong to them); of gradients with spans.
      tokens: bytes of the unfinished chunks at the cuts; 0 where chunks end there.
      documents: bytes of facts about documents.
      work_share: part of the time in which a device works, 1 for one pass.
    """

    form: str
    states: int
    tokens: int
    documents: int
    work_share: float

    @property
    def bytes_received(self) -> int:
        """All of it."""
        return self.states + self.tokens + self.documents


def cost(
    spec: InnerLoop,
    *,
    devices: int,
    batch: int,
    heads: int,
    length: int,
    key_dim: int,
    value_dim: int | None = None,
    hidden_dim: int | None = None,
    dtype="bfloat16",
    documents: bool = False,
    exchange: Exchange | None = None,
    groups: int | None = None,
) -> Cost:
    """Counts what ``sequence_parallel.ttt`` moves, without a carried state.

    With ``S`` the bytes of the matrices of all rows and heads, one pass moves ``(P − 1) S`` by
    all-gather, ``(1 + ⌈log₂(P − 1)⌉) S`` by the ring, for the weights and, with momentum, once more
    for it; the pipeline moves ``(P + G − 1) / G`` whole states and works ``G / (P + G − 1)`` of the
    time. Spans move ``2 (P − 1) / P S`` for each update and inner step, an all-reduce. Factors of
    decays are counted, too, as are the square matrices of delta rules.

    Args:
      spec: the inner loop.
      devices: along the axis, P.
      batch: rows of a device.
      heads: heads of a device.
      length: tokens of a device.
      key_dim: width of a key.
      value_dim: width of a value; ``None`` is ``key_dim``.
      hidden_dim: width of the hidden layer; ``None`` is ``key_dim``.
      dtype: of the tokens.
      documents: whether there are segment ids.
      exchange: as in ``sequence_parallel.ttt``.
      groups: as in ``sequence_parallel.ttt``.

    Returns:
      The ``Cost``.

    Raises:
      ValueError: the inner loop cannot run on a cut sequence.

    Example:
      >>> from ttt_jax.inner_loop import presets
      >>> sizes = dict(devices=4, batch=1, heads=4, length=8192, key_dim=384)
      >>> cost(presets.lact_llm(variant=6), **sizes).bytes_received == 3 * 4 * 384 * 384 * 4
      True
      >>> cost(presets.lact_llm(variant=0), **sizes).work_share
      0.5714285714285714
      >>> cost(presets.lact_nvs([(0, 4, True, True)]), **sizes).states == 6 * 3 * 384 * 384 * 4
      True
    """
    check_cut(spec, length, devices, documents)
    value_dim, hidden_dim = value_dim or key_dim, hidden_dim or key_dim
    shapes = spec.fast_net.shapes(key_dim, value_dim, hidden_dim)
    shapes = {name: shapes[name] for name in spec.trained}
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    rows, sequences = batch, batch * heads
    form = form_of(spec)
    if form == "spans":
        updates = spec.steps * sum(span.update for span in spec.order)
        numbers = sequences * sum(math.prod(shape) for shape in shapes.values())
        moved = updates * numbers * wide * 2 * (devices - 1) // devices
        return Cost(form, moved, 0, 0, 1.0)
    unaligned = documents or length % spec.chunk_size != 0 or spec.window is not None
    tokens = _token_bytes(spec, sequences, key_dim + value_dim, jnp.dtype(dtype).itemsize)
    room = (spec.window or spec.chunk_size) - 1
    hops = tail_hops(devices, length, room, documents, False)
    tail = room * tokens * hops + 4 * rows * max(hops - 1, 0)
    facts = _FACTS * rows * (devices - 1)
    share = 1.0
    if form == "pipeline":
        groups = groups or number_of_groups(devices, sequences)
        share = groups / (devices + groups - 1)
        states = round(_state_numbers(spec, shapes) * sequences * wide / share)
    else:
        chosen = exchange or fewest_bytes(devices)
        hops = devices - 1 if chosen == "all_gather" else ring_hops(devices)
        (width_in, width_out) = shapes[spec.fast_net.last]
        numbers = width_in * (width_out + (width_in if form == "delta" else 0))
        passes = 1 + (spec.momentum is not None)
        decayed = form == "tokens" or (form == "chunks" and spec.forget is not None)
        by_head = decayed + (spec.momentum is not None)
        by_row = form == "chunks" and spec.forget is None and unaligned  # 0 where a document begins
        factors = by_head * sequences + by_row * rows
        states = (passes * numbers * sequences + factors) * wide * hops
    return Cost(form, states, tail if unaligned else 0, facts if unaligned else 0, share)


def describe(spec: InnerLoop) -> str:
    """One sentence on how an inner loop runs on a cut sequence, and what that costs.

    Args:
      spec: the inner loop.

    Example:
      >>> from ttt_jax.inner_loop import presets
      >>> describe(presets.lact_llm(variant=6)).partition(":")[0]
      'Yes, in one pass'
      >>> describe(presets.lact_nvs([(0, 4, True, True)])).partition(":")[0]
      'Yes, every span over all devices'
      >>> describe(presets.vittt_glu()).partition(":")[0]
      'No'
    """
    try:
        check_cut(spec, spec.chunk_size or 1, 2, documents=False)
    except ValueError:
        return "No: an update reads tokens of several devices at once."
    if form_of(spec) == "pipeline":
        return (
            "Yes, as a pipeline: a state waits for the one to its left, so rows and heads go "
            "through in G groups; each of P devices works G/(P+G−1) of the time and receives "
            "(P+G−1)/G states a layer."
        )
    if form_of(spec) == "spans":
        return (
            "Yes, every span over all devices: each has a part of its tokens, and the gradients of "
            "an update are summed, 2(P−1)/P states a device for each inner step."
        )
    times = "twice, for momentum and weights" if spec.momentum is not None else "once"
    if form_of(spec) == "delta":
        times = "once, each with a square matrix that says what is erased (twice the work)"
    return (
        f"Yes, in one pass: states are exchanged {times}; each of P devices receives P−1 states by "
        "all-gather (up to 4 devices) or 1+⌈log₂(P−1)⌉ by a ring, whatever the length."
    )


def _token_bytes(spec: InnerLoop, sequences: int, width: int, itemsize: int) -> int:
    """Bytes of one token of all rows and heads, gates included (one rate a matrix), all float32."""
    gates = len(spec.trained) if spec.rate == "per_token" else 0
    gates += (spec.momentum == "per_token") + (spec.forget == "per_token")
    return sequences * (width * itemsize + gates * 4)


def _state_numbers(spec: InnerLoop, shapes: dict[str, tuple[int, int]]) -> int:
    """Numbers that one head of a state holds."""
    matrices = sum(rows * columns for rows, columns in shapes.values())
    copies = 1 + (spec.momentum is not None)
    if spec.weight_norm is None:
        return copies * matrices
    copies += spec.weight_norm.form == "pre"
    return copies * matrices + sum(columns for _, columns in shapes.values())
