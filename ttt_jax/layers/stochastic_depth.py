"""Stochastic depth: in training a residual branch is left out for some rows of the batch."""

import jax
import jax.numpy as jnp


def drop_factor(rows: int, rate, key, dtype=jnp.float32):
    """keep / (1 − rate) with one Bernoulli(1 − rate) draw a row (Huang et al. 2016, eq. 2).

    A branch is multiplied by it: a factor a row, not a choice of each number, of which the
    backward pass would keep all.

    Args:
      rows: number of rows.
      rate: probability of leaving a row out, in [0, 1); may be traced.
      key: a jax.random key.
      dtype: of the result, float32 or wider.

    Returns:
      [rows]: 0 or 1 / (1 − rate); the expectation is 1.

    >>> factor = drop_factor(1000, 0.25, jax.random.key(0))
    >>> sorted({round(float(v), 3) for v in factor}), bool(abs(factor.mean() - 1) < 0.05)
    ([0.0, 1.333], True)
    """
    keep = jax.random.bernoulli(key, 1 - rate, (rows,))
    return keep / jnp.asarray(1 - rate, dtype)
