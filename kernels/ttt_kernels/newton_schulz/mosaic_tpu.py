"""Newton-Schulz orthogonalisation on TPUs: one launch forwards, one backwards.

A grid point takes one matrix through all iterations in VMEM, in a rolled loop: compiled once, no
matrix leaves the chip in between. Products take operands of the chosen dtype and accumulate in
float32; sums stay in float32, as in `xla.py`.

Backwards, with `A = Y Yᵀ`, `B = bA + cA²`, `Y' = aY + BY` (A and B symmetric) and `G` the gradient
of `Y'`: `H = GYᵀ + YGᵀ`, `M = HA`, `dY = aG + BG + (bH + c(M + Mᵀ)) Y`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.tpu import COLUMNS, ROWS, dot


def unsupported(x: jax.Array, iterations: int, dtype: jnp.dtype) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    for name, value in (("x.dtype", jnp.dtype(x.dtype)), ("dtype", jnp.dtype(dtype))):
        if value not in (jnp.bfloat16, jnp.float32):
            return f"{name}={value}: the Mosaic TPU kernels take bfloat16 and float32"
    if iterations == 0 or 0 in x.shape:
        return f"{x.shape=} with {iterations} iterations leaves a kernel nothing to do"
    need = vmem_bytes(x.shape[-2:], iterations, dtype, backward=True)
    if need > compat.TPU_VMEM_BYTES:
        return (
            f"matrices of {x.shape[-2:]} need {need} bytes of VMEM and there are "
            f"{compat.TPU_VMEM_BYTES}; make the head dim smaller"
        )
    return None


def vmem_bytes(
    shape: tuple[int, int], iterations: int, dtype: jnp.dtype, backward: bool
) -> int:
    """Estimate from above of the VMEM that a kernel takes for float32 matrices of `shape`.

    >>> vmem_bytes((384, 384), 5, jnp.bfloat16, backward=False)
    6782976
    """
    rows, columns = (-(-size // 128) * 128 for size in sorted(shape))
    size, square, wide = jnp.dtype(dtype).itemsize, rows * rows, rows * columns
    blocks = 2 * 4 * wide * (3 if backward else 2)
    kept = (iterations + 1) * wide * size if backward else 0
    live = (5 if backward else 3) * 4 * square + (3 if backward else 2) * 4 * wide
    return blocks + kept + live * 3 // 2 if size == 2 else blocks + kept + 3 * live


def newton_schulz(
    x: jax.Array,
    coefficients: tuple[tuple[float, float, float], ...],
    eps: float,
    dtype: jnp.dtype,
    interpret=None,
) -> jax.Array:
    """The iteration of ``api.newton_schulz``; ``[..., rows, columns]`` in and out.

    Under a mesh, call it inside `jax.shard_map(..., check_vma=False)` over the leading axes.

    Args:
      x, coefficients, eps, dtype: as of ``api.newton_schulz``.
      interpret: None compiles for a TPU; what `compat.tpu_interpret_params` returns runs in JAX's
        TPU interpreter on a CPU.

    Raises:
      NotImplementedError: an argument beyond the kernels' limits, see `unsupported`.
    """
    reason = unsupported(x, len(coefficients), dtype)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    y = x.reshape(-1, *x.shape[-2:])
    tall = y.shape[1] > y.shape[2]
    y = _core(y.mT if tall else y, coefficients, eps, dtype, interpret)
    return (y.mT if tall else y).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _core(x, coefficients, eps, dtype, interpret):
    """All matrices of ``[n, rows, columns]``, rows <= columns."""
    body = functools.partial(_forward_body, eps=eps, dtype=dtype, number=len(coefficients))
    return _launch(body, "newton_schulz_forward", (x,), coefficients, dtype, [], interpret)


def _forward(x, coefficients, eps, dtype, interpret):
    return _core(x, coefficients, eps, dtype, interpret), x


def _backward(coefficients, eps, dtype, interpret, x, gradient):
    body = functools.partial(_backward_body, eps=eps, dtype=dtype, number=len(coefficients))
    kept = compat.mosaic_tpu().VMEM((len(coefficients) + 1, *x.shape[1:]), dtype)
    name = "newton_schulz_backward"
    return (_launch(body, name, (x, gradient), coefficients, dtype, [kept], interpret),)


_core.defvjp(_forward, _backward)


def _launch(body, name, arrays, coefficients, dtype, scratch, interpret) -> jax.Array:
    """Runs a body over the matrices of `arrays`, all ``[n, rows, columns]``; one such array."""
    n, *shape = arrays[0].shape
    rows, columns = shape
    matrix = pl.BlockSpec((1, rows, columns), lambda i: (i, 0, 0))
    table = pl.BlockSpec(memory_space=compat.mosaic_tpu().SMEM)
    backward = len(arrays) == 2
    products = len(coefficients) * rows * rows * ((5 if backward else 2) * columns + 2 * rows)
    if not backward:
        products -= len(coefficients) * rows**3
    return compat.tpu_kernel(
        body,
        name=name,
        semantics=("parallel",),
        vmem_bytes=vmem_bytes(shape, len(coefficients), dtype, backward),
        interpret=interpret,
        out_shape=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        grid=(n,),
        in_specs=[table, *(matrix for _ in arrays)],
        out_specs=matrix,
        scratch_shapes=scratch,
        cost_estimate=pl.CostEstimate(
            flops=2 * n * products,
            bytes_accessed=(len(arrays) + 1) * arrays[0].size * arrays[0].dtype.itemsize,
            transcendentals=n,
        ),
    )(jnp.asarray(coefficients, jnp.float32).reshape(-1, 3), *arrays)


def _norm(x: jax.Array) -> jax.Array:
    """Frobenius norm, [1, 1] float32."""
    return jnp.sqrt(jnp.sum(x * x, keepdims=True))


def _polynomial(y, a, b, c, dtype) -> tuple[jax.Array, jax.Array]:
    """``A = Y Yᵀ`` and ``aI + bA + cA²``, both rounded to `dtype`."""
    gram = dot(y, y, COLUMNS, COLUMNS)
    rounded = gram.astype(dtype)
    square = dot((c * gram).astype(dtype), rounded, COLUMNS, ROWS)
    row, column = (lax.broadcasted_iota(jnp.int32, gram.shape, axis) for axis in (0, 1))
    diagonal = jnp.where(row == column, a, 0.0)
    return rounded, (diagonal + b * gram + square).astype(dtype)


def _step(y, a, b, c, dtype) -> jax.Array:
    """One iteration, ``(aI + B) Y``; terms that cancel are added before they are rounded."""
    _, polynomial = _polynomial(y, a, b, c, dtype)
    return dot(polynomial, y, COLUMNS, ROWS).astype(dtype)


def _forward_body(table, x, out, *, eps, dtype, number):
    start = x[0].astype(dtype).astype(jnp.float32)
    y = (start / (_norm(start) + eps)).astype(dtype)

    def step(i, y):
        return _step(y, table[i, 0], table[i, 1], table[i, 2], dtype)

    out[0] = lax.fori_loop(0, number, step, y).astype(out.dtype)


def _backward_body(table, x, gradient, out, kept, *, eps, dtype, number):
    start = x[0].astype(dtype).astype(jnp.float32)
    norm = _norm(start)
    kept[0] = (start / (norm + eps)).astype(dtype)

    def forwards(i, _):
        kept[i + 1] = _step(kept[i], table[i, 0], table[i, 1], table[i, 2], dtype)

    def backwards(j, g):
        i = number - 1 - j
        a, b, c = table[i, 0], table[i, 1], table[i, 2]
        y, rounded = kept[i], g.astype(dtype)
        gram, polynomial = _polynomial(y, 0.0, b, c, dtype)
        outer = dot(rounded, y, COLUMNS, COLUMNS)
        both = outer + outer.T
        mixed = dot(both.astype(dtype), gram, COLUMNS, ROWS)
        d_gram = (b * both + c * (mixed + mixed.T)).astype(dtype)
        from_y = dot(polynomial, rounded, COLUMNS, ROWS) + dot(d_gram, y, COLUMNS, ROWS)
        return a * g + from_y

    lax.fori_loop(0, number - 1, forwards, None)  # the last iteration's result is not needed
    g = lax.fori_loop(0, number, backwards, gradient[0].astype(jnp.float32))
    # Through the norm, whose own gradient counts as 0 at the zero matrix.
    along = jnp.sum(g * start, keepdims=True) / ((norm + eps) * (norm + eps))
    along = jnp.where(norm > 0, along / jnp.where(norm > 0, norm, 1), 0)
    out[0] = (g / (norm + eps) - along * start).astype(out.dtype)
