"""A branch added to its stream, and the layer norm, on NVIDIA GPUs through Pallas' Triton backend.

Nothing but memory traffic counts here: forward the stream and the branch are read, sum and norm
written; backward the sum and the gradients of both results are read, the gradients of stream and
branch written. XLA makes two to three passes of each, and one more for each vector's sum.

A warp holds a row. Rows are cut into pieces of a power of two columns, which Triton asks for.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

ROWS = 4  # of a step; a warp each
PROGRAMS = 264  # of the backward kernel, each with its share of the rows: 2 a multiprocessor
MAX_FEATURES = 1024  # that a row fits into a warp's registers


def unsupported(x: jax.Array) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    features, rows = x.shape[-1], x.size // x.shape[-1]
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Triton kernel takes bfloat16"
    if rows % ROWS or rows * features >= 2**31:
        return f"{rows} rows; the Triton kernel takes multiples of {ROWS}, below 2^31 numbers"
    if features > MAX_FEATURES or features % 64:
        return f"{features} features; the Triton kernel takes multiples of 64 to {MAX_FEATURES}"
    return None


def residual_norm(
    x, branch, branch_bias, factor, scale, bias, epsilon: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`ttt_kernels.residual_norm` by the kernels, for arguments without `unsupported`.

    Args:
      x, branch, branch_bias, factor, scale, bias, epsilon: as there; vectors are not rounded.
      interpret: runs in Pallas' interpreter, on any device.

    Returns:
      (s, y), like x.
    """
    arrays = _Arrays(x, branch, branch_bias, factor, scale, bias)
    s, y = _core(arrays, branch is not None, epsilon, interpret)
    return s, y


def add_branch(x, branch, branch_bias, factor, interpret: bool = False) -> jax.Array:
    """`ttt_kernels.residual_norm.add_branch` by the kernels; arguments as of `residual_norm`."""
    (s,) = _core(_Arrays(x, branch, branch_bias, factor, None, None), True, 0.0, interpret)
    return s


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "branch", "branch_bias", "factor", "scale", "bias"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The arguments; None where there is none. Without a branch or without a norm, not both."""

    x: jax.Array
    branch: jax.Array | None
    branch_bias: jax.Array | None
    factor: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _core(arrays, has_branch, epsilon, interpret):
    return forward(arrays, epsilon, interpret)


def _core_forward(arrays, has_branch, epsilon, interpret):
    results = forward(arrays, epsilon, interpret)
    # Of the branch nothing is needed, and the sum only where a norm is taken of it.
    s = None if arrays.scale is None else results[0]
    return results, dataclasses.replace(arrays, x=s, branch=None)


def _core_backward(has_branch, epsilon, interpret, kept, errors):
    return (backward(kept, errors, has_branch, epsilon, interpret),)


_core.defvjp(_core_forward, _core_backward)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def forward(arrays: _Arrays, epsilon: float, interpret: bool) -> tuple[jax.Array, ...]:
    """(s, y) of `residual_norm`, or (s,) without a norm; s is x itself without a branch."""
    x, has_branch, has_norm = arrays.x, arrays.branch is not None, arrays.scale is not None
    features = x.shape[-1]
    pieces = _pieces(features)

    def residual_norm_forward(*refs):
        refs = iter(refs)
        x_ref = next(refs)
        branch_refs = [next(refs) for _ in range(3)] if has_branch else ()
        norm_refs = [next(refs) for _ in range(2)] if has_norm else ()
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        s = [x_ref[rows, piece].astype(jnp.float32) for piece in pieces]
        if has_branch:
            branch_ref, bias_ref, factor_ref = branch_refs
            sum_ref, factor = next(refs), factor_ref[rows]
            for n, piece in enumerate(pieces):
                branch = branch_ref[rows, piece].astype(jnp.float32) + bias_ref[piece]
                rounded = (s[n] + branch * factor[:, None]).astype(x.dtype)
                sum_ref[rows, piece] = rounded
                s[n] = rounded.astype(jnp.float32)
        if has_norm:
            scale_ref, shift_ref = norm_refs
            out_ref, (normal, _) = next(refs), _normalize(s, features, epsilon)
            for n, piece in zip(normal, pieces, strict=True):
                out_ref[rows, piece] = (n * scale_ref[piece] + shift_ref[piece]).astype(x.dtype)

    operands = [_rows(x)]
    if has_branch:
        operands += [_rows(arrays.branch), *_branch_vectors(arrays, x)]
    if has_norm:
        operands += [arrays.scale.astype(jnp.float32), arrays.bias.astype(jnp.float32)]
    count = has_branch + has_norm
    results = compat.triton_kernel(
        residual_norm_forward,
        out_shape=[jax.ShapeDtypeStruct(operands[0].shape, x.dtype)] * count,
        grid=(operands[0].shape[0] // ROWS,),
        num_warps=ROWS,
        interpret=interpret,
    )(*operands)
    results = [y.reshape(x.shape) for y in results]
    return tuple(results) if has_branch else (x, *results)


@functools.partial(jax.jit, static_argnames=("has_branch", "epsilon", "interpret"))
def backward(
    kept: _Arrays, errors: tuple, has_branch: bool, epsilon: float, interpret: bool
) -> _Arrays:
    """Gradients of `forward` with respect to its arrays, for those of its results.

    Args:
      kept: its arrays, with s in the place of x (None without a norm) and no branch.
      errors: gradients of the results.
      has_branch: whether there was a branch.
      epsilon: as of `forward`.
      interpret: as of `forward`.

    Returns:
      The gradients; None where there was no array.
    """
    has_norm, like = kept.scale is not None, errors[0]
    features = like.shape[-1]
    pieces, writes_branch = _pieces(features), kept.factor is not None
    blocks = like.size // features // ROWS
    programs = min(PROGRAMS, blocks)
    sums = 2 * has_norm + has_branch

    def residual_norm_backward(*refs):
        refs = iter(refs)
        error_ref = next(refs)
        s_ref, dy_ref, scale_ref = (next(refs) for _ in range(3)) if has_norm else 3 * (0,)
        factor_ref = next(refs) if writes_branch else None
        dx_ref = next(refs) if has_norm else None
        dbranch_ref = next(refs) if writes_branch else None
        sums_ref, program = next(refs), pl.program_id(0)
        scale = [scale_ref[piece] for piece in pieces] if has_norm else ()
        low = program * blocks // programs
        high = (program + 1) * blocks // programs

        def load(index):
            rows = pl.ds(index * ROWS, ROWS)
            refs = (error_ref, dy_ref, s_ref) if has_norm else (error_ref,)
            return [[ref[rows, piece] for piece in pieces] for ref in refs]

        def block(index, carry):
            totals, loaded = carry
            ahead = load(jnp.minimum(index + 1, high - 1))  # arrives while this is computed
            rows = pl.ds(index * ROWS, ROWS)
            error, *loaded = [[piece.astype(jnp.float32) for piece in array] for array in loaded]
            terms = [() for _ in pieces]
            if has_norm:
                dy, s = loaded
                normal, inverse = _normalize(s, features, epsilon)
                terms = [(d * n, d) for d, n in zip(dy, normal, strict=True)]
                through = _normalize_backwards(dy, normal, inverse, scale, features)
                error = [e + t for e, t in zip(error, through, strict=True)]
                _write(dx_ref, rows, pieces, error)
            if writes_branch:
                factor = factor_ref[rows]
                error = [e * factor[:, None] for e in error]
                _write(dbranch_ref, rows, pieces, error)
            if has_branch:
                terms = [(*t, e) for t, e in zip(terms, error, strict=True)]
            return jax.tree.map(jnp.add, totals, terms), ahead

        zeros = [(jnp.zeros((ROWS, piece.size), jnp.float32),) * sums for piece in pieces]
        totals, _ = lax.fori_loop(low, high, block, (zeros, load(low)))
        for piece, parts in zip(pieces, totals, strict=True):
            for n, part in enumerate(parts):
                sums_ref[program, n, piece] = jnp.sum(part, axis=0)

    rows = jax.ShapeDtypeStruct((blocks * ROWS, features), like.dtype)
    operands = [_rows(errors[0])]
    if has_norm:
        operands += [_rows(kept.x), _rows(errors[1]), kept.scale.astype(jnp.float32)]
    if writes_branch:
        operands += [_by_row(kept.factor, like)]
    partial_sums = jax.ShapeDtypeStruct((programs, sums, features), jnp.float32)
    *made, partial_sums = compat.triton_kernel(
        residual_norm_backward,
        out_shape=[rows] * (has_norm + writes_branch) + [partial_sums],
        grid=(programs,),
        num_warps=ROWS,
        interpret=interpret,
    )(*operands)
    made = [y.reshape(like.shape) for y in made]
    dx = made[0] if has_norm else errors[0]
    dbranch = (made[-1] if writes_branch else dx) if has_branch else None
    return _gradients(kept, dx, dbranch, jnp.sum(partial_sums, axis=0))


def _gradients(kept: _Arrays, dx, dbranch, sums) -> _Arrays:
    """The result of `backward`; sums: [scale's, bias', branch_bias', as far as there are, ...]."""

    def vector(index: int, array):
        return None if array is None else sums[index].astype(array.dtype)

    return _Arrays(
        x=dx,
        branch=dbranch,
        branch_bias=vector(-1, kept.branch_bias),
        factor=None if kept.factor is None else jnp.zeros_like(kept.factor),
        scale=vector(0, kept.scale),
        bias=vector(1, kept.bias),
    )


def _rows(x):
    """[rows, features]."""
    return x.reshape(-1, x.shape[-1])


def _pieces(features: int) -> list:
    """Slices of a power of two columns."""
    width = features & -features
    return [pl.ds(start, width) for start in range(0, features, width)]


def _by_row(factor, x):
    """A factor for every row of `_rows(x)`."""
    per_image = x.size // x.shape[0] // x.shape[-1]
    return jnp.repeat(factor.astype(jnp.float32), per_image)


def _branch_vectors(arrays: _Arrays, x) -> tuple[jax.Array, jax.Array]:
    """The branch's bias and factors, zeros and ones where there are none."""
    bias, factor = arrays.branch_bias, arrays.factor
    bias = jnp.zeros(x.shape[-1], jnp.float32) if bias is None else bias.astype(jnp.float32)
    factor = jnp.ones(x.shape[0], jnp.float32) if factor is None else factor
    return bias, _by_row(factor, x)


def _row_mean(pieces, features: int):
    """[rows, 1] of the pieces of rows."""
    return sum(jnp.sum(piece, axis=1) for piece in pieces)[:, None] / features


def _normalize(s, features: int, epsilon: float):
    """(pieces of the normalised rows, 1 / sqrt(var + ε))."""
    mean = _row_mean(s, features)
    s = [piece - mean for piece in s]
    inverse = lax.rsqrt(_row_mean([piece * piece for piece in s], features) + epsilon)
    return [piece * inverse for piece in s], inverse


def _normalize_backwards(dy, normal, inverse, scale, features: int):
    """Gradient of the rows that were normalised, as of `xla.layer_normalize`."""
    g = [d * w for d, w in zip(dy, scale, strict=True)]
    shift = _row_mean(g, features)
    slope = _row_mean([a * n for a, n in zip(g, normal, strict=True)], features)
    return [(a - shift - n * slope) * inverse for a, n in zip(g, normal, strict=True)]


def _write(ref, rows, pieces, values) -> None:
    for piece, value in zip(pieces, values, strict=True):
        ref[rows, piece] = value.astype(ref.dtype)
