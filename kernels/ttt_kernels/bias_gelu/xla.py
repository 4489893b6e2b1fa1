"""GELU in plain JAX, any backend, with its input alone kept for the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def bias_gelu(x, bias) -> jax.Array:
    """`ttt_kernels.bias_gelu`; the sum is rounded to x's dtype."""
    return gelu(x + bias.astype(x.dtype))


@jax.custom_vjp
def gelu(x):
    """x Φ(x) with the normal distribution Φ(x) = (1 + erf(x / √2)) / 2 (Hendrycks & Gimpel 2016).

    Differentiated term by term it would keep four arrays of its input's size, each rounded to
    x's dtype. Here the backward pass starts from the input, in float32.

    Args:
      x: any shape, any float dtype.

    Returns:
      Like x; computed in at least float32.

    >>> [round(float(y), 4) for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1587, 0.0, 0.8413]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * _normal(wide)).astype(x.dtype)


def _normal(x):
    return (1 + lax.erf(x * 2**-0.5)) / 2


def _backward(x, error):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    density = jnp.exp(-wide * wide / 2) * (2 * jnp.pi) ** -0.5
    slope = _normal(wide) + wide * density
    return ((error.astype(wide.dtype) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _backward)
