"""Stochastic depth: in training a residual branch is left out for some rows of the batch."""

import jax
import jax.numpy as jnp

from ttt_jax.layers.rms_norm import at_least_float32


def drop_path(x, rate, key):
    """x · keep / (1 − rate) with one Bernoulli(1 − rate) draw a row (Huang et al. 2016, eq. 2).

    Args:
      x: [batch, ...], a residual branch, any float dtype.
      rate: probability of leaving a row out, in [0, 1); may be traced.
      key: a jax.random key.

    Returns:
      Like x; its expectation is x.

    >>> x = jnp.ones((1000, 2))
    >>> y = drop_path(x, 0.25, jax.random.key(0))
    >>> sorted({round(float(v), 3) for v in y.ravel()}), bool(abs(y.mean() - 1) < 0.05)
    ([0.0, 1.333], True)
    """
    keep = jax.random.bernoulli(key, 1 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
    # A factor a row, not a choice of each number, of which the backward pass would keep all.
    wide = at_least_float32(x.dtype)
    return (x.astype(wide) * (keep / jnp.asarray(1 - rate, wide))).astype(x.dtype)
