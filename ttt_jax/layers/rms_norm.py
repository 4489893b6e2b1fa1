"""Root-mean-square and L2 normalisation."""

import jax.numpy as jnp
from flax import nnx

from ttt_jax.sharding import param
from ttt_kernels.norm_parts.xla import l2_normalize, rms_normalize

__all__ = ["RMSNorm", "at_least_float32", "l2_normalize", "rms_normalize"]


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
