"""Depthwise 3×3 convolutions in plain JAX, as nine shifted products: any backend.

A grouped convolution of the compiler is slow to differentiate and may be gathered over the batch
when it is sharded.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def depthwise_conv(x, kernel, bias, stride: int, residual: bool) -> jax.Array:
    """`ttt_kernels.depthwise_conv`; each addition is rounded to x's dtype."""
    y = _convolve(x, kernel, stride)
    y = y if bias is None else y + bias.astype(x.dtype)
    return x + y if residual else y


# The gradient is written out, because that of nine slices is nine paddings and sums.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve(x, kernel, stride: int):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    kernel = kernel.astype(x.dtype).astype(wide)
    shifted = _neighbours(x, stride)
    return sum(y.astype(wide) * kernel[index] for index, y in enumerate(shifted)).astype(x.dtype)


def _forward(x, kernel, stride):
    return _convolve(x, kernel, stride), (x, kernel)


def _backward(stride, residuals, error):
    x, kernel = residuals
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # Image by image, then over images: a GPU does that nearly at the speed of its memory.
    by_kernel = [
        jnp.sum(jnp.sum(y.astype(wide) * error.astype(wide), axis=(1, 2)), axis=0)
        for y in _neighbours(x, stride)
    ]
    spread = [(0, size - (n - 1) * stride - 1, stride - 1)
              for size, n in zip(x.shape[1:3], error.shape[1:3], strict=True)]  # fmt: skip
    spread = lax.pad(error, jnp.zeros((), error.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
    by_x = _convolve(spread, kernel[::-1], 1)
    return by_x, jnp.stack(by_kernel).astype(kernel.dtype)


_convolve.defvjp(_forward, _backward)


def _neighbours(x, stride):
    """The nine shifted images [batch, ceil(height / stride), …], from above left on."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return [
        padded[:, row : row + height : stride, column : column + width : stride]
        for row in range(3)
        for column in range(3)
    ]
