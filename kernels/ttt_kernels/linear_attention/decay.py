"""Sums of log decays whose differences stay exact however far the running sum falls.

A decay of -80 a token takes a float32 running sum to where its spacing is 1e-3, and a difference
of two such sums then carries that error into every weight exp(sum_i - sum_j). So each number is
split into its nearest integer and a rest in [-0.5, 0.5]; integers add exactly in float32, and the
rests stay small.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LogSum(NamedTuple):
    """`whole + part`: a sum of log decays; `whole` holds integers and carries no gradient."""

    whole: jax.Array
    part: jax.Array

    def __getitem__(self, index) -> LogSum:
        return LogSum(self.whole[index], self.part[index])

    def map(self, function) -> LogSum:
        """The same function of both halves (an indexing, a reshape, a broadcast)."""
        return LogSum(function(self.whole), function(self.part))


def _split(x: jax.Array) -> LogSum:
    whole = lax.stop_gradient(jnp.round(x))
    return LogSum(whole, x - whole)


def cumulative(log_decay: jax.Array, axis: int, floor: float | None = None) -> LogSum:
    """Inclusive running sum along `axis`.

    Values below `floor`, by default -200 (float32) or -1000 (float64), count as that: their exp
    is 0 either way, and -inf would leave NaN in the differences.
    """
    if floor is None:
        floor = -1000.0 if log_decay.dtype == jnp.float64 else -200.0
    x = _split(jnp.maximum(log_decay, floor))
    return x.map(lambda y: jnp.cumsum(y, axis=axis))


def cumulative_sums(sums: LogSum, axis: int) -> LogSum:
    """Inclusive running sum along `axis` of numbers that are themselves `LogSum`s."""
    rest = _split(sums.part)
    whole = jnp.cumsum(sums.whole + rest.whole, axis=axis)
    return LogSum(whole, jnp.cumsum(rest.part, axis=axis))


def factor(later: LogSum, earlier: LogSum | None = None) -> jax.Array:
    """`exp(later - earlier)`, the factor by which a state shrinks in between.

    Broadcasts; the caller masks the pairs in which `later` comes first *before* the exponential
    (`masked_factor`), where the difference is positive without bound.
    """
    if earlier is None:
        return jnp.exp(later.whole + later.part)
    return jnp.exp((later.whole - earlier.whole) + (later.part - earlier.part))


def masked_factor(later: LogSum, earlier: LogSum, mask: jax.Array) -> jax.Array:
    """`exp(later - earlier)` where `mask`, else 0, with zero gradient at the masked pairs."""
    difference = (later.whole - earlier.whole) + (later.part - earlier.part)
    return jnp.exp(jnp.where(mask, difference, -jnp.inf))
