"""Norms and activations of the parts of rows, in plain JAX: any backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def norm_parts(x, scales, kinds, size: int, epsilon: float) -> tuple[jax.Array, ...]:
    """`ttt_kernels.norm_parts`."""
    made = []
    for index, (kind, part) in enumerate(zip(kinds, jnp.split(x, len(kinds), -1), strict=True)):
        groups = part.reshape(*part.shape[:-1], -1, size)
        if kind == "rms":
            groups = rms_normalize(groups, scales[index], epsilon)
        else:
            groups = silu(groups) if kind == "silu" else unit(groups, epsilon)
        made.append(groups.reshape(part.shape))
    return tuple(made)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


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
    wide = _wide(x)
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
    wide = _wide(x)
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


@jax.custom_vjp
def silu(x):
    """x σ(x) with the logistic function σ (Elfwing et al. 2018, eq. 5).

    Differentiated term by term it would keep several arrays of its input's size. Here the backward
    pass starts from the input, in float32.

    Args:
      x: any shape, any float dtype.

    Returns:
      Like x; computed in at least float32.

    >>> [round(float(y), 4) for y in silu(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.2689, 0.0, 0.7311]
    """
    wide = _wide(x)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)


def _silu_backward(x, error):
    wide = _wide(x)
    gate = jax.nn.sigmoid(wide)
    slope = gate * (1 + wide * (1 - gate))
    return ((error.astype(wide.dtype) * slope).astype(x.dtype),)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)


@functools.partial(jax.checkpoint, static_argnums=1)
def unit(x, epsilon: float):
    """l2_normalize(silu(x)); the backward pass keeps x alone.

    Were its second computation found to be that of the forward pass, XLA would keep a float32 array
    from one to the other.
    """
    return l2_normalize(silu(x), epsilon)
