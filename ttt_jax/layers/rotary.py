"""Rotary position embedding (Su et al. 2021, eq. 34), in the half-split form of GPT-NeoX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.layers.rms_norm import at_least_float32


class RotaryTables(NamedTuple):
    """Cosines and sines of the angles, [batch or 1, time, 1, head_dim / 2] each."""

    cos: jax.Array
    sin: jax.Array


def rotary_tables(positions, head_dim: int, theta: float, dtype) -> RotaryTables:
    """cos and sin of position · θ^(−2i / head_dim), i = 0 .. head_dim/2 − 1.

    Args:
      positions: [batch or 1, time], integers: the place of a token in its document.
      head_dim: size of a head, even.
      theta: base of the wavelengths.
      dtype: compute dtype of the model; the tables are float32, or float64 for float64.

    Returns:
      The tables.

    Raises:
      ValueError: if head_dim is odd.

    >>> rotary_tables(jnp.arange(3)[None], 8, 1e4, "float32").cos.shape
    (1, 3, 1, 4)
    """
    if head_dim % 2:
        raise ValueError(f"{head_dim=} must be even for rotary embedding: pairs are rotated")
    dtype = at_least_float32(dtype)
    exponents = -2 * jnp.arange(head_dim // 2, dtype=dtype) / head_dim
    frequencies = jnp.asarray(theta, dtype) ** exponents
    angles = positions.astype(dtype)[..., None] * frequencies
    return RotaryTables(jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None])


def apply_rotary(x, tables: RotaryTables):
    """Rotates the pairs (x[i], x[i + head_dim/2]) of each head by the position's angles.

    (a, b) → (a cos − b sin, b cos + a sin).

    Args:
      x: [batch, time, heads, head_dim], any float dtype.
      tables: from `rotary_tables`.

    Returns:
      Same shape and dtype; computed in the tables' dtype.

    >>> tables = rotary_tables(jnp.arange(2)[None], 4, 1e4, "float32")
    >>> x = jnp.ones((1, 2, 1, 4))
    >>> bool(jnp.allclose(jnp.sum(apply_rotary(x, tables) ** 2, -1), 4.0))
    True
    """
    first, second = jnp.split(x.astype(tables.cos.dtype), 2, axis=-1)
    rotated = (
        first * tables.cos - second * tables.sin,
        second * tables.cos + first * tables.sin,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
