"""Counts the matmul FLOPs of a traced program."""

import math

import jax
from jax.extend import core


def matmul_flops(function, *args) -> int:
    """2 FLOPs for each multiply-add of every dot_general whose result is used.

    Loop bodies count once for each iteration.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _count(jaxpr, [True] * len(jaxpr.outvars))


def _count(jaxpr, used) -> int:
    live = {v for v, u in zip(jaxpr.outvars, used, strict=True) if u and _is_var(v)}
    total = 0
    for eqn in reversed(jaxpr.eqns):
        used = [v in live for v in eqn.outvars]
        if not any(used):
            continue
        live.update(v for v in eqn.invars if _is_var(v))
        total += _equation(eqn, used)
    return total


def _equation(eqn, used) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * eqn.outvars[0].aval.size
    if name == "scan":
        body = params["jaxpr"].jaxpr  # results of every iteration have an axis more than its own
        pairs = zip(eqn.outvars, body.outvars, used, strict=True)
        used = [u or a.aval.shape == b.aval.shape for a, b, u in pairs]
        return params["length"] * _count(body, used)
    if name == "cond":
        return max(_count(branch.jaxpr, used) for branch in params["branches"])
    if name == "while":
        raise NotImplementedError("the length of a while loop is not known")
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if inner is None:
        return 0
    return _count(getattr(inner, "jaxpr", inner), used)


def _is_var(v) -> bool:
    return not isinstance(v, core.Literal)
