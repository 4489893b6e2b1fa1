"""Newton-Schulz orthogonalisation in plain JAX: batched products, any backend."""

import functools

import jax
import jax.numpy as jnp


class Products:
    """The symmetric products of an iteration; ``symmetric`` has kernels for them."""

    def gram(self, x):
        """``A = X Xᵀ``."""
        return x @ x.mT

    def polynomial(self, gram, triple):
        """``B = c A² + b A + a I``."""
        wide, (a, b, c) = _wide(gram), triple
        square = (gram @ gram).astype(wide)
        eye = jnp.eye(gram.shape[-1], dtype=wide)
        return (c * square + b * gram.astype(wide) + a * eye).astype(gram.dtype)

    def outer(self, g, x):
        """``S = G Xᵀ + X Gᵀ``."""
        outer = (g @ x.mT).astype(_wide(g))
        return (outer + outer.mT).astype(g.dtype)  # in g's dtype: XLA fuses one transpose, not two

    def gram_gradient(self, outer, gram, triple):
        """``b S + c (S A + A S)``."""
        wide, (_, b, c) = _wide(gram), triple
        mixed = (outer @ gram).astype(wide)
        return (b * outer.astype(wide) + c * (mixed + mixed.mT)).astype(gram.dtype)


XLA = Products()


def newton_schulz(
    x: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    eps: float,
    dtype: jnp.dtype,
    products: Products = XLA,
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
    y = _iterate(y, coefficients, products)
    return (y.mT if tall else y).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _iterate(x, coefficients, products=XLA):
    """All iterations on normalised matrices, ``[..., rows, columns]`` with rows <= columns."""
    return _forward(x, coefficients, products)[0]


def _forward(x, coefficients, products=XLA):
    kept = []
    for triple in coefficients:
        gram = products.gram(x)
        polynomial = products.polynomial(gram, triple)
        kept.append((x, gram, polynomial))
        x = polynomial @ x
    return x, tuple(kept)


def _backward(coefficients, products, kept, g):
    """Four products an iteration; automatic differentiation, blind to symmetry, takes six.

    With ``S = G Xᵀ + X Gᵀ`` and ``M = S A``: ``dX = B G + (b S + c (M + Mᵀ)) X``.
    """
    for triple, (x, gram, polynomial) in zip(coefficients[::-1], kept[::-1], strict=True):
        d_gram = products.gram_gradient(products.outer(g, x), gram, triple)
        g = polynomial @ g + d_gram @ x
    return (g,)


_iterate.defvjp(_forward, _backward)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _frobenius_norm(y: jax.Array) -> jax.Array:
    """``|Y|_F`` as ``[..., 1, 1]``, with gradient 0 (not NaN) at the zero matrix."""
    squares = jnp.sum(y * y, axis=(-2, -1), keepdims=True)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
