"""Many small unit lower-triangular systems at once, by nothing but matrix products.

The inverse of a unit lower-triangular matrix is put together from those of its diagonal blocks,

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]],

beginning with blocks of one number and twice as wide at every level. All numbers on the way are
entries of inverses of diagonal blocks, which stay small where the solution does: for keys that
repeat, the inverse has entries of at most 2, where powers of the matrix reach 1e18 at 64 rows. What
rounding has gathered, up to eight times that of a substitution at 64 rows, one Newton step takes
away.

`lax.linalg.triangular_solve` is no way to do it: on a CPU two of LAPACK's batched solves that run
at once wait for each other's threads for ever (jaxlib 0.10.2).

Source of the block formula and its rounding errors: Du Croz and Higham, *Stability of Methods for
Matrix Inversion* (IMA Journal of Numerical Analysis 12, 1992), section 2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

# Three bfloat16 passes or TF32 would undo the Newton step.
_product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def solve_unit_lower(lower: jax.Array, right: jax.Array) -> jax.Array:
    """`(I + lower)^-1 right`, with derivatives of every order by solves with the same inverse.

    Args:
      lower: [..., n, n] floats, zero on and above the diagonal; n >= 1.
      right: [..., n, columns] of the same dtype.

    Returns:
      Like `right`.

    >>> import jax.numpy as jnp
    >>> lower = jnp.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    >>> solve_unit_lower(lower, jnp.array([[1.0], [1.0], [1.0]])).ravel().tolist()
    [1.0, -1.0, 4.0]
    """
    inverse = _inverse(lax.stop_gradient(lower))
    # The rule of a linear solve differentiates `x + lower x = right`, not how the inverse is made.
    return lax.custom_linear_solve(
        lambda x: x + _product(lower, x),
        right,
        solve=lambda _, y: _product(inverse, y),
        transpose_solve=lambda _, y: _product(jnp.swapaxes(inverse, -1, -2), y),
    )


def _inverse(lower: jax.Array) -> jax.Array:
    """`(I + lower)^-1`, [..., n, n]."""
    rows = lower.shape[-1]
    tail = (1 << (rows - 1).bit_length()) - rows  # to a power of two, by rows of the identity
    padded = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, tail)] * 2)
    blocks = jnp.ones((*padded.shape[:-1], 1, 1), lower.dtype)
    while blocks.shape[-3] > 1:
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = _product(second, _product(_corners(padded, first.shape[-1]), first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([-corner, second], axis=-1)], axis=-2)
    inverse = blocks[..., 0, :rows, :rows]
    error = jnp.eye(rows, dtype=lower.dtype) - inverse - _product(lower, inverse)
    return inverse + _product(inverse, error)


def _corners(matrix: jax.Array, size: int) -> jax.Array:
    """Lower left quarters of the diagonal blocks of 2 `size` rows, [..., blocks, size, size]."""
    count = matrix.shape[-1] // (2 * size)
    blocks = matrix.reshape(*matrix.shape[:-2], count, 2 * size, count, 2 * size)
    quarters = blocks[..., size:, :, :size]
    # No gather: a partitioner need not know that it moves nothing between devices.
    diagonal = jnp.eye(count, dtype=bool)[:, None, :, None]
    return jnp.sum(jnp.where(diagonal, quarters, 0), axis=-2)
