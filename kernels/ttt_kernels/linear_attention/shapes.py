"""Shape and dtype rules of linear attention, checked before anything is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels.arguments import check_array, check_flag


def accumulator_dtype(dtype) -> jnp.dtype:
    """float64 for float64, float32 for every narrower float."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _check_shape(name: str, value: jax.Array, expected: tuple[int, ...], layout: str) -> None:
    if value.shape != expected:
        raise ValueError(
            f"{name} has shape {value.shape}; it must be {expected} = {layout} to match q, k, v"
        )


def check_causal(causal: str, chunk_size: int | None, include_current_chunk: bool) -> None:
    """Checks the three arguments that choose the causal order.

    Raises:
      ValueError: `causal` unknown, `chunk_size` missing, below 1 or given for "token",
        `include_current_chunk` not a bool.
    """
    check_flag("include_current_chunk", include_current_chunk)
    if causal not in ("token", "chunk"):
        raise ValueError(f"causal={causal!r} must be 'token' or 'chunk'")
    if causal == "token":
        if chunk_size is not None or include_current_chunk:
            raise ValueError(
                f"chunk_size={chunk_size} and include_current_chunk={include_current_chunk} "
                "apply to causal='chunk' only; leave them out or set causal='chunk'"
            )
    elif not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be an int >= 1 with causal='chunk'")


def check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    """Checks every array argument of `linear_attention` against q.

    Raises:
      ValueError: an array of the wrong rank, shape or kind of dtype, or an empty axis.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_array(name, value)
        if value.ndim != 4:
            raise ValueError(
                f"{name} has shape {value.shape}; it must be [batch, time, heads, dim]"
            )
        if 0 in value.shape:
            raise ValueError(f"{name} has shape {value.shape}; every axis must be at least 1")
    batch, length, heads, key_dim = q.shape
    _check_shape("k", k, q.shape, "[batch, time, heads, key_dim]")
    _check_shape("v", v, (batch, length, heads, v.shape[-1]), "[batch, time, heads, value_dim]")
    if log_decay is not None:
        check_array("log_decay", log_decay)
        _check_shape("log_decay", log_decay, (batch, length, heads), "[batch, time, heads]")
    if initial_state is not None:
        check_array("initial_state", initial_state)
        expected = (batch, heads, key_dim, v.shape[-1])
        _check_shape(
            "initial_state", initial_state, expected, "[batch, heads, key_dim, value_dim]"
        )
    if segment_ids is not None:
        check_array("segment_ids", segment_ids, floating=False)
        _check_shape("segment_ids", segment_ids, (batch, length), "[batch, time]")
