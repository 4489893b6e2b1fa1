"""The public fast-weight operations and the choice of their implementation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.fast_weight import mosaic_tpu, reference, xla

NAMES = ("w0", "w1", "w2")
Implementation = Literal["reference", "xla", "mosaic_tpu"]
_MODULES = {"reference": reference, "xla": xla, "mosaic_tpu": mosaic_tpu}
_logger = logging.getLogger("ttt_kernels")


def fast_weight_apply(
    weights: Mapping[str, jax.Array],
    q: jax.Array,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The fast network at each query, `f(q) = (silu(q W0) * (q W2)) W1`.

    Args:
      weights: `w0` and `w2` [batch or 1, heads, key_dim, hidden], `w1` [batch or 1, heads, hidden,
        value_dim]; rounded to q's dtype for the products.
      q: [batch, heads, time, key_dim] floats; time >= 1.
      implementation: "reference" (token by token), "xla" (any device), "mosaic_tpu" (one kernel
        for TPUs, forwards and backwards), or None, which picks the fastest that runs here and logs
        the choice once. A named implementation never falls back.

    Returns:
      [batch, heads, time, value_dim] in q's dtype; differentiable in every argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: LaCT (Zhang et al., 2025), ``lact_model/ttt_operation.py``.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 2, 2))
    >>> out = fast_weight_apply(dict(w0=ones, w1=ones, w2=ones), jnp.ones((1, 1, 3, 2)))
    >>> out.shape, round(float(out[0, 0, 0, 0]), 3)  # 2 silu(2) 2
    ((1, 1, 3, 2), 7.046)
    """
    matrices = _check_weights(weights, q, "q")
    module = _choose(implementation, matrices, q, "apply")
    return module.apply(*matrices, q)


def fast_weight_gradients(
    weights: Mapping[str, jax.Array],
    k: jax.Array,
    error: jax.Array,
    rates: jax.Array | None = None,
    trained: Literal["all", "last"] = "all",
    implementation: Implementation | None = None,
) -> dict[str, jax.Array]:
    """The fast weights' gradients summed over tokens, `G_w = sum_t rate_t,w dL_t/dw`.

    `dL_t/df = error_t` at `f(k_t)`, see `fast_weight_apply`; for the dot-product loss it is `-v`.

    Args:
      weights: as of `fast_weight_apply`.
      k: [batch, heads, time, key_dim] floats; time >= 1.
      error: [batch, heads, time, value_dim] floats; k and error of different dtypes are promoted
        to their common one.
      rates: [batch, heads, time, R] floats, one rate for each trained matrix (w0, w1, w2, or w1
        alone), or None for 1. A token of rate 0 has no influence; it must hold finite numbers.
      trained: "all" matrices, or the "last", w1, alone.
      implementation: as of `fast_weight_apply`.

    Returns:
      {"w0", "w1", "w2"} or {"w1"}, each shaped [batch, heads, in, out], float32 (float64 for
      float64 tokens); differentiable in every float argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: arXiv 2602.21204, eq. of Theorem 5.1 for one step; LaCT (Zhang et al., 2025).

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 2, 2))
    >>> x = jnp.ones((1, 1, 3, 2))
    >>> g = fast_weight_gradients(dict(w0=ones, w1=ones, w2=ones), x, -x, trained="last")
    >>> list(g), round(float(g["w1"][0, 0, 0, 0]), 3)  # -3 silu(2) 2
    (['w1'], -10.57)
    """
    if trained not in ("all", "last"):
        raise ValueError(f"trained={trained!r} must be 'all' or 'last'")
    dtype = jnp.result_type(k, error)
    if k.ndim != 4 or error.shape[:-1] != k.shape[:-1] or error.ndim != 4:
        raise ValueError(
            f"k has shape {k.shape} and error {error.shape}; they must be [batch, heads, time, "
            "key_dim] and [batch, heads, time, value_dim]"
        )
    matrices = _check_weights(weights, k.astype(dtype), "k")
    if error.shape[-1] != matrices[1].shape[-1]:
        raise ValueError(
            f"error has shape {error.shape} and weights['w1'] {weights['w1'].shape}; their last "
            "axes, value_dim, must be equal"
        )
    names = NAMES if trained == "all" else ("w1",)
    if rates is None:
        rates = jnp.ones((*k.shape[:3], len(names)), jnp.float32)
    if rates.shape != (*k.shape[:3], len(names)) or not jnp.issubdtype(rates.dtype, jnp.floating):
        raise ValueError(
            f"rates has shape {rates.shape} and dtype {rates.dtype}; it must be a float "
            f"{(*k.shape[:3], len(names))} = [batch, heads, time, R] with {trained=}"
        )
    module = _choose(implementation, matrices, k.astype(dtype), "gradients")
    made = module.gradients(*matrices, k.astype(dtype), error.astype(dtype), rates)
    return dict(zip(names, made, strict=True))


def _check_weights(weights, x: jax.Array, name: str) -> list[jax.Array]:
    """The three matrices in the tokens' dtype, one of each for each row and head."""
    if x.ndim != 4 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name} has shape {x.shape} and dtype {x.dtype}; it must be floats [batch, heads, "
            "time, key_dim], no axis empty"
        )
    missing = [n for n in NAMES if n not in weights]
    if missing:
        raise ValueError(f"weights has no {missing}; it must hold {list(NAMES)}")
    batch, heads, _, key_dim = x.shape
    hidden, value_dim = weights["w0"].shape[-1], weights["w1"].shape[-1]
    made = []
    for n, sizes in zip(NAMES, ((key_dim, hidden), (hidden, value_dim), (key_dim, hidden)),
                        strict=True):  # fmt: skip
        w = weights[n]
        if w.shape not in ((1, heads, *sizes), (batch, heads, *sizes)):
            raise ValueError(
                f"weights[{n!r}] has shape {w.shape}; it must be {(batch, heads, *sizes)} = "
                f"[batch or 1, heads, in, out] to match {name} and the other weights"
            )
        made.append(jnp.broadcast_to(w.astype(x.dtype), (batch, heads, *sizes)))
    return made


def _choose(implementation, matrices, x: jax.Array, operation: str):
    """The module that runs the call; logs what was chosen for the caller."""
    if implementation is not None and implementation not in _MODULES:
        raise ValueError(
            f"implementation={implementation!r} must be one of {sorted(_MODULES)} or None"
        )
    problem = mosaic_tpu.unsupported(*matrices[:2], x) or compat.tpu_problem()
    if implementation == "mosaic_tpu" and problem:
        raise NotImplementedError(
            f"implementation='mosaic_tpu' cannot run here: {problem}; implementation='xla' can"
        )
    if implementation is None:
        implementation = "xla" if problem else "mosaic_tpu"
        _log_choice(operation, implementation, problem or "the arguments and the device suit it")
    return _MODULES[implementation]


@functools.cache
def _log_choice(operation: str, implementation: str, reason: str) -> None:
    _logger.info("fast_weight_%s runs by implementation=%r: %s", operation, implementation, reason)
