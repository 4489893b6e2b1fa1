"""Activations that keep their input alone for the backward pass.

Differentiated term by term, as JAX does by itself, a GELU keeps four arrays of its input's size
and rounds each to bfloat16. Here the backward pass starts from the input, in float32.
"""

import jax

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_kernels.bias_gelu.xla import gelu

__all__ = ["gelu", "silu"]


@jax.custom_vjp
def silu(x):
    """x σ(x) with the logistic function σ (Elfwing et al. 2018, eq. 5).

    Args:
      x: any shape, any float dtype.

    Returns:
      Like x; computed in at least float32.

    >>> import jax.numpy as jnp
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
