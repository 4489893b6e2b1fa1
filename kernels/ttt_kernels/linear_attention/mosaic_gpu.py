"""Token-causal linear attention on Hopper GPUs through Pallas' Mosaic GPU backend.

The sequence is cut into segments so that one long sequence fills the chip: one kernel sums each
segment's state, a small product makes every segment's starting state, one kernel makes the
outputs. bf16 products, float32 accumulators and states. The rules of what it runs are in
`unsupported`, the backward pass in `mosaic_gpu_vjp`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.linear_attention import mosaic_gpu_vjp, segments, tiling
from ttt_kernels.linear_attention.mosaic_gpu_decay import WIPE


def unsupported(q: jax.Array, v: jax.Array, causal: str) -> str | None:
    """Why this kernel cannot run these arguments on any device, or None."""
    if causal != "token":
        return f"causal={causal!r}: the Mosaic GPU kernel is causal by token"
    if q.dtype != jnp.bfloat16:
        return f"the inputs are {q.dtype}; the Mosaic GPU kernel takes bfloat16"
    for name, dim in (("key_dim", q.shape[-1]), ("value_dim", v.shape[-1])):
        if dim > tiling.MAX_HEAD_DIM:
            return f"{name}={dim} is above the Mosaic GPU kernel's limit {tiling.MAX_HEAD_DIM}"
    return None


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    causal: str = "token",
    chunk_size: int | None = None,
    include_current_chunk: bool = False,
    interpret: bool = False,
    segments_per_row: int | None = None,
    stages: int | None = None,
    portable: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention by the Mosaic GPU kernels; see `ttt_kernels.linear_attention`.

    Under a mesh, wrap the call in `jax.shard_map(..., check_vma=False)` over batch and heads: no
    collective is added, and plain `jit` would gather the inputs. Pallas' loops do not carry the
    mesh axes that `check_vma=True` wants to see.

    Args:
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).
      segments_per_row, stages, portable: override the tiling's choice; None chooses.

    Raises:
      NotImplementedError: an argument beyond the kernel's limits, see `unsupported`.
    """
    del chunk_size, include_current_chunk  # causal by token only
    reason = unsupported(q, v, causal)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    length, heads, key_dim, value_dim = *q.shape[1:], v.shape[-1]
    real = None
    if segment_ids is not None:
        log_decay, real = _documents_as_decay(q, log_decay, segment_ids)
    q, k, v, log_decay, initial_state = _pad(q, k, v, log_decay, initial_state)
    if real is not None:
        real = jnp.pad(real, ((0, 0), (0, -length % tiling.BLOCK)), constant_values=True)
    if portable is None:
        portable = interpret
    plan = tiling.choose(
        q.shape[0], q.shape[1], q.shape[2], q.shape[3], v.shape[3], decay=log_decay is not None,
        portable=portable, segments=segments_per_row, stages=stages,
    )
    params = compat.gpu_interpret_params() if interpret else None
    out, final = mosaic_gpu_vjp.core(q, k, v, log_decay, initial_state, real, plan, params)
    return out[:, :length, :heads, :value_dim], final[:, :heads, :key_dim, :value_dim]


def _documents_as_decay(q, log_decay, segment_ids) -> tuple[jax.Array, jax.Array]:
    """Log decays in which each later document's first token wipes the state; and what is real."""
    real = segments.is_real(segment_ids)
    first = jnp.argmax(real, axis=1, keepdims=True)
    wipe = segments.document_starts(segment_ids) & (jnp.arange(real.shape[1]) > first)
    if log_decay is None:
        log_decay = jnp.zeros(q.shape[:3], jnp.float32)
    log_decay = jnp.where(real[:, :, None], log_decay, 0)
    return jnp.where(wipe[:, :, None], WIPE, log_decay), real


def _pad(q, k, v, log_decay, state):
    """Pads widths to multiples of 64, paired heads to an even number, time to a multiple of 8.

    The time of log decays to a multiple of 64.
    """
    length, heads = q.shape[1:3]
    key_dim, value_dim = (tiling.padded_dim(x.shape[-1]) for x in (q, v))
    extra_heads = heads % 2 if key_dim == value_dim == 64 else 0
    time = -length % 8

    def grow(x, *widths):
        return jnp.pad(x, [(0, w) for w in widths]) if any(widths) else x

    q, k = (grow(x, 0, time, extra_heads, key_dim - x.shape[-1]) for x in (q, k))
    if log_decay is not None:
        log_decay = grow(log_decay.astype(jnp.float32), 0, -length % tiling.BLOCK, extra_heads)
    if state is not None:
        state = state.astype(jnp.float32)
        widths = (0, extra_heads, key_dim - state.shape[-2], value_dim - state.shape[-1])
        state = grow(state, *widths)
    v = grow(v, 0, time, extra_heads, value_dim - v.shape[-1])
    return q, k, v, log_decay, state
