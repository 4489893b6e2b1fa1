"""Argument checks of `InnerLoopLayer` and of its control: before anything is made or computed."""

import math

import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.mixers import TokenInfo
from ttt_kernels.arguments import check_array


def check_sizes(hidden_size, heads, head_dim, convolution) -> None:
    """Raises `ValueError` for the first size that is none, or does not fit the others.

    >>> check_sizes(32, 3, None, 4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: hidden_size=32 is no multiple of heads=3: change one of them, or give head_dim=...
    """
    for name, value, least in (
        ("hidden_size", hidden_size, 1),
        ("heads", heads, 1),
        ("head_dim", 1 if head_dim is None else head_dim, 1),
        ("convolution", convolution, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    if head_dim is None and hidden_size % heads:
        raise ValueError(
            f"{hidden_size=} is no multiple of {heads=}: change one of them, or give head_dim=, "
            "which needs not divide the width"
        )


def check_numerics(stddev, dtype, rngs) -> None:
    """Raises `ValueError` for no standard deviation, no floating dtype, or no random streams."""
    number = isinstance(stddev, int | float) and not isinstance(stddev, bool)
    if not number or not 0 <= stddev < math.inf:
        raise ValueError(f"{stddev=} must be a finite number of at least 0, as 0.02")
    try:
        floating = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"{dtype=} must name a floating dtype: 'float32' or 'bfloat16' will do")
    if not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"{rngs=} must be random streams; pass nnx.Rngs(0)")


def check_gates(spec: InnerLoop, tie_forget: bool, channel_forget: bool) -> None:
    """Raises `ValueError` where an option of the forget gate does not fit the specification."""
    if (tie_forget or channel_forget) and spec.forget != "per_token":
        name = "tie_forget" if tie_forget else "channel_forget"
        raise ValueError(f"{name}=True needs spec.forget='per_token', which is {spec.forget!r}")
    if tie_forget and (spec.rate != "per_token" or channel_forget):
        raise ValueError(
            f"tie_forget=True makes one gate a head from lr: it needs spec.rate='per_token' "
            f"({spec.rate!r}) and {channel_forget=} to be False"
        )


def check_tokens(x, info, hidden_size: int) -> None:
    """Raises `ValueError` where `x` are no tokens of the layer's width, or `info` is not theirs."""
    check_array("x", x)
    if x.ndim != 3 or x.shape[2] != hidden_size:
        raise ValueError(
            f"x.shape={x.shape}: it must be [batch, time, {hidden_size}]; the last axis is the "
            "hidden_size that the layer was made with"
        )
    if 0 in x.shape:
        raise ValueError(f"x.shape={x.shape}: no axis may be empty, a token is needed")
    if info is not None and not isinstance(info, TokenInfo):
        raise ValueError(
            f"info is a {type(info).__name__}: leave it out where every row is one document, else "
            "pass a ttt_jax.layers.mixers.TokenInfo"
        )
