"""Norms and activations of the parts of rows, on NVIDIA GPUs through Pallas' Triton backend.

Each way is one pass over memory; XLA makes two forward, where the backward pass wants the norms,
and two or three backward. An array of several parts is read, and its gradient written, as the
product has it: slices of it would be copied.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

ROWS = 4  # of a step; a warp each
PROGRAMS = 264  # of the backward kernel with sums, each with its share of the rows
MAX_WIDTH = 256  # numbers of a row in one piece


def unsupported(x: jax.Array, size: int) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    rows, features = x.shape
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Triton kernel takes bfloat16"
    if rows % ROWS or rows * features >= 2**31:
        return f"{rows} rows; the Triton kernel takes multiples of {ROWS}, below 2^31 numbers"
    if size % 64 or size > 1024:
        return f"groups of {size}; the Triton kernel takes multiples of 64 to 1024"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def norm_parts(x, scales, kinds, size: int, epsilon: float, interpret: bool = False):
    """`ttt_kernels.norm_parts` by the kernels, for arguments without `unsupported`."""
    return forward(x, scales, kinds, size, epsilon, interpret)


def _forward(x, scales, *options):
    return forward(x, scales, *options), (x, scales)


def _backward(kinds, size, epsilon, interpret, kept, errors):
    return backward(*kept, tuple(errors), kinds, size, epsilon, interpret)


norm_parts.defvjp(_forward, _backward)
_STATIC = ("kinds", "size", "epsilon", "interpret")


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def forward(x, scales, kinds, size: int, epsilon: float, interpret: bool):
    """The parts, [rows, features / parts] each, of x [rows, features]; scales as of the API."""
    x = _by_part(x, len(kinds), size)
    rows, parts, heads, _ = x.shape

    def norm_parts_forward(x_ref, *refs):
        scale_ref = None if scales is None else refs[0]
        here = pl.ds(pl.program_id(0) * ROWS, ROWS)
        for part, out_ref in enumerate(refs[scales is not None :]):
            for some, pieces in _pieces(heads, size):
                values = [x_ref[here, part, some, piece].astype(jnp.float32) for piece in pieces]
                made, *_ = _map(kinds[part], values, size, epsilon)
                for piece, y in zip(pieces, made, strict=True):
                    if kinds[part] == "rms":
                        y = y * scale_ref[part, piece]
                    out_ref[here, some, piece] = y.astype(x.dtype)

    made = compat.triton_kernel(
        norm_parts_forward,
        out_shape=[jax.ShapeDtypeStruct((rows, heads, size), x.dtype)] * parts,
        grid=(rows // ROWS,),
        num_warps=ROWS,
        interpret=interpret,
    )(x, *([] if scales is None else [scales.astype(jnp.float32)]))
    return tuple(y.reshape(rows, -1) for y in made)


@functools.partial(jax.jit, static_argnames=_STATIC)
def backward(x, scales, errors, kinds, size: int, epsilon: float, interpret: bool):
    """(gradient of x, gradient of scales or None), from those of the parts."""
    shape, x = x.shape, _by_part(x, len(kinds), size)
    errors = [_by_part(error, 1, size)[:, 0] for error in errors]
    rows, parts, heads, _ = x.shape
    blocks = rows // ROWS
    programs = blocks if scales is None else min(PROGRAMS, blocks)
    cuts = _pieces(heads, size)
    some, pieces = cuts[0]

    def norm_parts_backward(x_ref, *refs):
        refs = list(refs)
        scale_ref = None if scales is None else refs.pop(0)
        error_refs, dx_ref = refs[:parts], refs[parts]
        sums_ref = None if scales is None else refs[parts + 1]
        program = pl.program_id(0)

        def load(index):
            here = pl.ds(index * ROWS, ROWS)
            return [
                ([x_ref[here, part, some, piece] for piece in pieces],
                 [error_refs[part][here, some, piece] for piece in pieces])
                for part in range(parts) for some, pieces in cuts
            ]  # fmt: skip

        def work(index, loaded):
            """Writes the gradient of a block of rows; terms of the scales' gradients by part."""
            here, loaded, terms = pl.ds(index * ROWS, ROWS), iter(loaded), []
            for part in range(parts):
                total = [0.0] * len(pieces)
                for some, cut in cuts:
                    values, error = ([a.astype(jnp.float32) for a in y] for y in next(loaded))
                    made, factor, inverse, slopes = _map(kinds[part], values, size, epsilon)
                    if kinds[part] == "rms":
                        products = [e * n for e, n in zip(error, made, strict=True)]
                        total = [t + p for t, p in zip(total, products, strict=True)]
                        error = [e * scale_ref[part, c] for e, c in zip(error, cut, strict=True)]
                    if factor is not None:
                        along = _row_sum([e * n for e, n in zip(error, made, strict=True)])
                        along = along * factor
                        error = [
                            (e - n * along) * inverse for e, n in zip(error, made, strict=True)
                        ]
                    if slopes is not None:
                        error = [e * s for e, s in zip(error, slopes, strict=True)]
                    for c, e in zip(cut, error, strict=True):
                        dx_ref[here, part, some, c] = e.astype(x.dtype)
                terms.append(total)
            return terms

        if scales is None:
            work(program, load(program))
            return
        zeros = [jnp.zeros((ROWS, some.size, piece.size), jnp.float32) for piece in pieces]
        low, high = program * blocks // programs, (program + 1) * blocks // programs

        def block(index, carry):
            totals, loaded = carry
            ahead = load(jnp.minimum(index + 1, high - 1))  # arrives while this is computed
            return jax.tree.map(jnp.add, totals, work(index, loaded)), ahead

        totals, _ = lax.fori_loop(low, high, block, ([zeros] * parts, load(low)))
        for part, total in enumerate(totals):
            for piece, sums in zip(pieces, total, strict=True):
                sums_ref[program, part, :, piece] = jnp.sum(sums, axis=0)

    out_shape = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    operands = [x]
    if scales is not None:
        operands.append(scales.astype(jnp.float32))
        sums = (programs, parts, some.size, size)
        out_shape.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    made = compat.triton_kernel(
        norm_parts_backward,
        out_shape=out_shape,
        grid=(programs,),
        num_warps=ROWS,
        interpret=interpret,
    )(*operands, *errors)
    dscales = None if scales is None else jnp.sum(made[1], axis=(0, 2)).astype(scales.dtype)
    return made[0].reshape(shape), dscales


def _by_part(x, parts: int, size: int):
    """[rows, parts, groups, size] of [rows, features]."""
    return x.reshape(x.shape[0], parts, -1, size)


def _pieces(heads: int, size: int) -> list:
    """(slice of groups, slices of their numbers), powers of two, which Triton asks for."""
    width = min(size & -size, MAX_WIDTH)
    some = min(heads & -heads, max(1, MAX_WIDTH // size))
    pieces = [pl.ds(start, width) for start in range(0, size, width)]
    return [(pl.ds(start, some), pieces) for start in range(0, heads, some)]


def _row_sum(pieces):
    """[rows, groups, 1] of the pieces of groups."""
    return sum(jnp.sum(piece, axis=-1) for piece in pieces)[..., None]


def _map(kind: str, x, size: int, epsilon: float):
    """(results without a scale n, c, r, slopes) of the pieces of groups x.

    With the activations a = x, or silu(x) and its slopes: n = r a, where the gradient of a is
    r (e - n c Σ e n); without a norm c is None. Slopes is None where a = x.
    """
    slopes = None
    if kind != "rms":
        gates = [1 / (1 + jnp.exp(-a)) for a in x]
        slopes = [g * (1 + a * (1 - g)) for g, a in zip(gates, x, strict=True)]
        x = [a * g for a, g in zip(x, gates, strict=True)]
    if kind == "silu":
        return x, None, None, slopes
    squares = _row_sum([a * a for a in x])
    if kind == "rms":
        factor, inverse = 1 / size, lax.rsqrt(squares / size + epsilon)
    else:
        norm = jnp.sqrt(squares)
        inverse = 1 / (norm + epsilon)
        factor = (norm + epsilon) / jnp.where(norm > 0, norm, 1.0)
    return [a * inverse for a in x], factor, inverse, slopes
