"""Root-mean-square and L2 normalisation."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ttt_jax.sharding import param


def at_least_float32(dtype):
    """The dtype in which norms, softmax and rotations are computed: float32, or float64.

    Args:
      dtype: any float dtype.

    Returns:
      float64 for float64, else float32.

    >>> at_least_float32("bfloat16")
    dtype('float32')
    """
    return jnp.promote_types(dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_normalize(x, scale, epsilon: float):
    """x / sqrt(mean(x²) + ε) · scale over the last axis (Zhang & Sennrich 2019, eq. 4).

    The backward pass starts from x and one number a row.

    Args:
      x: [..., features], any float dtype.
      scale: [features].
      epsilon: added to the mean square, in units of x².

    Returns:
      Same shape and dtype as x; computed in at least float32.

    >>> [round(float(y), 3) for y in rms_normalize(jnp.array([3.0, 4.0]), jnp.ones(2), 0.0)]
    [0.849, 1.131]
    """
    return _rms_forward(x, scale, epsilon)[0]


def _rms_forward(x, scale, epsilon):
    wide = x.astype(at_least_float32(x.dtype))
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale.astype(wide.dtype)).astype(x.dtype), (x, scale, inverse)


def _rms_backward(epsilon, residuals, error):
    x, scale, inverse = residuals
    error = error.astype(inverse.dtype)
    normal = x.astype(inverse.dtype) * inverse
    scaled = error * scale.astype(inverse.dtype)
    slope = jnp.mean(scaled * normal, axis=-1, keepdims=True)
    dx = ((scaled - normal * slope) * inverse).astype(x.dtype)
    return dx, jnp.sum(error * normal, axis=tuple(range(x.ndim - 1))).astype(scale.dtype)


rms_normalize.defvjp(_rms_forward, _rms_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def l2_normalize(x, epsilon: float):
    """x / (‖x‖ + ε) over the last axis, with a finite gradient where x is zero.

    Args:
      x: [..., features], any float dtype.
      epsilon: added to the norm, in units of x.

    Returns:
      Same shape and dtype as x; computed in at least float32. Zero rows stay zero, and there the
      norm is held constant, so that the derivative is 1 / ε.

    >>> l2_normalize(jnp.array([0.0, 2.0]), 0.0).tolist()
    [0.0, 1.0]
    """
    return _l2_forward(x, epsilon)[0]


def _l2_forward(x, epsilon):
    wide = x.astype(at_least_float32(x.dtype))
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True))
    return (wide / (norm + epsilon)).astype(x.dtype), (x, norm)


def _l2_backward(epsilon, residuals, error):
    x, norm = residuals
    wide, error = x.astype(norm.dtype), error.astype(norm.dtype)
    along = jnp.sum(error * wide, axis=-1, keepdims=True)
    # Where x is zero the norm is held constant: its slope there is infinite.
    slope = along / (jnp.where(norm > 0, norm, 1) * (norm + epsilon))
    return (((error - wide * slope) / (norm + epsilon)).astype(x.dtype),)


l2_normalize.defvjp(_l2_forward, _l2_backward)


class RMSNorm(nnx.Module):
    """`rms_normalize` with a learned scale, initially one.

    >>> RMSNorm(4, epsilon=1e-6)(jnp.full((2, 4), 3.0)).round(3).tolist()[0]
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, features: int, *, epsilon: float, name: str = "embed"):
        """Makes the scale.

        Args:
          features: size of the last axis.
          epsilon: added to the mean square.
          name: logical name of the scale's axis.
        """
        self.scale = param(jnp.ones(features, jnp.float32), (name,))
        self.epsilon = epsilon

    def __call__(self, x):
        """Normalises the last axis.

        Args:
          x: [..., features], any float dtype.

        Returns:
          Same shape and dtype.
        """
        return rms_normalize(x, self.scale[...], self.epsilon)
