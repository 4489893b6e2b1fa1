"""Root-mean-square and L2 normalisation."""

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


def rms_normalize(x, scale, epsilon: float):
    """x / sqrt(mean(x²) + ε) · scale over the last axis (Zhang & Sennrich 2019, eq. 4).

    Args:
      x: [..., features], any float dtype.
      scale: [features].
      epsilon: added to the mean square, in units of x².

    Returns:
      Same shape and dtype as x; computed in at least float32.

    >>> [round(float(y), 3) for y in rms_normalize(jnp.array([3.0, 4.0]), jnp.ones(2), 0.0)]
    [0.849, 1.131]
    """
    wide = x.astype(at_least_float32(x.dtype))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + epsilon) * scale.astype(wide.dtype)).astype(x.dtype)


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
    wide = x.astype(at_least_float32(x.dtype))
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    # sqrt has an infinite slope at zero, so zero rows must not reach it, not even in the branch
    # that `where` discards.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return (wide / (norm + epsilon)).astype(x.dtype)


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
