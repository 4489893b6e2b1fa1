"""Newton-Schulz orthogonalisation on Hopper GPUs: one launch forwards, one backwards.

XLA runs elementwise passes between its batched products, which take as long as the products.
Here every sum is in the epilogue of a product, in float32 before the one rounding::

    A = X Xᵀ        B = c A² + b A + a I        X' = B X

and backwards, with `G` the gradient of `X'`::

    S = G Xᵀ + X Gᵀ        T = c (S A + A S) + b S        dX = B G + T X

A, B, S and T are symmetric: half of their blocks are computed and mirrored. Adding `a I` before the
rounding is what makes this more accurate than `a X + (b A + c A²) X`. The normalised X is never
written: its norm, whose square is the trace of X Xᵀ, enters as factors of the first A and B.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.newton_schulz import mosaic_gpu_pair, mosaic_gpu_ring
from ttt_kernels.newton_schulz.mosaic_gpu_pair import Pair
from ttt_kernels.newton_schulz.mosaic_gpu_ring import Layout
from ttt_kernels.newton_schulz.mosaic_gpu_step import BLOCK, Step

LARGEST = 768
# Up to so many matrices a cluster of eight CTAs takes each: so many run at the same time.
FEW_MATRICES = 14


def choose_layout(
    matrices: int, rows: int, columns: int, backward: bool = False
) -> Layout | Pair:
    """How a launch on these matrices is cut for the multiprocessors of a H100 or H200.

    Forwards a pair of CTAs a matrix where there is one, else a ring in clusters of eight, six or
    two, the ones that were checked on the chip; one CTA for a single tile.

    >>> choose_layout(64, 384, 384), choose_layout(64, 384, 384, backward=True)
    (Pair(strips=3), Layout(tile=192, width=192, cluster=2, stages=4, apart=False))
    """
    few, square = matrices <= FEW_MATRICES, rows == columns
    if not few and not backward and square and rows in (128, 256, 384):
        return Pair(rows // (2 * BLOCK))
    if few and square and rows == 384:
        return Layout(128, 192, 6, 5)
    # Tile size -> tiles of a matrix, so that no CTA of a cluster is without one.
    tiles = {size: (rows // size) * (columns // size) for size in (192, 128, 64)
             if rows % size == columns % size == 0}  # fmt: skip
    most = tiles[BLOCK]
    cluster = next(size for size in ((8, 2, 1) if few else (2, 1)) if size <= most)
    tile = next(size for size, number in tiles.items() if number >= cluster)
    return Layout(tile, tile, cluster, {192: 4, 128: 6, 64: 8}[tile])


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
    y, *_ = _iterate(x.astype(jnp.bfloat16), coefficients, eps, False, interpret)
    return y.astype(x.dtype)


def _forward(x, coefficients, eps, interpret):
    rounded = x.astype(jnp.bfloat16)
    y, *kept = _iterate(rounded, coefficients, eps, True, interpret)
    return y.astype(x.dtype), (rounded, kept, jnp.zeros((), x.dtype))


def _iterate(x, coefficients, eps, keep: bool, interpret):
    """The result, X between iterations, each B and each A, [iterations, n, ...], and the traces of
    the first A's diagonal blocks; without `keep` no more of X, B and A than is needed."""
    iterations, (count, rows, columns) = len(coefficients), x.shape
    last, layout = iterations - 1, choose_layout(count, rows, columns)
    traced = isinstance(layout, Pair)
    # For the sake of the L2 cache: A is written over the X before last, and the next X over A.
    shared = not keep and rows == columns
    between, kept = (max(last, 1), iterations) if keep else (min(iterations, 2), 1)

    def steps(k, n, inputs, outputs):
        x, table, traces = (*inputs, outputs[-1])[:3]
        y, xs, polynomials = outputs[:3]
        slot, traces = k if keep else 0, traces.at[n]
        source = ((k == 0, x.at[n]), (k > 0, xs.at[_slot(k - 1, between), n]))
        target = ((k < last, xs.at[_slot(k, between), n]), (k == last, y.at[n]))
        gram = xs.at[_slot(k, between), n] if shared else outputs[3].at[slot, n]
        polynomial = polynomials.at[slot, n]

        def scale():
            return _scale(traces, eps, k == 0)

        return (
            Step(((source, source),), gram, True, lambda: [scale() ** 2],
                 traces=traces if traced else None),
            Step(((gram, gram),), polynomial, True,
                 lambda: [scale() * table[k, i] for i in (2, 1, 0)], gram),
            Step(((polynomial, source),), target, early=True),
        )

    arrays = [x, jnp.asarray(coefficients, jnp.float32)]
    shapes = [x.shape, (between, *x.shape), *[(kept, count, rows, rows)] * 2]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if shared:
        del outputs[3]
    if traced:
        outputs.append(jax.ShapeDtypeStruct((count, rows // BLOCK), jnp.float32))
    else:
        arrays.append(_traces(x))
    form = mosaic_gpu_pair if traced else mosaic_gpu_ring
    results = form.launch(
        "newton_schulz_forward", steps, iterations, arrays, outputs, count, layout, interpret
    )
    return results if traced else [*results, arrays[-1]]


def _backward(coefficients, eps, interpret, residuals, g):
    x, (*kept, traces), like = residuals
    iterations, last, (count, rows, columns) = len(coefficients), len(coefficients) - 1, x.shape
    between, shared = min(iterations, 2), rows == columns  # S is written over the G before last

    def steps(k, n, inputs, outputs):
        g, x, xs, polynomials, grams, table, traces = inputs
        dx, gs, d_grams = outputs[:3]
        i = last - k
        x_k = ((i == 0, x.at[n]), (i > 0, xs.at[lax.max(i - 1, 0), n]))
        g_k = ((k == 0, g.at[n]), (k > 0, gs.at[_slot(k - 1, between), n]))
        target = ((k < last, gs.at[_slot(k, between), n]), (k == last, dx.at[n]))
        both = gs.at[_slot(k, between), n] if shared else outputs[3].at[n]
        gram, d_gram = grams.at[i, n], d_grams.at[n]

        def scale():
            return _scale(traces.at[n], eps, i == 0)

        return (
            Step(((g_k, x_k), (x_k, g_k)), both, True, lambda: [scale()]),
            Step(((both, gram), (gram, both)), d_gram, True,
                 lambda: [*[scale() ** 2 * table[i, j] for j in (2, 1)], jnp.float32(0.0)], both),
            Step(((polynomials.at[i, n], g_k), (d_gram, x_k)), target),
        )

    table = jnp.asarray(coefficients, jnp.float32)
    arrays = [g.astype(jnp.bfloat16), x, *kept, table, traces]
    shapes = [x.shape, (between, *x.shape), (count, rows, rows)]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if not shared:
        outputs.append(outputs[2])
    layout = choose_layout(count, rows, columns, backward=True)
    g, *_ = mosaic_gpu_ring.launch(
        "newton_schulz_backward", steps, iterations, arrays, outputs, count, layout, interpret
    )
    # Through the norm, whose own gradient counts as 0 at the zero matrix.
    x, g, norm = x.astype(jnp.float32), g.astype(jnp.float32), jnp.sqrt(jnp.sum(traces, axis=1))
    along = jnp.sum(g * x, axis=(1, 2)) / ((norm + eps) * jnp.where(norm > 0, norm, 1))
    return (_dithered(g - along[:, None, None] * x, like.dtype),)


_core.defvjp(_forward, _backward)


def _slot(k, slots: int):
    """Where X of an iteration is kept."""
    return lax.rem(lax.max(k, 0), jnp.int32(slots))


def _traces(x: jax.Array) -> jax.Array:
    """Traces of the diagonal blocks of X Xᵀ, [n, rows / 64] float32."""
    wide = x.reshape(x.shape[0], x.shape[1] // BLOCK, -1).astype(jnp.float32)
    return jnp.sum(wide * wide, axis=2)


def _dithered(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[n, rows, columns] float32 rounded up or down by its place, right on average.

    The kernel's gradient is in bfloat16 already, and its correction along the matrix is mostly less
    than half of a last bit: rounded to the nearest it would be lost, and the gradient would not go
    across the matrix as it must, since the matrix's length does not matter. Thresholds are of the
    sequence R2 (M. Roberts, 2018), multiples of 0.7549 and 0.5698 modulo 1, here of 16 bits.

    >>> rounded = _dithered(jnp.full((1, 64, 64), 1 + 2**-10), jnp.bfloat16)
    >>> round(float(jnp.mean(rounded, dtype=jnp.float32) - 1) * 2**10, 2)
    1.0
    """
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    row, column = (lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (1, 2))
    threshold = (49471 * row + 37345 * column) & 0xFFFF
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(jnp.isnan(x), bits, bits + threshold)  # a NaN may have no bit to spare
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(dtype)


def _scale(traces, eps: float, is_first):
    """What X is still to be multiplied by, read from the reference to a matrix's traces."""

    def first():
        squares = sum((traces[i] for i in range(traces.shape[0])), jnp.float32(0.0))
        norm = jnp.where(squares > 0, squares * lax.rsqrt(squares), jnp.float32(0.0))
        return 1 / (norm + eps)

    return lax.cond(is_first, first, lambda: jnp.float32(1.0))
