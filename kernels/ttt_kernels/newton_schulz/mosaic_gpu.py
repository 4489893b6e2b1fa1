"""Newton-Schulz orthogonalisation on Hopper GPUs: one launch forwards, one backwards.

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

from ttt_kernels.newton_schulz.mosaic_gpu_ring import BLOCK, Layout, Step, launch

LARGEST = 768
# Up to so many matrices a cluster of eight CTAs takes each: so many run at the same time.
FEW_MATRICES = 14


def choose_layout(matrices: int, rows: int, columns: int) -> Layout:
    """How a launch on these matrices is cut for the multiprocessors of a H100 or H200.

    Clusters of eight or two, the ones that were checked on the chip; one CTA for a single tile.

    >>> choose_layout(64, 384, 384), choose_layout(12, 384, 384)
    (Layout(tile=192, cluster=2, stages=4), Layout(tile=128, cluster=8, stages=6))
    """
    # Tile size -> tiles of a matrix, so that no CTA of a cluster is without one.
    tiles = {size: (rows // size) * (columns // size) for size in (192, 128, 64)
             if rows % size == columns % size == 0}  # fmt: skip
    most = tiles[BLOCK]
    sizes = (8, 2, 1) if matrices <= FEW_MATRICES else (2, 1)
    cluster = next(size for size in sizes if size <= most)
    tile = next(size for size, number in tiles.items() if number >= cluster)
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
    xs, *_ = _iterate(x.astype(jnp.bfloat16), coefficients, eps, False, interpret)
    return xs[(len(coefficients) - 1) % 2].astype(x.dtype)


def _forward(x, coefficients, eps, interpret):
    y = x.astype(jnp.bfloat16)
    kept = _iterate(y, coefficients, eps, True, interpret)
    return kept[0][-1].astype(x.dtype), (y, kept, jnp.zeros((), x.dtype))


def _iterate(x, coefficients, eps, keep: bool, interpret):
    """X after each iteration, each A and each B, [iterations, n, ...]; without `keep` the last
    two, one and one."""
    iterations, (count, rows, columns) = len(coefficients), x.shape
    scale = _scales(_norms(x), eps, iterations)
    table = jnp.asarray([triple[::-1] for triple in coefficients], jnp.float32)
    weights = jnp.concatenate([scale**2, scale * table[:, None]], 2)  # of A; c, b and a of B

    def steps(k, n, inputs, outputs):
        x, weights = inputs
        xs, grams, polynomials = outputs
        slot = k if keep else 0
        before = lax.max(k - 1, 0) if keep else lax.rem(k + 1, jnp.int32(2))
        source = ((k == 0, x.at[n]), (k > 0, xs.at[before, n]))
        gram, polynomial = grams.at[slot, n], polynomials.at[slot, n]
        return (
            Step(((source, source),), gram, columns, True, True, lambda: [weights[k, n, 0]]),
            Step(((gram, gram),), polynomial, rows, True, True,
                 lambda: [weights[k, n, i] for i in (1, 2, 3)], gram),
            Step(((polynomial, source),), xs.at[k if keep else lax.rem(k, jnp.int32(2)), n], rows),
        )

    kept = iterations if keep else 1
    shapes = ((kept if keep else 2, count, rows, columns), *[(kept, count, rows, rows)] * 2)
    return launch("newton_schulz_forward", steps, iterations, (x, weights),
                  [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], count,
                  choose_layout(count, rows, columns), interpret)


def _backward(coefficients, eps, interpret, residuals, g):
    x, kept, like = residuals
    iterations, (count, rows, columns) = len(coefficients), x.shape
    norm = _norms(x)
    scale = _scales(norm, eps, iterations)
    table = jnp.asarray([(c, b, 0.0) for _, b, c in coefficients], jnp.float32)
    weights = jnp.concatenate([scale, scale**2 * table[:, None]], 2)  # of S, and of T

    def steps(k, n, inputs, outputs):
        g, x, xs, grams, polynomials, weights = inputs
        boths, d_grams, gs = outputs
        i = iterations - 1 - k
        x_k = ((i == 0, x.at[n]), (i > 0, xs.at[lax.max(i - 1, 0), n]))
        g_k = ((k == 0, g.at[n]), (k > 0, gs.at[lax.rem(k + 1, jnp.int32(2)), n]))
        gram, both, d_gram = grams.at[i, n], boths.at[n], d_grams.at[n]
        return (
            Step(((g_k, x_k), (x_k, g_k)), both, columns, True, True, lambda: [weights[i, n, 0]]),
            Step(((both, gram), (gram, both)), d_gram, rows, True, True,
                 lambda: [weights[i, n, j] for j in (1, 2, 3)], both),
            Step(((polynomials.at[i, n], g_k), (d_gram, x_k)), gs.at[lax.rem(k, jnp.int32(2)), n],
                 rows),
        )

    shapes = ((count, rows, rows), (count, rows, rows), (2, count, rows, columns))
    *_, gs = launch("newton_schulz_backward", steps, iterations,
                    (g.astype(jnp.bfloat16), x, *kept, weights),
                    [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes], count,
                    choose_layout(count, rows, columns), interpret)
    # Through the norm, whose own gradient counts as 0 at the zero matrix.
    x, g = x.astype(jnp.float32), gs[(iterations - 1) % 2].astype(jnp.float32)
    along = jnp.sum(g * x, axis=(1, 2)) / ((norm + eps) * jnp.where(norm > 0, norm, 1))
    return ((g - along[:, None, None] * x).astype(like.dtype),)


_core.defvjp(_forward, _backward)


def _norms(x: jax.Array) -> jax.Array:
    """Frobenius norms of [n, rows, columns], [n] float32."""
    wide = x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, axis=(1, 2)))


def _scales(norm: jax.Array, eps: float, iterations: int) -> jax.Array:
    """What each iteration's X is still to be multiplied by, [iterations, n, 1]."""
    ones = jnp.ones((iterations - 1, *norm.shape), jnp.float32)
    return jnp.concatenate([1 / (norm + eps)[None], ones])[:, :, None]
