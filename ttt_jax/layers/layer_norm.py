"""Layer normalisation over the last axis."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.sharding import param


class LayerNorm(nnx.Module):
    """y = (x − mean(x)) / sqrt(var(x) + ε) · scale + bias over the last axis.

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
        wide = x.astype(at_least_float32(x.dtype))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        out = centred * lax.rsqrt(variance + self.epsilon) * self.scale[...].astype(wide.dtype)
        if self.bias is not None:
            out = out + self.bias[...].astype(wide.dtype)
        return out.astype(x.dtype)
