"""One step of a gated network on each image in plain JAX: batched products, any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def glu_step(w1, w2, q, k, v, scale: float, clip: bool) -> jax.Array:
    """Outputs of the step; see `ttt_kernels.glu_step`. `scale` is that of the sum over tokens."""
    dtype, wide = q.dtype, w1.dtype

    def product(x, w):
        equation = "bthi,hio->btho" if w.ndim == 3 else "bthi,bhio->btho"
        y = jnp.einsum(equation, x, w.astype(dtype), preferred_element_type=wide)
        return y.astype(dtype).astype(wide)

    values = v.astype(wide)
    a, z = product(k, w1), product(k, w2)
    sigmoid = jax.nn.sigmoid(z)
    errors = values * z * sigmoid, values * a * sigmoid * (1 + z * (1 - sigmoid))
    w1, w2 = (
        _move(w, k, e.astype(dtype), scale, clip) for w, e in zip((w1, w2), errors, strict=True)
    )
    return (product(q, w1) * jax.nn.silu(product(q, w2))).astype(dtype)


def _move(weight, k, error, scale: float, clip: bool):
    """The weights after the step, [batch, heads, in, out]."""
    gradient = jnp.einsum("bthi,btho->bhio", k, error, preferred_element_type=weight.dtype)
    if clip:
        square = jnp.sum(gradient * gradient, axis=-2, keepdims=True)
        norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
        gradient = gradient / (scale * norm + 1)
    return weight + scale * gradient
