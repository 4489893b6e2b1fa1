"""Newton-Schulz orthogonalisation in plain JAX: batched products, any backend."""

import jax
import jax.numpy as jnp


def newton_schulz(
    x: jax.Array, coefficients: tuple[tuple[float, float, float], ...], eps: float, dtype: jnp.dtype
) -> jax.Array:
    """The iteration of ``api.newton_schulz``; ``[..., rows, columns]`` in and out.

    Every product accumulates in float32 (or float64) and is rounded to ``dtype``: on a GPU,
    float32 products double the time. Sums and the coefficients stay in float32: rounded to
    bfloat16, 3.4445 would be 3.4375, which the iterations amplify to errors of 5 %.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    y = x.astype(dtype)
    tall = y.shape[-2] > y.shape[-1]
    if tall:  # X Xᵀ is the smaller product when rows <= columns
        y = y.mT
    y = y / (_frobenius_norm(y) + jnp.asarray(eps, dtype))
    for a, b, c in coefficients:
        gram = y @ y.mT
        gram_wide = gram.astype(wide)
        square = (c * gram_wide).astype(dtype) @ gram
        polynomial = (b * gram_wide + square.astype(wide)).astype(dtype)
        y = (a * y.astype(wide) + (polynomial @ y).astype(wide)).astype(dtype)
    return (y.mT if tall else y).astype(x.dtype)


def _frobenius_norm(y: jax.Array) -> jax.Array:
    """``|Y|_F`` as ``[..., 1, 1]``, with gradient 0 (not NaN) at the zero matrix."""
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    squares = jnp.sum(wide * wide, axis=(-2, -1), keepdims=True)
    positive = squares > 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
    return norm.astype(y.dtype)
