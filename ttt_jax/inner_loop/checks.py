"""Argument checks of ``api.ttt``: all of them before anything is computed."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ttt_jax.inner_loop.own_parts import check_loss, check_net
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.inner_loop.updates import State
from ttt_kernels.arguments import check_array


def check_arguments(
    spec, weights, q, k, v, lr, momentum, forget, segment_ids, state, erase=None
) -> None:
    """Raises ``ValueError`` for the first argument of ``ttt`` that does not fit the others."""
    check_is_spec(spec)
    arrays = dict(q=q, k=k, v=v, lr=lr, momentum=momentum, forget=forget, segment_ids=segment_ids)
    _check_arrays(arrays)
    _check_tokens(spec, q, k, v)
    if spec.target == "value_minus_key" and k.shape != v.shape:
        raise ValueError(
            f"v.shape={v.shape} but k.shape={k.shape}: target='value_minus_key' needs them equal"
        )
    _check_weights(spec, weights, k, v)
    _check_gates(spec, weights, k, lr, momentum, forget)
    _check_erase(spec, k, erase)
    if segment_ids is not None:
        if segment_ids.shape != k.shape[:2]:
            raise ValueError(
                f"segment_ids.shape={segment_ids.shape}: it must be [batch, time] = {k.shape[:2]}"
            )
        if not isinstance(spec.order, str):
            raise ValueError(
                "segment_ids with an explicit order: the spans name tokens of one sequence; call "
                "ttt once for each document"
            )
        if spec.fast_net.mixes_tokens:
            raise ValueError(
                f"segment_ids with {type(spec.fast_net).__name__}: the network reads neighbouring "
                "tokens; call ttt with one image a row"
            )
    if not isinstance(spec.order, str):
        _check_spans(spec, q, k)
    if state is not None:
        _check_state(spec, state, weights, k, v)


def check_is_spec(spec) -> None:
    """Raises ``ValueError`` where ``spec`` is not an ``InnerLoop``."""
    if not isinstance(spec, InnerLoop):
        raise ValueError(f"spec={spec!r}: use an InnerLoop, e.g. ttt_jax.presets.lact_llm()")
    try:
        hash(spec)
    except TypeError as error:
        raise ValueError(
            f"spec cannot be hashed ({error}): write its network and loss as frozen dataclasses, "
            "with numbers, strings and tuples as fields"
        ) from error


def _check_arrays(arguments) -> None:
    """Tokens are arrays of floats, gates too or None; ids of documents are integers or None."""
    fields = dict(lr="rate", momentum="momentum", forget="forget")
    for name, x in arguments.items():
        if x is None and name not in ("q", "k", "v"):
            continue
        if name in fields and isinstance(x, float | int):
            raise ValueError(
                f"{name}={x!r} must be an array that starts with [batch, time, heads]; a constant "
                f"belongs into the specification: {fields[name]}={x!r}"
            )
        check_array(name, x, floating=name != "segment_ids")


def _check_spans(spec, q, k) -> None:
    """Updates read keys, applications queries (or the keys in their place)."""
    read = "k" if spec.query == "key" else "q"
    for name, by in (("k", "update"), (read, "apply")):
        end = max((span.end for span in spec.order if getattr(span, by)), default=0)
        time = (q if name == "q" else k).shape[1]
        if end > time:
            raise ValueError(
                f"order reaches token {end} of {name} in a span with {by}=True, but {name} has "
                f"time={time}; shorten the spans"
            )


def _check_tokens(spec, q, k, v) -> None:
    tied = isinstance(spec.order, str)  # spans may leave k and v shorter than q
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}.shape={x.shape}: it must be [batch, time, heads, dim]")
        if x.dtype != k.dtype:
            raise ValueError(f"{name}.dtype={x.dtype} but k.dtype={k.dtype}: cast them alike")
        if x.shape[:3] != k.shape[:3] and (tied or name != "q"):
            raise ValueError(
                f"{name}.shape={x.shape} but k.shape={k.shape}: batch, time and heads must agree"
            )
    if q.shape != (k.shape[0], (k if tied else q).shape[1], *k.shape[2:]):
        raise ValueError(f"q.shape={q.shape} but k.shape={k.shape}: queries and keys must agree")
    for name, x in (("k", k), ("v", v), ("q", q)):
        if 0 in x.shape:
            raise ValueError(f"{name}.shape={x.shape}: no axis may be empty, a token is needed")


def _check_weights(spec, weights, k, v) -> None:
    net = spec.fast_net
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"weights is a {type(weights).__name__}: it must map names to arrays; make them with "
            "spec.init"
        )
    if set(weights) != set(spec.names):
        raise ValueError(
            f"weights has the names {sorted(weights)}, but {type(net).__name__} needs "
            f"{sorted(spec.names)}; make them with spec.init"
        )
    batch, _, heads, key_dim = k.shape
    for name, w in weights.items():
        check_array(f"weights[{name!r}]", w)
        if k.dtype == jnp.float64 and w.dtype != k.dtype:
            raise ValueError(
                f"weights[{name!r}].dtype={w.dtype} but k.dtype={k.dtype}: the state is as wide as "
                "the weights; cast them to float64, or the tokens to float32"
            )
        if w.ndim not in (3, 4) or w.shape[-3] != heads or (w.ndim == 4 and w.shape[0] != batch):
            raise ValueError(
                f"weights[{name!r}].shape={w.shape}: it must be [heads, in, out] or "
                f"[batch, heads, in, out] with {batch=} and {heads=}; tokens are [batch, time, "
                "heads, dim]"
            )
    given = {name: w.shape[-2:] for name, w in weights.items()}
    widths = {width for shape in given.values() for width in shape}
    fixed = net.static_shapes(key_dim, v.shape[3])
    if spec.order == "token_causal":
        fixed["position_rate"] = (spec.chunk_size, 1)
    if all(given != net.shapes(key_dim, v.shape[3], hidden) | fixed for hidden in widths):
        raise ValueError(
            f"weights have the shapes {given} a head, which do not fit key_dim={key_dim} and "
            f"value_dim={v.shape[3]} of {type(net).__name__}; make them with spec.init"
        )
    of_the_net = tuple(sorted((name, given[name]) for name in (*net.names, *net.static_names)))
    check_net(net, of_the_net, (key_dim, v.shape[3]))
    check_loss(spec.loss, v.shape[3])


def _check_gates(spec, weights, k, lr, momentum, forget) -> None:
    for name, setting, x in (
        ("lr", spec.rate, lr),
        ("momentum", spec.momentum, momentum),
        ("forget", spec.forget, forget),
    ):
        field = "rate" if name == "lr" else name
        if setting == "per_token" and x is None:
            raise ValueError(
                f"{name} is missing: spec.{field}='per_token' needs it, [batch, time, heads]"
            )
        if setting != "per_token" and x is not None:
            raise ValueError(
                f"{name} is given, but spec.{field}={setting!r} does not use it; pass None or set "
                f"{field}='per_token'"
            )
        if x is not None and (x.ndim < 3 or x.shape[:3] != k.shape[:3]):
            raise ValueError(f"{name}.shape={x.shape}: it must start with {k.shape[:3]}")
    trained = {name: weights[name].shape[-2] for name in spec.trained}
    if lr is not None:
        if lr.ndim > 5 or (lr.ndim > 3 and lr.shape[3] not in (1, len(trained))):
            sizes = " or ".join(map(str, sorted({1, len(trained)})))
            raise ValueError(
                f"lr.shape={lr.shape}: its 4th axis must be {sizes}, one rate for each of "
                f"{tuple(trained)}"
            )
        if lr.ndim == 5 and any(width != lr.shape[4] for width in trained.values()):
            raise ValueError(
                f"lr.shape={lr.shape}: one rate a channel needs as many channels as the inputs of "
                f"the trained matrices, {trained}"
            )
    if isinstance(spec.forget, tuple) and len(spec.forget) != k.shape[2]:
        raise ValueError(
            f"spec.forget has {len(spec.forget)} numbers, but heads={k.shape[2]}; give one a head"
        )
    if momentum is not None and momentum.ndim != 3:
        raise ValueError(f"momentum.shape={momentum.shape}: it must be [batch, time, heads]")
    if forget is not None and forget.ndim != 3:
        wide = forget.ndim == 4 and all(w == forget.shape[3] for w in trained.values())
        if not wide:
            raise ValueError(
                f"forget.shape={forget.shape}: it must be [batch, time, heads], or have a 4th axis "
                f"as wide as the inputs of the trained matrices, {trained}"
            )


def _check_erase(spec, k, erase) -> None:
    if (spec.erase is None) != (erase is None):
        raise ValueError(
            f"erase is {'missing' if erase is None else 'given'}, but spec.erase={spec.erase!r}: "
            "pass a pair of keys (read, write) exactly where it is 'per_token'"
        )
    if erase is None:
        return
    if not isinstance(erase, tuple) or len(erase) != 2:
        raise ValueError(f"erase is a {type(erase).__name__}: it must be a pair (read, write)")
    for name, x in zip(("read", "write"), erase, strict=True):
        check_array(f"erase {name} key", x)
        if x.shape != k.shape or x.dtype != k.dtype:
            raise ValueError(
                f"erase {name} key is {x.dtype}{list(x.shape)}: it must be like k, "
                f"{k.dtype}{list(k.shape)}"
            )


def _check_state(spec, state, weights, k, v) -> None:
    if not isinstance(state, State):
        raise ValueError(
            f"initial_state is a {type(state).__name__}: pass the State that ttt returned"
        )
    expected = jax.eval_shape(lambda: _shapes(spec, weights, k, v))
    if jax.tree.structure(state) != jax.tree.structure(expected):
        raise ValueError(
            "initial_state does not have the parts that spec carries (it was made by another "
            f"spec): it has {_parts(state)}, spec needs {_parts(expected)}; start without one"
        )
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), have in zip(paths, jax.tree.leaves(state), strict=True):
        dims = 3 if ".lr" in jax.tree_util.keystr(path) else have.ndim  # lr may have more axes
        if have.shape[:dims] != want.shape[:dims]:
            raise ValueError(
                f"initial_state{jax.tree_util.keystr(path)} has shape {have.shape}, but spec with "
                f"chunk_size={spec.chunk_size} and these arguments need {want.shape}; carry a "
                "state on with the specification and the sizes that made it"
            )


def _parts(state: State) -> str:
    """The names of what a state holds."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return ", ".join(jax.tree_util.keystr(path).strip(".") for path, _ in leaves)


def _shapes(spec, weights, k, v) -> State:
    """A state of the right structure for these arguments, shapes only."""
    from ttt_jax.inner_loop.chunks import Tokens, keeps_buffer, pack_buffer
    from ttt_jax.inner_loop.updates import initial_state

    batch, _, heads, _ = k.shape
    state = initial_state(spec, weights, batch)
    if isinstance(spec.order, str):
        state = state._replace(document=jnp.zeros((batch,), jnp.int32))
    if not keeps_buffer(spec):
        return state

    def gate(setting):
        return jnp.zeros((batch, heads, 0, 1)) if setting == "per_token" else None

    keys, values = (jnp.zeros((batch, heads, 0, x.shape[3]), x.dtype) for x in (k, v))
    tokens = Tokens(keys, keys, values, *map(gate, (spec.rate, spec.momentum, spec.forget)))
    none = jnp.zeros((batch,), jnp.int32)
    return state._replace(buffer=pack_buffer(tokens, spec.window or spec.chunk_size, none))
