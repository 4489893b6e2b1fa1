"""Attention and the inner loop on a mesh: each device takes its own rows, heads and tokens.

Rows and heads do not see each other, so that under ``jax.shard_map`` nothing is moved for them; the
compiler, which does not know that, would gather what a kernel reads. Where the mesh cuts sequences
(``mesh.seq``) the functions for cut sequences run.
"""

import functools

import jax

from ttt_jax.inner_loop import sequence_parallel
from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.attention import causal_attention
from ttt_jax.layers.attention_halo import halo_attention
from ttt_jax.sharding import LOGICAL_RULES, on_each_device, sequence_axis

_TOKENS = ("batch", "seq", "heads", None)


def sharded_attention(q, k, v, *, window=None, documents=None, implementation="auto"):
    """`causal_attention` on the ambient mesh; arguments and result as there, without a cache.

    Args:
      q: [batch, time, heads, head_dim].
      k: likewise.
      v: likewise.
      window: tokens that a query sees, or None.
      documents: [batch, time], int32, or None.
      implementation: as in `causal_attention`.

    Returns:
      Like q.

    Raises:
      ValueError: as in `causal_attention`, or if mesh.seq does not divide the time.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 6, 2, 8))
    >>> sharded_attention(x, x, x, window=4).shape
    (1, 6, 2, 8)
    """
    axis = sequence_axis(q.shape[1])
    attention = causal_attention
    if axis is not None:
        attention = functools.partial(halo_attention, axis_name=axis)

    def local(q, k, v, *documents):
        documents = documents[0] if documents else None
        options = dict(window=window, documents=documents, implementation=implementation)
        return attention(q, k, v, **options)

    arrays, names = [q, k, v], [_TOKENS] * 3
    if documents is not None:
        arrays.append(documents)
        names.append(_TOKENS[:2])
    return on_each_device(local, arrays, names, _TOKENS)


def sharded_ttt(
    spec: InnerLoop,
    weights,
    q,
    k,
    v,
    *,
    segment_ids=None,
    mode: str = "auto",
    implementation: str | None = None,
    rows: str = "batch",
    **gates,
):
    """`ttt_jax.ttt` on the ambient mesh, from initial weights, for training and evaluation.

    Args:
      spec: the inner loop.
      weights: initial fast weights, name to [heads, in, out].
      q: [batch, time, heads, key_dim].
      k: likewise.
      v: [batch, time, heads, value_dim].
      segment_ids: [batch, time] or None.
      mode: as in `ttt_jax.ttt`.
      implementation: likewise.
      rows: logical name of the rows; "images" are never cut themselves.
      **gates: `lr`, `momentum` and `forget` as in `ttt_jax.ttt`, [batch, time, heads, ...].

    Returns:
      (outputs [batch, time, heads, value_dim], the trained weights after the last token, name to
      [batch, heads, in, out], without gradient).

    Raises:
      ValueError: as `ttt_jax.ttt` and `sequence_parallel.ttt`.

    >>> from ttt_jax.inner_loop import presets
    >>> spec = presets.lact_llm(variant=6, chunk_size=4)
    >>> x = jax.numpy.ones((1, 6, 2, 8))
    >>> out, final = sharded_ttt(spec, spec.init(jax.random.key(0), 2, 8), x, x, x)
    >>> out.shape, final["w"].shape
    ((1, 6, 2, 8), (1, 2, 8, 8))
    """
    cut = rows == "batch"
    axis = sequence_axis(q.shape[1]) if cut else None
    by_token = (rows, "seq" if cut else None, "heads", None)
    tokens = {"q": q, "k": k, "v": v, **gates}
    if segment_ids is not None:
        tokens["segment_ids"] = segment_ids
    arrays = [*weights.values(), *tokens.values()]
    names = [("heads", None, None)] * len(weights)
    names += [by_token[: x.ndim] for x in tokens.values()]

    def local(*arrays):
        parts = dict(zip(weights, arrays[: len(weights)], strict=True))
        rest = dict(zip(tokens, arrays[len(weights) :], strict=True))
        options = dict(mode=mode, implementation=implementation)
        if axis is None:
            out, state = ttt(spec, parts, **rest, **options)
            return out, jax.lax.stop_gradient(state.weights)
        out, state = sequence_parallel.ttt(spec, parts, **rest, axis_name=axis, **options)
        final = jax.lax.stop_gradient(state.weights)
        return out, sequence_parallel.final_state(final, axis)

    trained = {name: (rows, "heads", None, None) for name in spec.trained}
    return on_each_device(local, arrays, names, (by_token, trained))


def sharded_spans(
    spec: InnerLoop, weights, q, k, v, *, parts=1, initial_state=None, mode="auto", **gates
):
    """`ttt_jax.ttt` over explicit spans on the ambient mesh.

    Args:
      spec: the inner loop, whose order is a tuple of spans, in tokens of a row.
      weights: initial fast weights, name to [heads, in, out].
      q: [parts · batch, time, heads, key_dim]; row p · batch + b is part p of row b, and span n of
        the whole row is the union of its parts' spans n.
      k: likewise.
      v: [parts · batch, time, heads, value_dim].
      parts: 1, or the devices along mesh.seq: each has a part, and updates are summed over them
        (an all-reduce of the gradients' size in each inner step).
      initial_state: the state to go on from, or None.
      mode: as in `ttt_jax.ttt`.
      **gates: `lr`, `momentum` and `forget` as in `ttt_jax.ttt`, rows and time as q.

    Returns:
      (outputs [parts · batch, time, heads, value_dim], the state after the last span, whose rows
      are [batch]).

    Raises:
      ValueError: as `ttt_jax.ttt`.

    >>> from ttt_jax.inner_loop import presets
    >>> spec = presets.lact_nvs([(0, 4, True, False), (0, 6, False, True)])
    >>> x, rates = jax.numpy.ones((1, 6, 2, 8)), jax.numpy.full((1, 6, 2, 3), 0.01)
    >>> out, state = sharded_spans(spec, spec.init(jax.random.key(0), 2, 8), x, x, x, lr=rates)
    >>> out.shape, state.weights["w1"].shape
    ((1, 6, 2, 8), (1, 2, 8, 8))
    """
    run = ttt
    if parts > 1:
        run = functools.partial(sequence_parallel.ttt, axis_name=LOGICAL_RULES["seq"][0])
    tokens = {"q": q, "k": k, "v": v, **gates}
    tokens = {name: x.reshape(parts, -1, *x.shape[1:]) for name, x in tokens.items()}
    carried, structure = jax.tree.flatten(initial_state)
    arrays = [*weights.values(), *tokens.values(), *carried]
    row_of_head, by_part = ("batch", "heads", None, None), ("seq", "batch", None, "heads", None)
    names = [("heads", None, None)] * len(weights)
    names += [by_part[: x.ndim] for x in tokens.values()] + [row_of_head] * len(carried)

    def local(*arrays):
        own = dict(zip(weights, arrays, strict=False))
        rest = zip(tokens, arrays[len(weights) :], strict=False)
        rest = {name: x[0] for name, x in rest}  # a device has one part of each row
        state = jax.tree.unflatten(structure, arrays[len(weights) + len(tokens) :])
        out, state = run(spec, own, **rest, initial_state=state, mode=mode)
        return out[None], state

    # All leaves of a state are [batch, heads, ...]: one tuple of names serves them.
    out, state = on_each_device(local, arrays, names, (by_part, row_of_head))
    return out.reshape(*q.shape[:-1], -1), state
