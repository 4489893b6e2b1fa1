"""The public chunk products and the choice of their implementation.

They are closed under differentiation, so each one's gradients are calls of them:

    G = chunk_summaries(k, v)    dk = chunk_outputs(v, dG^T)   dv = chunk_outputs(k, dG)
    o = chunk_outputs(q, S)      dq = chunk_outputs(do, S^T)   dS = chunk_summaries(q, do)
    S = chunk_states(G)          dG = chunk_states(dS), from the last chunk to the first
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_flag, floating_dtype
from ttt_kernels.choice import choose
from ttt_kernels.chunk_products import mosaic_gpu, reference, vjp, xla

Implementation = Literal["reference", "xla", "mosaic_gpu"]
_BACKENDS = {"mosaic_gpu": mosaic_gpu.Kernels(), "xla": xla, "reference": reference}


def chunk_summaries(
    k: jax.Array,
    v: jax.Array,
    chunk_size: int,
    *,
    rates: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """What each chunk of tokens adds to a linear state, `G_c = sum_{t in c} rate_t k_t^T v_t`.

    Args:
      k: [batch, time, heads, key_dim] floats; time >= 1.
      v: [batch, time, heads, value_dim] floats. k and v of different dtypes are promoted to their
        common one.
      chunk_size: tokens a chunk, >= 1; the last chunk may be shorter.
      rates: [batch, time, heads] floats, how much each token counts, or None for 1. On a Hopper GPU
        they cost no pass over memory; keys times rates are rounded to the keys' dtype.
      dtype: of the result, floating; None is float32 (float64 for float64 inputs). Sums are made
        in float32 or wider whatever it is.
      implementation: "reference" (token by token), "xla" (batched products, any device),
        "mosaic_gpu" (kernels for Hopper GPUs: bfloat16, widths up to 768), or None, which picks
        the fastest that runs here and logs the choice once. A named implementation never falls
        back.

    Returns:
      [batch, heads, chunks, key_dim, value_dim] in `dtype`; differentiable in k, v and rates.

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
    if rates is not None:
        check_array("rates", rates)
        if rates.shape != k.shape[:3]:
            raise ValueError(
                f"rates has shape {rates.shape}; it must be [batch, time, heads] = {k.shape[:3]}"
            )
        rates = rates.astype(jnp.promote_types(rates.dtype, jnp.float32))
    common = jnp.result_type(k, v)
    wide = jnp.promote_types(common, jnp.float32)
    dtype = wide if dtype is None else floating_dtype("dtype", dtype)
    k, v = k.astype(common), v.astype(common)
    backend = _backend_of_tokens("chunk_summaries", implementation, k, chunk_size, v.shape[-1])
    with jax.named_scope("chunk_summaries"):
        if backend is reference:
            return reference.summaries(k, v, chunk_size, dtype, rates)
        return vjp.summaries(k, v, chunk_size, dtype, backend, rates)


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
    check_array("states", states)
    _check_chunk_size(chunk_size)
    check_flag("transposed", transposed)
    batch, length, heads, key_dim = q.shape
    expected = (batch, heads, -(-length // chunk_size))
    axes = "value_dim, key_dim" if transposed else "key_dim, value_dim"
    found = states.shape[-1 if transposed else -2] if states.ndim == 5 else None
    if states.shape[:3] != expected or found != key_dim or 0 in states.shape:
        raise ValueError(
            f"states has shape {states.shape}; it must be {expected} + ({axes}) = [batch, heads, "
            f"chunks, {axes}] to match q, {q.shape}, with {chunk_size=}"
        )
    value_dim = states.shape[-2 if transposed else -1]
    backend = _backend_of_tokens("chunk_outputs", implementation, q, chunk_size, value_dim)
    with jax.named_scope("chunk_outputs"):
        if backend is reference:
            return reference.outputs(q, states, chunk_size, transposed)
        return vjp.outputs(q, states, chunk_size, transposed, backend)


def chunk_states(
    summaries: jax.Array,
    initial: jax.Array,
    *,
    decay: jax.Array | None = None,
    include_own: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The state at every chunk's edge from what each chunk adds, `S_c = decay_c S_{c-1} + G_c`.

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim] floats, G; added in the dtype of
        `initial`; chunks >= 1.
      initial: [batch, heads, key_dim, value_dim] float32 or wider, S ahead of the first chunk.
      decay: [batch, heads, chunks] floats, or None for 1.
      include_own: gives the state behind each chunk, not the one ahead of it.
      dtype: of the states, floating; None is that of `initial`.
      implementation: as of `chunk_summaries`.

    Returns:
      (states, shaped as summaries, in `dtype`; the last one, like `initial`); differentiable in
      every argument.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value.
      NotImplementedError: the named implementation cannot run these arguments here.

    Source: arXiv 2602.21204, Theorem 5.3: momentum and forgetting between mini-batches.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 1, 3, 1, 1))
    >>> states, final = chunk_states(ones, jnp.zeros((1, 1, 1, 1)), decay=0.5 * ones[..., 0, 0])
    >>> states.ravel().tolist(), final.item()
    ([0.0, 1.0, 1.5], 1.75)
    """
    check_array("summaries", summaries)
    check_array("initial", initial)
    if summaries.ndim != 5 or 0 in summaries.shape:
        raise ValueError(
            f"summaries has shape {summaries.shape}; it must be [batch, heads, chunks, key_dim, "
            "value_dim], no axis empty"
        )
    if initial.shape != summaries.shape[:2] + summaries.shape[3:]:
        raise ValueError(
            f"initial has shape {initial.shape}; it must be [batch, heads, key_dim, value_dim] = "
            f"{summaries.shape[:2] + summaries.shape[3:]} to match summaries"
        )
    if initial.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"initial has dtype {initial.dtype}; it must be float32 or wider, cast it")
    check_flag("include_own", include_own)
    if decay is not None:
        check_array("decay", decay)
        if decay.shape != summaries.shape[:3]:
            raise ValueError(
                f"decay has shape {decay.shape}; it must be [batch, heads, chunks] = "
                f"{summaries.shape[:3]}"
            )
        decay = decay.astype(initial.dtype)
    dtype = initial.dtype if dtype is None else floating_dtype("dtype", dtype)
    problem = mosaic_gpu.states_problem(summaries, initial)
    backend = _backend("chunk_states", implementation, problem)
    with jax.named_scope("chunk_states"):
        arguments = (summaries, decay, initial, include_own, False, dtype)
        if backend is reference:
            return reference.states(*arguments)
        return vjp.states(*arguments, backend)


def _check_tokens(name: str, x: jax.Array) -> None:
    check_array(name, x)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name} has shape {x.shape}; it must be [batch, time, heads, dim], no axis empty"
        )


def _check_chunk_size(chunk_size: int) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be an int >= 1")


def _backend_of_tokens(operation: str, implementation, x: jax.Array, chunk_size: int, value_dim):
    """The backend that runs a call with these tokens."""
    length, key_dim = x.shape[1], x.shape[3]
    problem = mosaic_gpu.unsupported(x.dtype, key_dim, value_dim)
    if implementation is None:
        problem = problem or mosaic_gpu.untimed(length, chunk_size, key_dim, value_dim)
    return _backend(operation, implementation, problem)


def _backend(operation: str, implementation: str | None, problem: str | None):
    """The backend that runs a call; `problem` is one of the kernels with its arguments."""
    problems = {"mosaic_gpu": problem or compat.hopper_problem()}
    return choose(operation, implementation, _BACKENDS, problems)
