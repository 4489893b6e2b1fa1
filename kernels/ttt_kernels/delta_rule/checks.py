"""Rules for the arguments of the delta rule, checked before anything is computed."""

from __future__ import annotations

import jax

from ttt_kernels.arguments import check_array
from ttt_kernels.linear_attention import shapes

SUB_CHUNK = 16
"""Tokens a sub-chunk: chunks longer than this are cut into sub-chunks of exactly this length."""


def check_chunk_size(chunk_size: int | None) -> None:
    """Checks the chunk length of the chunked implementation.

    Raises:
      ValueError: neither None, nor an int from 1 to 16, nor a multiple of 16.

    >>> check_chunk_size(24)
    Traceback (most recent call last):
    ValueError: chunk_size=24 must be None, 1 to 16, or a multiple of 16; try 32
    """
    if chunk_size is None:
        return
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} must be None or an int >= 1")
    if chunk_size > SUB_CHUNK and chunk_size % SUB_CHUNK:
        nearest = -(-chunk_size // SUB_CHUNK) * SUB_CHUNK
        raise ValueError(
            f"chunk_size={chunk_size} must be None, 1 to {SUB_CHUNK}, or a multiple of "
            f"{SUB_CHUNK}; try {nearest}"
        )


def check_erase(
    beta: jax.Array | None, erase_read: jax.Array | None, erase_write: jax.Array | None
) -> None:
    """Checks that the arguments name one erase rule.

    Raises:
      ValueError: `beta` beside an erase pair, or half an erase pair.
    """
    if (erase_read is None) != (erase_write is None):
        missing = "erase_read" if erase_read is None else "erase_write"
        raise ValueError(f"{missing}=None: pass both erase_read and erase_write, or neither")
    if beta is not None and erase_read is not None:
        raise ValueError(
            "beta and erase_read, erase_write are two erase rules; pass one of them. With an "
            "erase pair, multiply k or v by the rate yourself"
        )


def _check_layout(name: str, value: jax.Array, layouts: dict[str, tuple[int, ...]]) -> None:
    check_array(name, value)
    if value.shape not in layouts.values():
        rule = " or ".join(f"{shape} = {layout}" for layout, shape in layouts.items())
        raise ValueError(f"{name} has shape {value.shape}; it must be {rule} to match q, k, v")


def check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array | None,
    log_decay: jax.Array | None,
    erase_read: jax.Array | None,
    erase_write: jax.Array | None,
    initial_state: jax.Array | None,
    reset_state: jax.Array | None,
    segment_ids: jax.Array | None,
) -> None:
    """Checks every array argument of `delta_rule` against q.

    Raises:
      ValueError: an array of the wrong rank, shape or kind of dtype, or an empty axis.
    """
    shapes.check_arrays(q, k, v, None, initial_state, segment_ids)
    scalar = {"[batch, time, heads]": q.shape[:3]}
    vector = {"[batch, time, heads, key_dim]": q.shape}
    state = (q.shape[2], q.shape[3], v.shape[3])
    states = {
        "[heads, key_dim, value_dim]": state,
        "[batch, heads, key_dim, value_dim]": (q.shape[0], *state),
    }
    for name, value, layouts in (
        ("beta", beta, scalar),
        ("log_decay", log_decay, scalar | vector),
        ("erase_read", erase_read, vector),
        ("erase_write", erase_write, vector),
        ("reset_state", reset_state, states),
    ):
        if value is not None:
            _check_layout(name, value, layouts)
