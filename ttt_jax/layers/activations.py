"""Activations that keep their input alone for the backward pass.

Differentiated term by term, as JAX does by itself, a GELU keeps four arrays of its input's size
and rounds each to bfloat16. Here the backward pass starts from the input, in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ttt_jax.layers.rms_norm import at_least_float32


@jax.custom_vjp
def gelu(x):
    """x Φ(x) with the normal distribution Φ(x) = (1 + erf(x / √2)) / 2 (Hendrycks & Gimpel 2016).

    Args:
      x: any shape, any float dtype.

    Returns:
      Like x; computed in at least float32.

    >>> [round(float(y), 4) for y in gelu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.1587, 0.0, 0.8413]
    """
    wide = x.astype(at_least_float32(x.dtype))
    return (wide * _normal(wide)).astype(x.dtype)


def _normal(x):
    return (1 + lax.erf(x * 2**-0.5)) / 2


def _gelu_backward(x, error):
    wide = x.astype(at_least_float32(x.dtype))
    density = jnp.exp(-wide * wide / 2) * (2 * jnp.pi) ** -0.5
    slope = _normal(wide) + wide * density
    return ((error.astype(wide.dtype) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def silu(x):
    """x σ(x) with the logistic function σ (Elfwing et al. 2018, eq. 5).

    Args:
      x: any shape, any float dtype.

    Returns:
      Like x; computed in at least float32.

    >>> [round(float(y), 4) for y in silu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.2689, 0.0, 0.7311]
    """
    wide = x.astype(at_least_float32(x.dtype))
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)


def _silu_backward(x, error):
    wide = x.astype(at_least_float32(x.dtype))
    gate = jax.nn.sigmoid(wide)
    slope = gate * (1 + wide * (1 - gate))
    return ((error.astype(wide.dtype) * slope).astype(x.dtype),)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)
