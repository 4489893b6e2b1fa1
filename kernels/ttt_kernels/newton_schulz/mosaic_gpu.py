"""Newton-Schulz orthogonalisation on Hopper GPUs: one launch; with a gradient, three an iteration.

XLA runs elementwise passes between its batched products, which take as long as the products.
Here every sum is in the epilogue of a product, in float32 before the one rounding::

    A = X Xᵀ        B = c A² + b A + a I        X' = B X

and backwards, with `G` the gradient of `X'`::

    S = G Xᵀ + X Gᵀ        T = c (S A + A S) + b S        dX = B G + T X

A, B, S and T are symmetric: only their tiles on and above the diagonal are computed. Adding `a I`
before the rounding is what makes this more accurate than `a X + (b A + c A²) X`. The first X is
never written: its norm enters as factors of the first A and B.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.newton_schulz.mosaic_gpu_product import product
from ttt_kernels.newton_schulz.mosaic_gpu_ring import BLOCK, Layout, Step, launch

LARGEST = 768
# Clusters of a size that run at the same time, a CTA a multiprocessor.
RESIDENT = {8: 14, 4: 28, 2: 66}


def choose_layout(matrices: int, rows: int, columns: int) -> Layout:
    """How a launch on these matrices is cut for the multiprocessors of a H100 or H200.

    >>> choose_layout(64, 384, 384), choose_layout(12, 384, 384)
    (Layout(tile=192, cluster=2, stages=4), Layout(tile=128, cluster=8, stages=6))
    """
    cluster = next((size for size, most in RESIDENT.items() if matrices <= most), 1)
    tiles = [size for size in (192, 128, 64) if rows % size == columns % size == 0]
    # Not so large that a CTA would be without one.
    tile = next((t for t in tiles if (rows // t) * (columns // t) >= cluster), tiles[-1])
    while (rows // tile) * (columns // tile) < cluster:
        cluster //= 2
    return Layout(tile, cluster, {192: 4, 128: 6, 64: 8}[tile])


def unsupported(x: jax.Array, iterations: int, dtype: jnp.dtype) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if dtype != jnp.bfloat16:
        return f"dtype={dtype}: the products of the Mosaic GPU kernels are bfloat16"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x.dtype={x.dtype}: the Mosaic GPU kernels take bfloat16 and float32"
    if iterations == 0 or 0 in x.shape:
        return f"{x.shape=} with {iterations} iterations leaves a kernel nothing to do"
    if max(x.shape[-2:]) > LARGEST:
        return f"matrices of {x.shape[-2:]}: the Mosaic GPU kernels go to {LARGEST} rows or columns"
    return None


def newton_schulz(
    x: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    eps: float,
    dtype: jnp.dtype,
    interpret=None,
) -> jax.Array:
    """The iteration of `api.newton_schulz`; `[..., rows, columns]` in and out.

    Rows and columns are padded with zeros to multiples of 64, which changes no result. Under a
    mesh, call it inside `jax.shard_map(..., check_vma=False)` over the leading axes.

    Args:
      x, coefficients, eps, dtype: as of `api.newton_schulz`.
      interpret: None, or what `compat.gpu_interpret_params` returns.

    Raises:
      NotImplementedError: an argument beyond the kernels' limits, see `unsupported`.
    """
    reason = unsupported(x, len(coefficients), dtype)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    rows, columns = x.shape[-2:]
    y = x.reshape(-1, rows, columns)
    y = jnp.pad(y, ((0, 0), (0, -rows % BLOCK), (0, -columns % BLOCK)))
    tall = y.shape[1] > y.shape[2]  # X Xᵀ is the smaller product when rows <= columns
    y = _core(y.mT if tall else y, coefficients, eps, interpret)
    return (y.mT if tall else y)[:, :rows, :columns].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _core(x, coefficients, eps, interpret):
    """All matrices of [n, rows, columns], multiples of 64, rows <= columns."""
    return _iterate(x.astype(jnp.bfloat16), coefficients, eps, interpret).astype(x.dtype)


def _iterate(x, coefficients, eps, interpret):
    """All iterations in one launch, keeping nothing for a gradient; x is bfloat16."""
    iterations, (count, rows, columns) = len(coefficients), x.shape
    scale = 1 / (_norms(x) + eps)  # what the first X is still to be multiplied by
    scale = jnp.stack([scale, *[jnp.ones_like(scale)] * (iterations - 1)])[:, :, None]
    table = jnp.asarray([triple[::-1] for triple in coefficients], jnp.float32)
    weights = jnp.concatenate([scale**2, scale * table[:, None]], 2)  # of A; c, b and a of B

    def steps(k, n, inputs, outputs):
        x, weights = inputs
        xs, grams, polynomials = outputs
        gram, polynomial = grams.at[n], polynomials.at[n]
        source = ((k == 0, x.at[n]), (k > 0, xs.at[lax.rem(k + 1, jnp.int32(2)), n]))
        return (
            Step(((source, source),), gram, columns, True, True, lambda: [weights[k, n, 0]]),
            Step(((gram, gram),), polynomial, rows, True, True,
                 lambda: [weights[k, n, i] for i in (1, 2, 3)], gram),
            Step(((polynomial, source),), xs.at[lax.rem(k, jnp.int32(2)), n], rows),
        )

    shapes = ((2, count, rows, columns), (count, rows, rows), (count, rows, rows))
    xs, *_ = launch("newton_schulz_forward", steps, iterations, (x, weights),
                    [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], count,
                    choose_layout(count, rows, columns), interpret)
    return xs[(iterations - 1) % 2]


def _forward(x, coefficients, eps, interpret):
    multiply = functools.partial(product, interpret=interpret)
    y = x.astype(jnp.bfloat16)
    norm = _norms(y)
    inverse = 1 / (norm + eps)
    kept = []
    for i, (a, b, c) in enumerate(coefficients):
        scale = inverse if i == 0 else jnp.ones_like(inverse)  # the first y is not normalised
        gram = multiply(((y, y),), _weights(scale**2, 1.0, 0.0, 0.0), transposed=True,
                        symmetric=True)
        polynomial = multiply(((gram, gram),), _weights(scale, c, b, a), gram, transposed=True,
                              symmetric=True)
        kept.append((y, gram, polynomial))
        y = multiply(((polynomial, y),))
    return y.astype(x.dtype), (norm, tuple(kept), jnp.zeros((), x.dtype))


def _backward(coefficients, eps, interpret, residuals, g):
    multiply = functools.partial(product, interpret=interpret)
    norm, kept, like = residuals
    inverse = 1 / (norm + eps)
    g = g.astype(jnp.bfloat16)
    for i, ((_, b, c), (x, gram, polynomial)) in reversed(
        list(enumerate(zip(coefficients, kept, strict=True)))
    ):
        scale = inverse if i == 0 else jnp.ones_like(inverse)
        both = multiply(((g, x), (x, g)), _weights(scale, 1.0, 0.0, 0.0), transposed=True,
                        symmetric=True)
        d_gram = multiply(((both, gram), (gram, both)), _weights(scale**2, c, b, 0.0), both,
                          transposed=True, symmetric=True)
        g = multiply(((polynomial, g), (d_gram, x)))
    # Through the norm, whose own gradient counts as 0 at the zero matrix.
    x, g = kept[0][0].astype(jnp.float32), g.astype(jnp.float32)
    along = jnp.sum(g * x, axis=(1, 2)) * inverse / jnp.where(norm > 0, norm, 1)
    return ((g - along[:, None, None] * x).astype(like.dtype),)


_core.defvjp(_forward, _backward)


def _norms(x: jax.Array) -> jax.Array:
    """Frobenius norms of [n, rows, columns], [n] float32."""
    wide = x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, axis=(1, 2)))


def _weights(scale: jax.Array, *weights: float) -> jax.Array:
    """Three weights of an epilogue times a factor a matrix, [n, 3] float32."""
    return scale[:, None] * jnp.asarray(weights, jnp.float32)
