"""Linear attention on TPUs through Pallas' Mosaic backend.

bfloat16 or float32 products, float32 accumulators and states. Documents are decays (the first
token of each later one wipes the state), padding and the ragged end of a row are zeroed inside the
kernels. The rules of what they run are in `unsupported`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels.linear_attention import mosaic_tpu_tiling as tiling
from ttt_kernels.linear_attention import mosaic_tpu_vjp, segments
from ttt_kernels.linear_attention.mosaic_tpu_common import Call

WIPE = -200.0
"""A log decay whose exponential is exactly zero in float32."""


def unsupported(q: jax.Array, v: jax.Array, causal: str) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if causal != "token":
        return f"causal={causal!r}: the Mosaic TPU kernel is causal by token"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the inputs are {q.dtype}; the Mosaic TPU kernels take bfloat16 and float32"
    dims = tiling.padded_dims(q.shape[2], q.shape[-1], v.shape[-1])
    try:
        tiling.choose(q.shape[1], q.shape[2], *dims, q.dtype.itemsize)
    except ValueError as error:
        return str(error)
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
    interpret=None,
    block: int | None = None,
    heads_per_block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention by the Mosaic TPU kernels; see `ttt_kernels.linear_attention`.

    Under a mesh, wrap the call in `jax.shard_map(..., check_vma=False)` over batch and heads: no
    collective is added, and a plain `jit` over sharded arrays is refused by JAX.

    Args:
      interpret: None compiles for a TPU; what `compat.tpu_interpret_params` returns runs in
        JAX's TPU interpreter on a CPU.
      block, heads_per_block: override the tiling's choice; None chooses.

    Raises:
      NotImplementedError: an argument beyond the kernels' limits, see `unsupported`.
      ValueError: `block` or `heads_per_block` that do not fit.
    """
    reason = unsupported(q, v, causal)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    batch, length, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    padded = tiling.padded_dims(heads, key_dim, value_dim)
    plan = tiling.choose(
        length, heads, *padded, q.dtype.itemsize, block=block, heads_per_block=heads_per_block
    )
    call = Call(plan, batch, length, heads)
    log_decay, valid = prepare(log_decay, segment_ids, call)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)
    initial_state = pad_to(initial_state.astype(jnp.float32), {2: padded[0], 3: padded[1]})
    q, k, v = (
        pad_to(x, {3: dim}).reshape(batch, length, heads * dim)
        for x, dim in ((q, padded[0]), (k, padded[0]), (v, padded[1]))
    )
    out, final = mosaic_tpu_vjp.core(q, k, v, log_decay, initial_state, valid, call, interpret)
    out = out.reshape(batch, length, heads, padded[1])[..., :value_dim]
    return out, final[:, :, :key_dim, :value_dim]


def pad_to(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """`x` with zeros behind it along the axes named, up to their new sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def prepare(
    log_decay: jax.Array | None, segment_ids: jax.Array | None, call: Call
) -> tuple[jax.Array | None, jax.Array | None]:
    """The decays and the valid tokens of a call, cut to whole blocks, as `core` takes them."""
    whole = call.blocks * call.tiling.block
    valid = None
    if segment_ids is not None:
        real = segments.is_real(segment_ids)
        valid = real.astype(jnp.int32)
        wipe = jnp.diff(segments.document_index(segment_ids), axis=1, prepend=0) > 0
        if log_decay is None:
            log_decay = jnp.zeros((call.batch, call.length, call.heads), jnp.float32)
        log_decay = jnp.where(real[:, :, None], log_decay, 0)
        log_decay = jnp.where(wipe[:, :, None], WIPE, log_decay)
    elif whole > call.length:
        valid = jnp.ones((1, call.length), jnp.int32)
    if valid is not None:
        valid = pad_to(valid, {1: whole})[:, None]
    if log_decay is not None:
        log_decay = jnp.maximum(log_decay.astype(jnp.float32), WIPE)
        log_decay = pad_to(jnp.moveaxis(log_decay, 2, 1), {2: whole})
    return log_decay, valid
