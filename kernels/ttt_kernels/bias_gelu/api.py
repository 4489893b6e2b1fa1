"""The public operation `bias_gelu` and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

import jax

from ttt_kernels import compat
from ttt_kernels.arguments import check_array
from ttt_kernels.bias_gelu import mosaic_gpu, xla
from ttt_kernels.choice import choose

Implementation = Literal["xla", "mosaic_gpu"]
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def bias_gelu(
    x: jax.Array, bias: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """z Φ(z) of z = x + bias, with the normal distribution Φ(z) = (1 + erf(z / √2)) / 2.

    The backward pass starts from x; it makes the bias' gradient in the same pass as that of x.

    Args:
      x: [rows, features] floats, no axis empty.
      bias: [features] floats.
      implementation: "xla" (any device), "mosaic_gpu" (one kernel each way for Hopper GPUs), or
        None, which picks the fastest that runs here and logs the choice once. A named
        implementation never falls back.

    Returns:
      Like x; computed in at least float32. The kernels' Φ is off by at most 3e-7.

    Raises:
      ValueError: an argument of the wrong shape or dtype.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: Hendrycks & Gimpel 2016, arXiv 1606.08415.

    >>> import jax.numpy as jnp
    >>> y = bias_gelu(jnp.array([[-1.0, 0.0]]), jnp.array([0.0, 1.0]))
    >>> [round(float(value), 4) for value in y[0]]
    [-0.1587, 0.8413]
    """
    check_array("x", x)
    check_array("bias", bias)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; it must be [rows, features], no axis empty")
    if bias.shape != x.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}; it must be {x.shape[1:]} to match x")
    problem = mosaic_gpu.unsupported(x) or compat.hopper_problem()
    module = choose("bias_gelu", implementation, _MODULES, {"mosaic_gpu": problem})
    return module.bias_gelu(x, bias)
