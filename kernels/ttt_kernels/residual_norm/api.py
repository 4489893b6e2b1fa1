"""The public operations `residual_norm` and `add_branch` and the choice of implementation."""

from __future__ import annotations

from typing import Literal

import jax

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_number
from ttt_kernels.choice import choose
from ttt_kernels.residual_norm import mosaic_gpu, xla

Implementation = Literal["xla", "mosaic_gpu"]
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def residual_norm(
    x: jax.Array,
    branch: jax.Array | None,
    branch_bias: jax.Array | None,
    factor: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The stream after a branch, and its layer norm::

        s = x + factor (branch + branch_bias);  n = (s - mean(s)) / sqrt(var(s) + epsilon)
        y = n scale + bias

    As one operation, the gradient of s adds what comes from s itself and what comes through y in
    one pass, which also makes the branch's gradient and the sums for the three vectors.

    Args:
      x: [batch, ..., features] floats, the stream.
      branch: like x, or None: then s is x, and returned for the gradients' sake.
      branch_bias: [features] floats, the branch's last bias, or None.
      factor: [batch] floats, by which rows' branches are multiplied (stochastic depth), or None;
        a constant, of which no gradient is taken.
      scale: [features] floats.
      bias: [features] floats.
      epsilon: added to the variance, in units of x².
      implementation: "xla" (any device), "mosaic_gpu" (one kernel each way for Hopper GPUs), or
        None, which picks the fastest that runs here and logs the choice once. A named
        implementation never falls back.

    Returns:
      (s, y), like x; sums and norms are taken in at least float32.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Sources: Ba et al. 2016 (arXiv 1607.06450), eq. 4; Huang et al. 2016 (arXiv 1603.09382), eq. 2.

    >>> import jax.numpy as jnp
    >>> x, one = jnp.array([[1.0, 2.0]]), jnp.ones(2)
    >>> s, y = residual_norm(x, x, one, jnp.array([0.5]), one, 0 * one, epsilon=0.0)
    >>> s.tolist(), y.round(3).tolist()
    ([[2.0, 3.5]], [[-1.0, 1.0]])
    """
    _check(x, branch, branch_bias, factor)
    for name, array in (("scale", scale), ("bias", bias)):
        _check_vector(name, array, x)
    check_number("epsilon", epsilon, least=0)
    module = _module("residual_norm", x, implementation)
    return module.residual_norm(x, branch, branch_bias, factor, scale, bias, float(epsilon))


def add_branch(
    x: jax.Array,
    branch: jax.Array,
    branch_bias: jax.Array | None,
    factor: jax.Array | None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The stream after a branch, s = x + factor (branch + branch_bias), as `residual_norm`.

    Args:
      x, branch, branch_bias, factor, implementation: as of `residual_norm`; there is a branch.

    Returns:
      Like x.

    Raises:
      ValueError, NotImplementedError: as `residual_norm`.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0]])
    >>> add_branch(x, x, jnp.ones(2), None).tolist()
    [[3.0, 5.0]]
    """
    if branch is None:
        raise ValueError("branch is None; add_branch needs one: use x itself instead of the call")
    _check(x, branch, branch_bias, factor)
    return _module("add_branch", x, implementation).add_branch(x, branch, branch_bias, factor)


def _check(x, branch, branch_bias, factor) -> None:
    check_array("x", x)
    for name, array in (("branch", branch), ("factor", factor)):
        if array is not None:
            check_array(name, array)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; it must be [batch, ..., features], no axis empty")
    if branch is None and (branch_bias is not None or factor is not None):
        raise ValueError("branch is None, so branch_bias and factor must be None too")
    if branch is not None and (branch.shape, branch.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"branch has shape {branch.shape} and dtype {branch.dtype}; it must be like x, "
            f"{x.shape} and {x.dtype}"
        )
    if branch_bias is not None:
        _check_vector("branch_bias", branch_bias, x)
    if factor is not None and factor.shape != x.shape[:1]:
        raise ValueError(f"factor has shape {factor.shape}; it must be {x.shape[:1]}, one a row")


def _check_vector(name: str, array, x) -> None:
    check_array(name, array)
    if array.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {array.shape}; it must be {x.shape[-1:]} to match x")


def _module(operation: str, x, implementation):
    problem = mosaic_gpu.unsupported(x) or compat.hopper_problem()
    return choose(operation, implementation, _MODULES, {"mosaic_gpu": problem})
