"""A batched sum of matrix products on Hopper GPUs, a tile a CTA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels import compat
from ttt_kernels.newton_schulz.mosaic_gpu_tile import Plan, Tile, choose_tile, multiply, scratch


@functools.partial(
    jax.jit, static_argnames=("transposed", "symmetric", "tile", "interpret")
)  # lowered once for all iterations
def product(
    terms: tuple[tuple[jax.Array, jax.Array], ...],
    weights: jax.Array | None = None,
    other: jax.Array | None = None,
    *,
    transposed: bool = False,
    symmetric: bool = False,
    tile: Tile | None = None,
    interpret=None,
) -> jax.Array:
    """`w0 * sum(left right) + w1 * other + w2 * I`, batched, each matrix with its own weights.

    Args:
      terms: (left, right) pairs of bfloat16 arrays, their sizes multiples of 64: left
        [n, rows, inner], right [n, inner, columns], or [n, columns, inner] with `transposed`.
      weights: [n, 3] float32, w0, w1 and w2; None for (1, 0, 0).
      other: [n, rows, columns] bfloat16; None leaves out `w1 * other + w2 * I`.
      transposed: multiplies by `rightᵀ`.
      symmetric: the result is symmetric: tiles below the diagonal are mirrored, not computed.
      tile: None chooses.
      interpret: None, or the interpreter's parameters.

    Returns:
      [n, rows, columns] bfloat16, rounded once from float32.
    """
    left, right = terms[0]
    count, rows, inner = left.shape
    columns = right.shape[1 if transposed else 2]
    square = symmetric and len(terms) == 1  # X Xᵀ
    plan = Plan(tile or choose_tile(rows, columns), rows, columns, inner, transposed, symmetric)

    def newton_schulz_product(*refs):
        n = lax.axis_index("matrix")
        operands, refs = refs[: 2 * len(terms)], list(refs[2 * len(terms) :])
        weight = None
        if weights is not None:
            weight_ref = refs.pop(0)
            weight = [weight_ref[n, k] for k in range(1 if other is None else 3)]
        other_ref = None if other is None else refs.pop(0).at[n]
        pairs = [(a.at[n], b.at[n]) for a, b in zip(operands[::2], operands[1::2], strict=True)]
        if square:
            pairs = [(pairs[0][0], pairs[0][0])]
        multiply(plan, lax.axis_index("tile"), pairs, refs[0].at[n], refs[1:], weight, other_ref)
        compat.mosaic_gpu().wait_smem_to_gmem(0)

    call = compat.gpu_kernel(
        newton_schulz_product,
        out_type=jax.ShapeDtypeStruct((count, rows, columns), jnp.bfloat16),
        scratch_types=scratch(plan),
        grid=(plan.tiles, count),
        grid_names=("tile", "matrix"),
        interpret=interpret,
    )
    return call(*sum(terms, ()), *(x for x in (weights, other) if x is not None))
