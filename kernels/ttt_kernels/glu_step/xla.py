"""One step of a gated network on each image in plain JAX: batched products, any backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels import compat


def glu_step(w1, w2, q, k, v, scale: float, clip: bool) -> jax.Array:
    """Outputs of the step; see `ttt_kernels.glu_step`. `scale` is that of the sum over tokens."""
    dtype, wide = q.dtype, w1.dtype

    def product(x, w):
        equation = "bthi,hio->btho" if w.ndim == 3 else "bthi,bhio->btho"
        return _einsum(equation, x, w.astype(dtype)).astype(dtype).astype(wide)

    values = v.astype(wide)
    a, z = product(k, w1), product(k, w2)
    sigmoid = jax.nn.sigmoid(z)
    errors = values * z * sigmoid, values * a * sigmoid * (1 + z * (1 - sigmoid))
    w1, w2 = (
        _move(w, k, e.astype(dtype), scale, clip) for w, e in zip((w1, w2), errors, strict=True)
    )
    return (product(q, w1) * jax.nn.silu(product(q, w2))).astype(dtype)


def glu_step_beside(w1, w2, qkv, bias, beside, arrays, scale: float, clip: bool) -> jax.Array:
    """`ttt_kernels.glu_step.glu_step_beside`."""
    heads, added = w1.shape[0], qkv + bias.astype(qkv.dtype)
    q, k, v = (added[:, :, n] for n in range(3))
    first = glu_step(w1, w2, *(x[:, :, :heads] for x in (q, k, v)), scale, clip)
    second = beside(arrays, *(x[:, :, heads:] for x in (q, k, v)))
    return jnp.concatenate([first, second], axis=2)


def _einsum(equation: str, a, b):
    """In float32 or wider; a CPU has no product of bfloat16 with such a result."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    if compat.target_platform() == "cpu":
        a, b = a.astype(wide), b.astype(wide)
    # float32 inputs promise float32 results: no TF32 behind the caller's back.
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=exact, preferred_element_type=wide)


def _move(weight, k, error, scale: float, clip: bool):
    """The weights after the step, [batch, heads, in, out]."""
    gradient = _einsum("bthi,btho->bhio", k, error)
    if clip:
        square = jnp.sum(gradient * gradient, axis=-2, keepdims=True)
        norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
        gradient = gradient / (scale * norm + 1)
    return weight + scale * gradient
