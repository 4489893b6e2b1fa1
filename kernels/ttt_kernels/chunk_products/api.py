"""The two public chunk products and the choice of their implementation.

They are closed under differentiation, so each one's gradients are calls of the two:

    G = chunk_summaries(k, v)    dk = chunk_outputs(v, dG^T)   dv = chunk_outputs(k, dG)
    o = chunk_outputs(q, S)      dq = chunk_outputs(do, S^T)   dS = chunk_summaries(q, do)
"""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.chunk_products import mosaic_gpu, reference, vjp, xla

Implementation = Literal["reference", "xla", "mosaic_gpu"]
_BACKENDS = {"xla": xla, "mosaic_gpu": mosaic_gpu.Kernels()}
_logger = logging.getLogger("ttt_kernels")


def chunk_summaries(
    k: jax.Array,
    v: jax.Array,
    chunk_size: int,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """What each chunk of tokens adds to a linear state, `G_c = sum_{t in c} k_t^T v_t`.

    Args:
      k: [batch, time, heads, key_dim] floats; time >= 1.
      v: [batch, time, heads, value_dim] floats. k and v of different dtypes are promoted to their
        common one.
      chunk_size: tokens a chunk, >= 1; the last chunk may be shorter.
      dtype: of the result, floating; None is float32 (float64 for float64 inputs). Sums are made
        in float32 or wider whatever it is.
      implementation: "reference" (token by token), "xla" (batched products, any device),
        "mosaic_gpu" (kernels for Hopper GPUs: bfloat16, widths up to 768), or None, which picks
        the fastest that runs here and logs the choice once. A named implementation never falls
        back.

    Returns:
      [batch, heads, chunks, key_dim, value_dim] in `dtype`; differentiable in k and v.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: arXiv 2602.21204 (Test-time training with KV binding is secretly linear attention),
    section 5: the sums over a mini-batch of Theorem 5.2.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 5, 1, 2))
    >>> chunk_summaries(x, x, 3)[0, 0, :, 0, 0].tolist()
    [3.0, 2.0]
    """
    _check_tokens("k", k)
    _check_tokens("v", v)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape} and k {k.shape}; batch, time and heads must be equal"
        )
    _check_chunk_size(chunk_size)
    common = jnp.result_type(k, v)
    dtype = jnp.promote_types(common, jnp.float32) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={dtype} must be a float or None")
    k, v = k.astype(common), v.astype(common)
    implementation = _choose(implementation, "chunk_summaries", k, chunk_size, v.shape[-1])
    with jax.named_scope(f"chunk_summaries_{implementation}"):
        if implementation == "reference":
            return reference.summaries(k, v, chunk_size, dtype)
        return vjp.summaries(k, v, chunk_size, dtype, _BACKENDS[implementation])


def chunk_outputs(
    q: jax.Array,
    states: jax.Array,
    chunk_size: int,
    *,
    transposed: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Each token times the state of its own chunk, `o_t = q_t S_c` for t in chunk c.

    Args:
      q: [batch, time, heads, key_dim] floats; time >= 1.
      states: [batch, heads, chunks, key_dim, value_dim] floats, rounded to q's dtype for the
        product; chunks = ceil(time / chunk_size).
      chunk_size: tokens a chunk, >= 1; the last chunk may be shorter.
      transposed: multiplies by the transposed states, `o_t = q_t S_c^T`, without a pass over
        memory that transposes them; states are then [batch, heads, chunks, value_dim, key_dim].
      implementation: as of `chunk_summaries`.

    Returns:
      [batch, time, heads, value_dim] in q's dtype; differentiable in q and states.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: arXiv 2602.21204, Theorem 5.2, `o_t = q_t S` with the state of a mini-batch.

    >>> import jax.numpy as jnp
    >>> states = jnp.arange(4.0).reshape(1, 1, 2, 2, 1)
    >>> chunk_outputs(jnp.ones((1, 5, 1, 2)), states, 3)[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0, 5.0, 5.0]
    """
    _check_tokens("q", q)
    _check_chunk_size(chunk_size)
    batch, length, heads, key_dim = q.shape
    expected = (batch, heads, -(-length // chunk_size))
    axes = "value_dim, key_dim" if transposed else "key_dim, value_dim"
    found = states.shape[-1 if transposed else -2] if states.ndim == 5 else None
    if states.shape[:3] != expected or found != key_dim or 0 in states.shape:
        raise ValueError(
            f"states has shape {states.shape}; it must be {expected} + ({axes}) = [batch, heads, "
            f"chunks, {axes}] to match q, {q.shape}, with {chunk_size=}"
        )
    if not jnp.issubdtype(states.dtype, jnp.floating):
        raise ValueError(f"states has dtype {states.dtype}; it must be a float, cast it first")
    value_dim = states.shape[-2 if transposed else -1]
    implementation = _choose(implementation, "chunk_outputs", q, chunk_size, value_dim)
    with jax.named_scope(f"chunk_outputs_{implementation}"):
        if implementation == "reference":
            return reference.outputs(q, states, chunk_size, transposed)
        return vjp.outputs(q, states, chunk_size, transposed, _BACKENDS[implementation])


def _check_tokens(name: str, x: jax.Array) -> None:
    if x.ndim != 4 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name} has shape {x.shape} and dtype {x.dtype}; it must be floats [batch, time, "
            "heads, dim], no axis empty"
        )


def _check_chunk_size(chunk_size: int) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be an int >= 1")


def _choose(
    implementation: str | None, operation: str, x: jax.Array, chunk_size: int, value_dim: int
) -> str:
    """The name of the implementation that runs a call with these tokens."""
    length, key_dim = x.shape[1], x.shape[3]
    problem = mosaic_gpu.unsupported(x.dtype, key_dim, value_dim) or compat.hopper_problem()
    if implementation is None:
        reason = problem or mosaic_gpu.untimed(length, chunk_size, key_dim, value_dim)
        implementation = "xla" if reason else "mosaic_gpu"
        _log_choice(operation, implementation, reason or "the arguments and the device suit it")
    names = ("reference", *_BACKENDS)
    if implementation not in names:
        raise ValueError(f"implementation={implementation!r} must be one of {names} or None")
    if implementation == "mosaic_gpu" and problem:
        raise NotImplementedError(
            f"{operation} cannot run by implementation='mosaic_gpu' here: {problem}; "
            "implementation='xla' can"
        )
    return implementation


@functools.cache
def _log_choice(operation: str, implementation: str, reason: str) -> None:
    _logger.info("%s runs by implementation=%r: %s", operation, implementation, reason)
