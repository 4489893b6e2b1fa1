"""A branch added to its stream, and the layer norm, on Hopper GPUs through Pallas' Mosaic GPU.

Nothing but memory traffic counts here: forward the stream and the branch are read, sum and norm
written; backward the sum and the gradients of both results are read, the gradients of stream and
branch written. XLA makes two to three passes of each, and one more for each vector's sum.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.row_walk import Walk
from ttt_kernels.rows import wide

ROWS = 4  # of a step; a warp each
STAGES = 4  # slots of a warpgroup's ring
MAX_FEATURES = 1024  # that a row fits into a warp's registers


def unsupported(x: jax.Array) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    features, rows = x.shape[-1], x.size // x.shape[-1]
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Mosaic GPU kernel takes bfloat16"
    if rows % ROWS or rows * features >= 2**31:
        return f"{rows} rows; the Mosaic GPU kernel takes multiples of {ROWS}, below 2^31 numbers"
    if features > MAX_FEATURES or features % 64:
        limit = f"multiples of 64 to {MAX_FEATURES}"
        return f"{features} features; the Mosaic GPU kernel takes {limit}"
    return compat.layout_problem()


def residual_norm(
    x, branch, branch_bias, factor, scale, bias, epsilon: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`ttt_kernels.residual_norm` by the kernels, for arguments without `unsupported`.

    Args:
      x, branch, branch_bias, factor, scale, bias, epsilon: as there; vectors are not rounded.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).

    Returns:
      (s, y), like x.
    """
    arrays = _Arrays(x, branch, branch_bias, factor, scale, bias)
    params = compat.gpu_interpret_params() if interpret else None
    s, y = _core(arrays, branch is not None, epsilon, params)
    return s, y


def add_branch(x, branch, branch_bias, factor, interpret: bool = False) -> jax.Array:
    """`ttt_kernels.residual_norm.add_branch` by the kernels; arguments as of `residual_norm`."""
    arrays = _Arrays(x, branch, branch_bias, factor, None, None)
    (s,) = _core(arrays, True, 0.0, compat.gpu_interpret_params() if interpret else None)
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
def forward(arrays: _Arrays, epsilon: float, interpret) -> tuple[jax.Array, ...]:
    """(s, y) of `residual_norm`, or (s,) without a norm; s is x itself without a branch."""
    x, has_branch, has_norm = arrays.x, arrays.branch is not None, arrays.scale is not None
    stream = [_rows(a) for a in (x, arrays.branch) if a is not None]
    vectors = [_float(a) for a in (arrays.branch_bias, arrays.scale, arrays.bias) if a is not None]
    factor, period = _factors(arrays.factor, x)
    walk = Walk(*stream[0].shape, len(stream), warpgroups=4, stages=STAGES, step=ROWS)
    count, biased = has_branch + has_norm, arrays.branch_bias is not None

    def residual_norm_forward(*refs):
        refs = list(refs)
        sources = [refs.pop(0) for _ in stream]
        rows = [walk.load_vector(refs.pop(0)) for _ in vectors]
        factor_ref = refs.pop(0) if factor is not None else None
        out_refs = [refs.pop(0) for _ in range(count)]

        def step(row, arrays, carry):
            s, here = arrays[0], pl.ds(row, ROWS)
            times = None if factor is None else _factor(walk, factor_ref, row, period)
            if has_branch:
                branch = arrays[1] + wide(rows[0], s) if biased else arrays[1]
                if factor is not None:
                    branch = branch * times
                s = (s + branch).astype(x.dtype)
                compat.store(out_refs[0].at[here], s)
                s = s.astype(jnp.float32)
            if has_norm:
                normal, _ = _normalize(s, epsilon)
                y = normal * wide(rows[-2], s) + wide(rows[-1], s)
                compat.store(out_refs[-1].at[here], y.astype(x.dtype))
            return carry

        walk.run(sources, refs, step)

    call = compat.gpu_kernel(
        residual_norm_forward,
        out_type=[jax.ShapeDtypeStruct(stream[0].shape, x.dtype)] * count,
        scratch_types=walk.scratch(),
        **walk.launch(interpret),
    )
    results = call(*stream, *vectors, *([] if factor is None else [factor]))
    results = [y.reshape(x.shape) for y in results]
    return tuple(results) if has_branch else (x, *results)


@functools.partial(jax.jit, static_argnames=("has_branch", "epsilon", "interpret"))
def backward(kept: _Arrays, errors: tuple, has_branch: bool, epsilon: float, interpret) -> _Arrays:
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
    stream = [_rows(a) for a in (*errors, *([kept.x] if has_norm else []))]
    vectors = [_float(kept.scale)] if has_norm else []
    factor, period = _factors(kept.factor, like)
    writes_branch = factor is not None
    made, sums = has_norm + writes_branch, 2 * has_norm + has_branch
    # Of three, the sums spill registers, and that to the L2: rings leave little of the L1.
    warpgroups = 2 if sums == 3 else 3
    walk = Walk(*stream[0].shape, len(stream), warpgroups, STAGES, sums, ROWS)

    def residual_norm_backward(*refs):
        refs = list(refs)
        sources = [refs.pop(0) for _ in stream]
        scale = [walk.load_vector(refs.pop(0)) for _ in vectors]
        factor_ref = refs.pop(0) if writes_branch else None
        out_refs = [refs.pop(0) for _ in range(made)]
        sums_ref, *scratch = refs

        def step(row, arrays, totals):
            here, terms = pl.ds(row, ROWS), ()
            times = _factor(walk, factor_ref, row, period) if writes_branch else None
            error = arrays[0]
            if has_norm:
                dy, s = arrays[1:]
                normal, inverse = _normalize(s, epsilon)
                terms = (dy * normal, dy)
                error = error + _normalize_backwards(dy, normal, inverse, wide(scale[0], s))
                compat.store(out_refs[0].at[here], error.astype(like.dtype))
            if writes_branch:
                error = error * times
                compat.store(out_refs[-1].at[here], error.astype(like.dtype))
            if has_branch:
                terms = (*terms, error)
            return tuple(a + walk.fold(b) for a, b in zip(totals, terms, strict=True))

        totals = walk.run(sources, scratch[:2], step, walk.zeros())
        walk.add_up(totals, sums_ref, scratch[2:])

    partial_sums = jax.ShapeDtypeStruct((walk.groups, sums, walk.columns), jnp.float32)
    call = compat.gpu_kernel(
        residual_norm_backward,
        out_type=[jax.ShapeDtypeStruct(stream[0].shape, like.dtype)] * made + [partial_sums],
        scratch_types=walk.scratch(),
        **walk.launch(interpret),
    )
    *made, partial_sums = call(*stream, *vectors, *([factor] if writes_branch else []))
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


def _float(vector):
    return vector.astype(jnp.float32)


def _factors(factor, x):
    """(factors, number of rows for which one holds), rows' own where steps lie in two images."""
    if factor is None:
        return None, 0
    factor, period = _float(factor), x.size // x.shape[0] // x.shape[-1]
    return (jnp.repeat(factor, period), 1) if period % ROWS else (factor, period)


def _factor(walk: Walk, ref, row, period: int):
    """The factors of a step's rows, [rows, features] or one number."""
    if period > 1:
        return ref[lax.div(row, jnp.int32(period))]
    layout, shape = walk.layout().reduce(1), (ROWS, walk.columns)
    here = ref.at[pl.ds(row, ROWS)]
    factors = compat.mosaic_gpu().load(here, layout=layout, optimized=False)
    return lax.broadcast_in_dim(factors, shape, (0,))


def _row_mean(x):
    """[rows, features] from the means of rows."""
    mean = jnp.sum(x, axis=1) * (1 / x.shape[1])
    return lax.broadcast_in_dim(mean, x.shape, (0,))


def _normalize(s, epsilon: float):
    """(normalised rows, 1 / sqrt(var + ε))."""
    s = s - _row_mean(s)
    inverse = lax.rsqrt(_row_mean(s * s) + epsilon)
    return s * inverse, inverse


def _normalize_backwards(dy, normal, inverse, scale):
    """Gradient of the rows that were normalised, as of `xla.layer_normalize`."""
    g = dy * scale
    return (g - _row_mean(g) - normal * _row_mean(g * normal)) * inverse
