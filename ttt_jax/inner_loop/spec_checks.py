"""Checks of an ``InnerLoop``: values that a field cannot have, fields that exclude each other."""

from ttt_jax.inner_loop.fast_nets import FastNet, Linear, OuterProductNet
from ttt_jax.inner_loop.losses import Loss
from ttt_jax.inner_loop.parts import (
    NewtonSchulz,
    Span,
    WeightNorm,
    finite,
    fraction,
    one_of,
    whole_number,
)
from ttt_kernels.arguments import check_flag

ORDERS = ("apply_then_update", "update_then_apply", "token_causal")


def check_spec(spec) -> None:
    """Raises ``ValueError`` for the first field of ``spec`` that is wrong or excludes another."""
    if not isinstance(spec.fast_net, FastNet):
        raise ValueError(f"fast_net={spec.fast_net!r}: use a FastNet, e.g. fast_nets.SwiGLU()")
    if not spec.fast_net.names:
        raise ValueError(f"{type(spec.fast_net).__name__} must define names, those of its matrices")
    if not isinstance(spec.loss, Loss):
        raise ValueError(f"loss={spec.loss!r}: use a Loss, e.g. losses.DotProduct()")
    finite("fast_net.init_scale", spec.fast_net.init_scale, least=0)
    finite("loss.scale", spec.loss.scale)
    for name in ("clip", "forget_first"):
        check_flag(name, getattr(spec, name))
    one_of("update", spec.update, ("all", "last_layer"))
    one_of("target", spec.target, ("value", "value_minus_key"))
    one_of("direction", spec.direction, ("descent", "ascent"))
    one_of("query", spec.query, ("query", "key"))
    one_of("gradient_at", spec.gradient_at, ("state", "start"))
    if spec.update == "last_layer" and spec.fast_net.last is None:
        raise ValueError(
            f"update='last_layer': {type(spec.fast_net).__name__} has no linear last layer; "
            "use update='all'"
        )
    whole_number("steps", spec.steps)
    for name in ("chunk_size", "window"):
        if getattr(spec, name) is not None:  # None: the whole sequence, and the chunk alone
            whole_number(name, getattr(spec, name))
    for name, part in (("orthogonalise", NewtonSchulz), ("weight_norm", WeightNorm)):
        value = getattr(spec, name)
        if not isinstance(value, part | None):
            raise ValueError(f"{name}={value!r}: use a {part.__name__}, e.g. {part()!r}, or None")
    _check_order(spec.order, spec.chunk_size)
    _check_gates(spec)
    _check_window(spec)
    _check_token_causal(spec)
    _check_erase(spec)
    if spec.clip and spec.orthogonalise is not None:
        raise ValueError("clip=True with orthogonalise: both shape the update; keep one of them")
    if spec.fast_net.mixes_tokens and (
        spec.chunk_size is not None or spec.order != "update_then_apply"
    ):
        raise ValueError(
            f"chunk_size={spec.chunk_size}, order={spec.order!r}: {type(spec.fast_net).__name__} "
            "needs all tokens at once; use chunk_size=None and order='update_then_apply'"
        )


def _check_gates(spec) -> None:
    if isinstance(spec.rate, tuple) and len(spec.rate) != len(spec.trained):
        raise ValueError(
            f"rate={spec.rate} has {len(spec.rate)} numbers for the trained matrices "
            f"{spec.trained}; give one for each"
        )
    if spec.erase is not None:
        one_of("erase", spec.erase, ("per_token",))
    for name, check in (("rate", finite), ("momentum", fraction), ("forget", fraction)):
        value = getattr(spec, name)
        if isinstance(value, str) and value != "per_token":
            raise ValueError(f"{name}={value!r}: use 'per_token' or a number")
        if not isinstance(value, str) and (value is not None or name == "rate"):
            many = isinstance(value, tuple) and value and name != "momentum"
            for number in value if many else (value,):
                check(name, number)
    if spec.forget_first and spec.forget is None:
        raise ValueError("forget_first=True with forget=None: nothing is forgotten; set forget")
    if spec.forget_first and spec.gradient_at == "start":
        raise ValueError(
            "forget_first=True with gradient_at='start': gradients are not taken at the forgotten "
            "state; keep one of them"
        )


def _check_order(order, chunk_size: int | None) -> None:
    if isinstance(order, str):
        one_of("order", order, ORDERS)
        if order != "update_then_apply" and chunk_size is None:
            raise ValueError(
                f"chunk_size=None with order={order!r}: the whole sequence would be the last "
                "chunk, which never updates; give a chunk_size or use 'update_then_apply'"
            )
        return
    if not isinstance(order, tuple) or not order or not all(isinstance(s, Span) for s in order):
        raise ValueError(f"order={order!r}: use one of {ORDERS} or a tuple of Span")
    applied = sorted((span.start, span.end) for span in order if span.apply)
    for (_, end), (start, _) in zip(applied, applied[1:], strict=False):
        if start < end:
            raise ValueError(
                f"order={order!r} applies token {start} twice; let the applied spans not overlap"
            )


def _check_window(spec) -> None:
    if spec.window is None:
        return
    by_token = spec.order == "update_then_apply" and spec.chunk_size == 1
    if spec.order != "apply_then_update" and not by_token:
        raise ValueError(
            f"window={spec.window} with order={spec.order!r} and chunk_size={spec.chunk_size}: use "
            "order='apply_then_update', or chunk_size=1 with 'update_then_apply'"
        )
    if spec.window < spec.chunk_size or spec.window % spec.chunk_size:
        raise ValueError(
            f"window={spec.window}: it must be a multiple of chunk_size={spec.chunk_size}"
        )


def _check_token_causal(spec) -> None:
    if spec.order != "token_causal":
        return
    if not isinstance(spec.fast_net, OuterProductNet):
        raise ValueError(
            f"order='token_causal': {type(spec.fast_net).__name__} must define factors (derive it "
            "from fast_nets.OuterProductNet) and apply its matrices by fast_nets.dense"
        )
    for name in ("momentum", "orthogonalise", "weight_norm", "forget", "erase"):
        if getattr(spec, name) is not None:
            raise ValueError(
                f"{name}={getattr(spec, name)!r} with order='token_causal': the weights of each "
                f"token are plain sums of gradients there; use {name}=None or another order"
            )
    if spec.clip or spec.steps > 1 or spec.loss.reduction != "sum":
        raise ValueError(
            f"clip={spec.clip}, steps={spec.steps}, loss.reduction={spec.loss.reduction!r} with "
            "order='token_causal': use clip=False, steps=1 and reduction='sum'"
        )


def _check_erase(spec) -> None:
    if spec.erase is None:
        return
    if not isinstance(spec.fast_net, Linear):
        raise ValueError(
            f"erase with fast_net={type(spec.fast_net).__name__}: it reads and writes a linear "
            "state; use fast_nets.Linear()"
        )
    if (spec.chunk_size, spec.order, spec.steps, spec.window) != (1, "update_then_apply", 1, None):
        raise ValueError(
            f"erase with chunk_size={spec.chunk_size}, order={spec.order!r}, steps={spec.steps}, "
            f"window={spec.window}: it erases token by token; use chunk_size=1, "
            "order='update_then_apply', steps=1, window=None"
        )
