"""Rules that every public operation has for its arguments, checked before anything is computed."""

from __future__ import annotations

import math
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = float(np.finfo(np.float32).max)


def check_array(name: str, value, *, floating: bool = True) -> None:
    """Checks that an argument is an array, of floats unless `floating` is false.

    Args:
      name: of the argument.
      value: a JAX array (traced ones too) or a NumPy array passes.
      floating: whether its numbers must be floats; else integers.

    Raises:
      ValueError: no array, or numbers of another kind.

    >>> check_array("k", None)
    Traceback (most recent call last):
    ValueError: k=None must be an array; pass a jax.Array or a numpy.ndarray
    """
    if not isinstance(value, jax.Array | np.ndarray):
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"a {type(value).__name__}"
        raise ValueError(f"{name}={shown} must be an array; pass a jax.Array or a numpy.ndarray")
    kind, rule = (jnp.floating, "a float") if floating else (jnp.integer, "an integer")
    if not jnp.issubdtype(value.dtype, kind):
        raise ValueError(f"{name} has dtype {value.dtype}; it must be {rule}, cast it first")


def check_flag(name: str, value) -> None:
    """Checks that an argument is a bool.

    Raises:
      ValueError: it is something else, a string or a number for example.

    >>> check_flag("reverse", "no")
    Traceback (most recent call last):
    ValueError: reverse='no' must be True or False
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_number(name: str, value, least: float = -math.inf) -> None:
    """Checks that an argument is a number of Python or NumPy that float32 holds, from `least` on.

    Raises:
      ValueError: it is something else, an array, a bool or a NaN for example.

    >>> check_number("epsilon", -1.0, least=0)
    Traceback (most recent call last):
    ValueError: epsilon=-1.0 must be a finite float32 number, 0 or more
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST or value < least:
        rule = "" if least == -math.inf else f", {least} or more"
        raise ValueError(f"{name}={value!r} must be a finite float32 number{rule}")


def floating_dtype(name: str, value) -> jnp.dtype:
    """The dtype that an argument names, checked to be one of floats.

    Raises:
      ValueError: it names no dtype, or one of other numbers.

    >>> floating_dtype("dtype", "int8")
    Traceback (most recent call last):
    ValueError: dtype=int8 must be a floating dtype or None; jnp.bfloat16 or jnp.float32 will do
    """
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        shown = repr(value) if dtype is None else dtype
        raise ValueError(
            f"{name}={shown} must be a floating dtype or None; jnp.bfloat16 or jnp.float32 will do"
        )
    return dtype
