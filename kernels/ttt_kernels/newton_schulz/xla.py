"""Newton-Schulz orthogonalisation in plain JAX: batched products, any backend."""

import functools

import jax
import jax.numpy as jnp


def newton_schulz(
    x: jax.Array, coefficients: tuple[tuple[float, float, float], ...], eps: float, dtype: jnp.dtype
) -> jax.Array:
    """The iteration of ``api.newton_schulz``; ``[..., rows, columns]`` in and out.

    Each iteration is three products and one elementwise pass::

        A = X Xᵀ,  B = c A² + b A + a I,  X' = B X

    Every product accumulates in float32 (or float64) and is rounded to ``dtype``: on a GPU,
    float32 products double the time. Sums and coefficients stay in float32, and ``a I`` is added
    before ``B`` is rounded: in ``a X + (B - a I) X`` the rounding of two large terms that cancel
    is three times this form's error.
    """
    y = x.astype(jnp.promote_types(jnp.promote_types(x.dtype, dtype), jnp.float32))
    y = (y / (_frobenius_norm(y) + eps)).astype(dtype)  # rounded once
    tall = y.shape[-2] > y.shape[-1]
    if tall:  # X Xᵀ is the smaller product when rows <= columns
        y = y.mT
    y = _iterate(y, coefficients)
    return (y.mT if tall else y).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _iterate(x, coefficients):
    """All iterations on normalised matrices, ``[..., rows, columns]`` with rows <= columns."""
    return _forward(x, coefficients)[0]


def _forward(x, coefficients):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    eye = jnp.eye(x.shape[-2], dtype=wide)
    kept = []
    for a, b, c in coefficients:
        gram = x @ x.mT
        square = gram @ gram
        polynomial = c * square.astype(wide) + b * gram.astype(wide) + a * eye
        polynomial = polynomial.astype(x.dtype)
        kept.append((x, gram, polynomial))
        x = polynomial @ x
    return x, tuple(kept)


def _backward(coefficients, kept, g):
    """Four products an iteration; automatic differentiation, blind to symmetry, takes six.

    With ``S = G Xᵀ + X Gᵀ`` and ``M = S A``: ``dX = B G + (b S + c (M + Mᵀ)) X``.
    """
    wide = jnp.promote_types(g.dtype, jnp.float32)
    for (_, b, c), (x, gram, polynomial) in zip(coefficients[::-1], kept[::-1], strict=True):
        outer = (g @ x.mT).astype(wide)
        both = (outer + outer.mT).astype(g.dtype)  # in g's dtype: XLA fuses one transpose, not two
        mixed = (both @ gram).astype(wide)
        d_gram = (b * both.astype(wide) + c * (mixed + mixed.mT)).astype(g.dtype)
        g = polynomial @ g + d_gram @ x
    return (g,)


_iterate.defvjp(_forward, _backward)


def _frobenius_norm(y: jax.Array) -> jax.Array:
    """``|Y|_F`` as ``[..., 1, 1]``, with gradient 0 (not NaN) at the zero matrix."""
    squares = jnp.sum(y * y, axis=(-2, -1), keepdims=True)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
