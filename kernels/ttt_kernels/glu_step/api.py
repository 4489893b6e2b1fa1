"""The public operation `glu_step` and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_flag, check_number
from ttt_kernels.choice import choose
from ttt_kernels.glu_step import mosaic_gpu, xla

NAMES = ("w1", "w2")
Implementation = Literal["xla", "mosaic_gpu"]
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def glu_step(
    weights: Mapping[str, jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    clip: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    """One step of a gated network on all tokens of a row, then read at all queries.

    With f(x) = (x W1) * silu(x W2) and the loss L = -scale mean_i <f(k_i), v_i>::

        G = dL/dW;  W' = W - G / (|G| + 1), the norm over the input axis (or W - G);  o = f'(q)

    Args:
      weights: `w1` and `w2`, [heads, dim, dim] floats, the initial weights of every row.
      q: [batch, tokens, heads, dim] floats; tokens >= 1.
      k: like q.
      v: like q.
      scale: of the loss, no unit.
      clip: whether the gradient is divided by its norm plus one.
      implementation: "xla" (any device), "mosaic_gpu" (one kernel each way for Hopper GPUs), or
        None, which picks the fastest that runs here and logs the choice once. A named
        implementation never falls back.

    Returns:
      Like q; differentiable in every array.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: ViTTT (Han et al. 2025, arXiv 2512.01643), section 4.

    >>> w = jnp.ones((1, 2, 2))
    >>> x = jnp.ones((1, 3, 1, 2))
    >>> out = glu_step({"w1": w, "w2": w}, x, x, 0 * x, scale=1.0)
    >>> out.shape, round(float(out[0, 0, 0, 0]), 3)  # 2 silu(2)
    ((1, 3, 1, 2), 3.523)
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_array(name, array)
    if q.ndim != 4 or 0 in q.shape or not q.shape == k.shape == v.shape:
        raise ValueError(
            f"q, k and v have the shapes {q.shape}, {k.shape} and {v.shape}; they must be equal, "
            "[batch, tokens, heads, dim], and no axis empty"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be one "
            "floating dtype"
        )
    _check_weights(weights, q.shape[2], q.shape[3])
    _check_settings(scale, clip)
    module = choose("glu_step", implementation, _MODULES, {"mosaic_gpu": kernel_problem(q)})
    return module.glu_step(*_wide(weights, q), q, k, v, scale / q.shape[1], clip)


def glu_step_beside(
    weights: Mapping[str, jax.Array],
    qkv: jax.Array,
    bias: jax.Array,
    beside: Callable[..., jax.Array],
    arrays: Any,
    *,
    scale: float,
    clip: bool = True,
    implementation: Implementation | None = None,
) -> jax.Array:
    """`glu_step` of the first heads beside another function of the others, (q, k, v) = qkv + bias.

    The kernels read and write their heads where they lie, and add the bias as they read: no array
    is cut, put together or gone over for it.

    Args:
      weights: `w1` and `w2`, [heads, dim, dim] floats.
      qkv: [batch, tokens, 3, heads + others, dim] floats.
      bias: [3, heads + others, dim] floats, rounded to the dtype of `qkv`.
      beside: `beside(arrays, q, k, v)` of the others, [batch, tokens, others, dim] each, returns
        such an array.
      arrays: pytree of what else it depends on.
      scale, clip, implementation: as of `glu_step`.

    Returns:
      [batch, tokens, heads + others, dim]; differentiable in every array.

    Raises:
      ValueError, NotImplementedError: as `glu_step`.

    >>> w, x, v = jnp.ones((1, 2, 2)), jnp.ones((1, 3, 3, 2, 2)), jnp.array([0.0, 0.0, -1.0])
    >>> out = glu_step_beside({"w1": w, "w2": w}, x, jnp.broadcast_to(v[:, None, None], (3, 2, 2)),
    ...                       lambda a, q, k, v: a * q, 5.0, scale=1.0)
    >>> [round(float(value), 3) for value in out[0, 0, :, 0]]
    [3.523, 5.0]
    """
    for name, array in (("qkv", qkv), ("bias", bias)):
        check_array(name, array)
    if qkv.ndim != 5 or 0 in qkv.shape or qkv.shape[2:] != bias.shape or qkv.shape[2] != 3:
        raise ValueError(
            f"qkv and bias have the shapes {qkv.shape} and {bias.shape}; they must be [batch, "
            "tokens, 3, heads, dim] and [3, heads, dim], and no axis empty"
        )
    _check_weights(weights, qkv.shape[3], qkv.shape[4], others=True)
    _check_settings(scale, clip)
    if not callable(beside):
        raise ValueError(f"beside={beside!r} must be a function (arrays, q, k, v)")
    q = jax.ShapeDtypeStruct((*qkv.shape[:2], *qkv.shape[3:]), qkv.dtype)
    module = choose("glu_step_beside", implementation, _MODULES, {"mosaic_gpu": kernel_problem(q)})
    options = scale / qkv.shape[1], clip
    return module.glu_step_beside(*_wide(weights, qkv), qkv, bias, beside, arrays, *options)


def _wide(weights, x) -> list[jax.Array]:
    """The weights in at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return [weights[name].astype(wide) for name in NAMES]


def _check_settings(scale, clip) -> None:
    check_number("scale", scale)
    check_flag("clip", clip)


def _check_weights(weights, heads: int, dim: int, others: bool = False) -> None:
    """Raises ValueError unless shapes suit; with `others`, the weights may have fewer heads."""
    if not isinstance(weights, Mapping) or set(weights) != set(NAMES):
        names = sorted(weights) if isinstance(weights, Mapping) else type(weights).__name__
        raise ValueError(f"weights={names} must be a mapping with the keys {NAMES} and no others")
    for name in NAMES:
        check_array(f"weights[{name!r}]", weights[name])
        shape = weights[name].shape
        if others and name == NAMES[0] and len(shape) == 3 and 0 < shape[0] < heads:
            heads = shape[0]
        if shape != (heads, dim, dim):
            raise ValueError(
                f"weights[{name!r}] has shape {shape}; it must be {(heads, dim, dim)} = [heads, "
                "dim, dim] to match the tokens"
            )


def kernel_problem(q: jax.Array) -> str | None:
    """Why `implementation=None` takes XLA for these queries here, or None where a kernel runs.

    >>> kernel_problem(jnp.ones((1, 4, 2, 64)))
    'the inputs are float32; the Mosaic GPU kernel takes bfloat16'
    """
    return mosaic_gpu.unsupported(q) or compat.hopper_problem()
