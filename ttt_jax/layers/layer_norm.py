"""Layer normalisation over the last axis."""

import jax.numpy as jnp
from flax import nnx

from ttt_jax.sharding import param
from ttt_kernels.residual_norm.xla import layer_normalize


class LayerNorm(nnx.Module):
    """`layer_normalize` with a learned scale and, where asked for, bias.

    The variance is that of the values themselves (divided by n), the scale is initially one.
    Source: Ba et al. 2016, eq. 4.

    >>> norm = LayerNorm(2, epsilon=1e-5)
    >>> norm(jnp.array([[1.0, 3.0]])).round(3).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(self, features: int, *, epsilon: float, bias: bool = False, name: str = "embed"):
        """Makes the scale and, where asked for, the bias.

        Args:
          features: size of the last axis.
          epsilon: added to the variance, in units of x².
          bias: whether there is a learned bias, initially zero.
          name: logical name of the axis.
        """
        self.scale = param(jnp.ones(features, jnp.float32), (name,))
        self.bias = param(jnp.zeros(features, jnp.float32), (name,)) if bias else None
        self.epsilon = epsilon

    def __call__(self, x):
        """Normalises the last axis.

        Args:
          x: [..., features], any float dtype.

        Returns:
          Same shape and dtype; computed in at least float32.
        """
        bias = None if self.bias is None else self.bias[...]
        return layer_normalize(x, self.scale[...], bias, self.epsilon)
