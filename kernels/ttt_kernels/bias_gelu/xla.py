"""GELU in plain JAX, any backend, with its input alone kept for the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_TAIL = (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


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
    wide, normal, _ = _normal(x)
    return (wide * normal).astype(x.dtype)


def _normal(x):
    """x in at least float32, Φ(x) and exp(-x² / 2).

    For 16 bits 1 - Φ(t) = (c1 k + ... + c5 k⁵) exp(-t² / 2) / 2 with k = 1 / (1 + c0 t / √2) for
    t >= 0, to 2e-7 (Abramowitz & Stegun 1964, 7.1.26): erf keeps a GPU longer than memory does.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    bell = jnp.exp(-wide * wide / 2)
    if x.dtype.itemsize > 2:
        return wide, (1 + lax.erf(wide * 2**-0.5)) / 2, bell
    k = 1 / (1 + _TAIL[0] * 2**-0.5 * jnp.abs(wide))
    tail = jnp.zeros_like(k)
    for c in _TAIL[:0:-1]:
        tail = (tail + c) * k
    tail = tail * bell / 2
    return wide, jnp.where(wide < 0, tail, 1 - tail), bell


def _backward(x, error):
    x = lax.optimization_barrier(x)  # else XLA keeps the exponential of the forward pass
    wide, normal, bell = _normal(x)
    slope = normal + wide * bell * (2 * jnp.pi) ** -0.5
    return ((error.astype(wide.dtype) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _backward)
