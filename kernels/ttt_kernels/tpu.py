"""What the kernels for TPUs of all operations share: products and masks of one block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ROWS, COLUMNS = 0, 1
"""The axis of an operand over which `dot` sums."""


def dot(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Sum over one axis of each matrix, accumulated in float32.

    bfloat16 operands are multiplied as they are; float32 ones in full precision, not in the
    chip's default of bfloat16 passes.

    >>> import jax.numpy as jnp
    >>> dot(jnp.ones((4, 2)), jnp.ones((3, 2)), COLUMNS, COLUMNS).shape
    (4, 3)
    """
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), ((), ())), precision=exact,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def row_sums(x: jax.Array) -> jax.Array:
    """Sums over the channels as a row, [c, d] float32 -> [1, c].

    By a product, in which sums of rows come out along the lanes.
    """
    return dot(jnp.ones((8, x.shape[1]), jnp.float32), x, COLUMNS, COLUMNS)[:1]


def inside(block, size: int, length: int) -> jax.Array | None:
    """Which tokens of a block lie in the row, [size, 1] bool, or None for all of any block."""
    if length % size == 0:
        return None
    return lax.broadcasted_iota(jnp.int32, (size, 1), 0) < length - block * size


def clean(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Zeros where not `valid`: memory behind a row, and padding, may hold NaN."""
    return x if valid is None else jnp.where(valid, x.astype(jnp.float32), 0).astype(x.dtype)
