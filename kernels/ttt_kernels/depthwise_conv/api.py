"""The public operation `depthwise_conv` and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

import jax

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_flag
from ttt_kernels.choice import choose
from ttt_kernels.depthwise_conv import mosaic_gpu, xla

Implementation = Literal["xla", "mosaic_gpu"]
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def depthwise_conv(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    stride: int = 1,
    residual: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """y[p, c] = bias[c] + sum_j kernel[j, c] x[p + j, c] over the 3 x 3 neighbours j of p.

    Pixels outside are zero; a cross-correlation, as in PyTorch. With `residual`, x + y.

    Args:
      x: [batch, height, width, channels] floats, no axis empty.
      kernel: [9, channels] floats, rows of the 3 x 3 window one after another.
      bias: [channels] floats, or None for 0.
      stride: 1 or 2; outputs are at every stride-th row and column, from the first.
      residual: adds x; needs stride 1.
      implementation: "xla" (any device), "mosaic_gpu" (one kernel each way for Hopper GPUs), or
        None, which picks the fastest that runs here and logs the choice once. A named
        implementation never falls back.

    Returns:
      [batch, ceil(height / stride), ceil(width / stride), channels] in x's dtype, summed in at
      least float32; differentiable in every array.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    >>> import jax.numpy as jnp
    >>> image = jnp.arange(1.0, 5.0).reshape(1, 2, 2, 1)
    >>> depthwise_conv(image, jnp.ones((9, 1)), jnp.ones(1)).ravel().tolist()
    [11.0, 11.0, 11.0, 11.0]
    """
    check_array("x", x)
    check_array("kernel", kernel)
    if bias is not None:
        check_array("bias", bias)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"x has shape {x.shape}; it must be [batch, height, width, channels], no axis empty"
        )
    channels = x.shape[-1]
    for name, array, shape in (("kernel", kernel, (9, channels)), ("bias", bias, (channels,))):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape} to match x")
    check_flag("residual", residual)
    if type(stride) is not int or stride not in (1, 2) or (residual and stride != 1):
        raise ValueError(f"{stride=} must be 1 or 2, and 1 with {residual=}")
    problem = mosaic_gpu.unsupported(x, stride) or compat.hopper_problem()
    module = choose("depthwise_conv", implementation, _MODULES, {"mosaic_gpu": problem})
    return module.depthwise_conv(x, kernel, bias, stride, residual)
