"""A branch added to its stream, and the layer norm, in plain JAX: any backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def residual_norm(x, branch, branch_bias, factor, scale, bias, epsilon: float):
    """`ttt_kernels.residual_norm`."""
    if branch is not None:
        x = add_branch(x, branch, branch_bias, factor)
    return x, layer_normalize(x, scale, bias, epsilon)


def add_branch(x, branch, branch_bias, factor) -> jax.Array:
    """`ttt_kernels.residual_norm.add_branch`; every step is rounded to x's dtype."""
    if branch_bias is not None:
        branch = branch + branch_bias.astype(x.dtype)
    if factor is not None:
        # A factor a row, not a choice of each number, of which the backward pass would keep all.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        factor = lax.stop_gradient(factor).astype(wide).reshape(-1, *(1,) * (x.ndim - 1))
        branch = (branch.astype(wide) * factor).astype(x.dtype)
    return x + branch


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
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    out = centred * inverse * scale.astype(wide.dtype)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return out.astype(x.dtype), (x, scale, bias, mean, inverse)


def _backward(epsilon, residuals, error):
    x, scale, bias, mean, inverse = residuals
    again = lax.optimization_barrier((x, error))  # else XLA writes their product in float32
    error = error.astype(mean.dtype)
    normal = (x.astype(mean.dtype) - mean) * inverse
    scaled = error * scale.astype(mean.dtype)
    shift = jnp.mean(scaled, axis=-1, keepdims=True)
    slope = jnp.mean(scaled * normal, axis=-1, keepdims=True)
    dx = ((scaled - shift - normal * slope) * inverse).astype(x.dtype)
    x, error = (a.astype(mean.dtype) for a in again)
    rows, normal = tuple(range(x.ndim - 1)), (x - mean) * inverse
    dscale = jnp.sum(error * normal, axis=rows).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(error, axis=rows).astype(bias.dtype)
    return dx, dscale, dbias


layer_normalize.defvjp(_forward, _backward)
