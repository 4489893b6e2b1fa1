"""Layer normalisation over the last axis."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.sharding import param


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_normalize(x, scale, bias, epsilon: float):
    """y = (x − mean(x)) / sqrt(var(x) + ε) · scale + bias over the last axis.

    The backward pass starts from x and two numbers a row: with x̂ the normalised x and
    g = scale · dy, dx = (g − mean(g) − x̂ mean(g x̂)) / sqrt(var(x) + ε).

    Args:
      x: [..., features], any float dtype.
      scale: [features].
      bias: [features], or None for none.
      epsilon: added to the variance, in units of x².

    Returns:
      Same shape and dtype as x; computed in at least float32.

    >>> layer_normalize(jnp.array([[1.0, 3.0]]), jnp.ones(2), None, 1e-5).round(3).tolist()
    [[-1.0, 1.0]]
    """
    return _forward(x, scale, bias, epsilon)[0]


def _forward(x, scale, bias, epsilon):
    wide = x.astype(at_least_float32(x.dtype))
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    out = centred * inverse * scale.astype(wide.dtype)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return out.astype(x.dtype), (x, scale, bias, mean, inverse)


def _backward(epsilon, residuals, error):
    x, scale, bias, mean, inverse = residuals
    error = error.astype(mean.dtype)
    normal = (x.astype(mean.dtype) - mean) * inverse
    scaled = error * scale.astype(mean.dtype)
    shift = jnp.mean(scaled, axis=-1, keepdims=True)
    slope = jnp.mean(scaled * normal, axis=-1, keepdims=True)
    dx = ((scaled - shift - normal * slope) * inverse).astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    dscale = jnp.sum(error * normal, axis=rows).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(error, axis=rows).astype(bias.dtype)
    return dx, dscale, dbias


layer_normalize.defvjp(_forward, _backward)


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
