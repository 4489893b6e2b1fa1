"""Sequential updates over a sequence cut over devices: each waits for its left neighbour's state.

Heads and rows do not depend on each other. They are cut into groups, and while a device runs one
group its right neighbour runs the one before: with ``G`` groups on ``P`` devices ``P + G − 1``
rounds, in ``G`` of which a device works. One state of a group moves to the right after each.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.inner_loop import recurrent
from ttt_jax.inner_loop.chunks import Tokens, arrange
from ttt_jax.inner_loop.fast_nets import Weights
from ttt_jax.inner_loop.sequence_parallel_documents import Edge
from ttt_jax.inner_loop.sequence_parallel_exchange import shift
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State

_WORK_SHARE = 0.8  # of the rounds, where there are enough rows and heads


def number_of_groups(devices: int, sequences: int) -> int:
    """How many groups the pipeline takes: the fewest that keep devices at work 80 % of the time.

    Fewer groups are larger products; more leave shorter waits at both ends.

    Args:
      devices: along the axis, P.
      sequences: rows times heads of a device, which the groups divide.

    Returns:
      The smallest divisor ``G`` of ``sequences`` with ``G / (P + G − 1) >= 0.8``, else all of them.

    >>> number_of_groups(4, 4), number_of_groups(4, 32), number_of_groups(1, 32)
    (4, 16, 1)
    """
    for groups in range(1, sequences):
        if sequences % groups == 0 and groups >= _WORK_SHARE * (devices + groups - 1):
            return groups
    return sequences


def run(
    spec: InnerLoop,
    static: Weights,
    tokens: Tokens,
    edge: Edge,
    initial: State,
    start: State,
    axis_name: str,
    groups: int | None,
    backend: str | None = "xla",
) -> tuple[jax.Array, State]:
    """As ``recurrent.run``, for any named order.

    Args:
      spec: the inner loop.
      static: matrices that are not trained.
      tokens: the shard's tokens, head-major.
      edge: how the shard goes on from the left.
      initial: the state before the sequence, without its buffer, the same on all devices.
      start: the state from which a new document starts.
      axis_name: the mesh axis.
      groups: into how many groups rows times heads are cut, or ``None`` for
        ``number_of_groups``.
      backend: of the operations of ``ttt_kernels``.
    """
    batch, heads = tokens.k.shape[:2]
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    groups = groups or number_of_groups(devices, batch * heads)
    constant = isinstance(spec.forget, tuple)
    if constant:
        spec, tokens, edge = _forget_by_token(spec, tokens, edge)
    static = {n: jnp.broadcast_to(w, (batch, *w.shape[-3:])) for n, w in static.items()}
    parts = _split((static, tokens, initial, start), batch, heads, groups)
    edges = _split_edge(edge, batch, heads, groups)

    def work(part, edge, carried):
        static, tokens, initial, start = part
        first = jax.tree.map(lambda a, b: jnp.where(index == 0, a, b), initial, carried)
        chunks = arrange(spec, tokens, edge.segment_ids, edge.buffer, edge.continued)
        if edge.restart is not None:  # the last document may have begun on another device
            chunks = chunks._replace(restart=edge.restart)
        return recurrent.run(spec, static, chunks, first, start, backend)

    def round_of(carried, number):
        group = number - index
        part, edge = jax.tree.map(lambda x: x[jnp.clip(group, 0, groups - 1)], (parts, edges))
        shapes = jax.eval_shape(work, part, edge, carried)

        def wait(*_):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        works = (group >= 0) & (group < groups)
        out, state = lax.cond(works, work, wait, part, edge, carried)
        return shift(state._replace(buffer=None), axis_name), (out, state)

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), parts[2])
    _, found = lax.scan(round_of, nothing, jnp.arange(devices + groups - 1))
    out, state = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, groups), found)
    buffer = state.buffer
    out, state = _join((out, state._replace(buffer=None)), batch, heads)
    if buffer is not None:
        count = buffer.count.reshape(batch, heads)[:, 0]
        fields = _join(buffer._replace(count=None), batch, heads)
        state = state._replace(buffer=fields._replace(count=count))
        if constant:
            state = state._replace(buffer=state.buffer._replace(forget=None))
    return out, state


def _split(tree, batch: int, heads: int, groups: int):
    """``[batch, heads, ...]`` to ``[groups, sequences of a group, 1, ...]``."""
    each = batch * heads // groups
    return jax.tree.map(lambda x: x.reshape(groups, each, 1, *x.shape[2:]), tree)


def _join(tree, batch: int, heads: int):
    """The inverse of ``_split``."""
    return jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[3:]), tree)


def _split_edge(edge: Edge, batch: int, heads: int, groups: int) -> Edge:
    """The same for an edge, most of which is ``[batch, ...]``: repeated for each head."""

    def rows(x):
        x = jnp.repeat(jnp.broadcast_to(x, (batch, *jnp.shape(x)[1:])), heads, 0)
        return x.reshape(groups, -1, *x.shape[1:])

    buffer = edge.buffer
    if buffer is not None:
        fields = _split(buffer._replace(count=None), batch, heads, groups)
        buffer = fields._replace(count=rows(buffer.count))
    plain = jax.tree.map(rows, edge._replace(buffer=None))
    return plain._replace(buffer=buffer)


def _forget_by_token(spec: InnerLoop, tokens: Tokens, edge: Edge):
    """One constant a head becomes a gate of the tokens, which heads apart can carry with them."""
    wide = jnp.promote_types(tokens.k.dtype, jnp.float32)
    constant = jnp.asarray(spec.forget, wide).reshape(1, -1, 1, 1)

    def gate(x):
        return jnp.broadcast_to(constant, (*x.shape[:3], 1))

    buffer = None if edge.buffer is None else edge.buffer._replace(forget=gate(edge.buffer.k))
    spec = dataclasses.replace(spec, forget="per_token")
    return spec, tokens._replace(forget=gate(tokens.k)), edge._replace(buffer=buffer)
