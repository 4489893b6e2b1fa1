"""The public fast-weight operations and the choice of their implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.arguments import check_array
from ttt_kernels.choice import choose
from ttt_kernels.fast_weight import mosaic_gpu, mosaic_tpu, reference, xla

NAMES = ("w0", "w1", "w2")
Implementation = Literal["reference", "xla", "mosaic_gpu", "mosaic_tpu"]
_HIDDEN = {"mosaic_gpu": mosaic_gpu, "xla": xla, "reference": reference}
_MODULES = {"mosaic_tpu": mosaic_tpu} | _HIDDEN


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
      implementation: "reference" (token by token), "xla" (any device), "mosaic_gpu" (kernels for
        Hopper GPUs, bfloat16: of all of it to a hidden width of 384, else between the products,
        which are XLA's), "mosaic_tpu" (one kernel for TPUs, forwards and backwards), or None, which
        picks the fastest that runs here and logs the choice once. A named implementation never
        falls back.

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
    module = _choose("fast_weight_apply", implementation, matrices, q)
    if module not in (xla, mosaic_gpu):
        matrices = _for_each_row(matrices, q.shape[0])
    return module.apply(*matrices, q)


def fast_weight_hidden(
    weights: Mapping[str, jax.Array],
    x: jax.Array,
    rates: jax.Array | None = None,
    implementation: Literal["reference", "xla", "mosaic_gpu"] | None = None,
) -> jax.Array:
    """The fast network's hidden activations, `rate_t (silu(x_t W0) * (x_t W2))`, token-major.

    With `rates` they are the left factor of the last layer's gradient, `sum_t h_t^T dL_t/df`.

    Args:
      weights: `w0` and `w2` [batch or 1, heads, key_dim, hidden]; rounded to x's dtype.
      x: [batch, time, heads, key_dim] floats; time >= 1.
      rates: [batch, time, heads] floats, or None for 1.
      implementation: "reference" (token by token), "xla" (any device), "mosaic_gpu" (one kernel
        for Hopper GPUs, bfloat16), or None, which picks the fastest that runs here and logs the
        choice once. A named implementation never falls back.

    Returns:
      [batch, time, heads, hidden] in x's dtype; differentiable in every argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: LaCT (Zhang et al., 2025), ``lact_model/ttt_operation.py``.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 2, 2))
    >>> hidden = fast_weight_hidden(dict(w0=ones, w2=ones), jnp.ones((1, 3, 1, 2)))
    >>> hidden.shape, round(float(hidden[0, 0, 0, 0]), 3)  # silu(2) 2
    ((1, 3, 1, 2), 3.523)
    """
    _check_tokens(x, "x", "[batch, time, heads, key_dim]")
    batch, _, heads, key_dim = x.shape
    _check_matrices(weights, ("w0", "w2"))
    sizes = key_dim, weights["w0"].shape[-1]
    w0, w2 = (_check_weight(weights, n, batch, heads, sizes).astype(x.dtype) for n in ("w0", "w2"))
    if rates is not None:
        _check_rates(rates, x.shape[:3], "[batch, time, heads]")
    problem = mosaic_gpu.not_whole(w0, x) or compat.hopper_problem()
    module = choose("fast_weight_hidden", implementation, _HIDDEN, {"mosaic_gpu": problem})
    return module.hidden(w0, w2, x, rates)


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
    check_array("k", k)
    check_array("error", error)
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
    shape = (*k.shape[:3], len(names))
    if rates is None:
        rates = jnp.ones(shape, jnp.float32)
    _check_rates(rates, shape, f"[batch, heads, time, R] with {trained=}")
    module = _choose("fast_weight_gradients", implementation, matrices, k.astype(dtype))
    if module not in (xla, mosaic_gpu):
        matrices = _for_each_row(matrices, k.shape[0])
    made = module.gradients(*matrices, k.astype(dtype), error.astype(dtype), rates)
    return dict(zip(names, made, strict=True))


def _check_tokens(x: jax.Array, name: str, axes: str) -> None:
    check_array(name, x)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"{name} has shape {x.shape}; it must be {axes}, no axis empty")


def _check_rates(rates: jax.Array, shape: tuple[int, ...], axes: str) -> None:
    check_array("rates", rates)
    if rates.shape != shape:
        raise ValueError(f"rates has shape {rates.shape}; it must be {shape} = {axes}")


def _check_matrices(weights, names) -> None:
    """The named weights must be there and be matrices of floats; their sizes are read next."""
    missing = [n for n in names if not isinstance(weights, Mapping) or n not in weights]
    if missing:
        raise ValueError(f"weights has no {missing}; it must map {list(names)} to arrays")
    for name in names:
        check_array(f"weights[{name!r}]", weights[name])
        if weights[name].ndim != 4:
            raise ValueError(
                f"weights[{name!r}] has shape {weights[name].shape}; it must be [batch or 1, "
                "heads, in, out]"
            )


def _check_weight(weights, name: str, batch: int, heads: int, sizes) -> jax.Array:
    w = weights[name]
    if w.shape not in ((1, heads, *sizes), (batch, heads, *sizes)):
        raise ValueError(
            f"weights[{name!r}] has shape {w.shape}; it must be {(batch, heads, *sizes)} = "
            "[batch or 1, heads, in, out] to match the tokens and the other weights"
        )
    return w


def _check_weights(weights, x: jax.Array, name: str) -> list[jax.Array]:
    """The three matrices in the tokens' dtype, one of each for each head and row, or all rows."""
    _check_tokens(x, name, "[batch, heads, time, key_dim]")
    _check_matrices(weights, NAMES)
    batch, heads, _, key_dim = x.shape
    hidden, value_dim = weights["w0"].shape[-1], weights["w1"].shape[-1]
    shapes = ((key_dim, hidden), (hidden, value_dim), (key_dim, hidden))
    found = (_check_weight(weights, n, batch, heads, s) for n, s in zip(NAMES, shapes, strict=True))
    return [w.astype(x.dtype) for w in found]


def _for_each_row(matrices, batch: int) -> list[jax.Array]:
    """The matrices with one of each for every row, as kernels of all of it want them."""
    return [jnp.broadcast_to(w, (batch, *w.shape[1:])) for w in matrices]


def _choose(operation: str, implementation: str | None, matrices, x: jax.Array):
    """The module that runs a call with the three matrices."""
    w0, w1, _ = matrices
    gpu = mosaic_gpu.unsupported(w0, x, w1.shape[-1]) or compat.hopper_problem()
    if implementation is None:
        gpu = gpu or mosaic_gpu.untimed(w0, x, w1.shape[-1])
    problems = {
        "mosaic_tpu": mosaic_tpu.unsupported(w0, w1, x) or compat.tpu_problem(),
        "mosaic_gpu": gpu,
    }
    return choose(operation, implementation, _MODULES, problems)
