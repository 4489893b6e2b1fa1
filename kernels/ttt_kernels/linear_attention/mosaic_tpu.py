"""Linear attention on TPUs through Pallas' Mosaic backend.

bfloat16 or float32 products, float32 accumulators and states. Documents are decays (the first
token of each later one wipes the state), padding and the ragged end of a row are zeroed inside the
kernels. The rules of what they run are in `unsupported`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ttt_kernels.linear_attention import events, mosaic_tpu_vjp, segments
from ttt_kernels.linear_attention import mosaic_tpu_tiling as tiling
from ttt_kernels.linear_attention.mosaic_tpu_chunk import ChunkCall
from ttt_kernels.linear_attention.mosaic_tpu_common import Call

WIPE = -200.0
"""A log decay whose exponential is exactly zero in float32."""


def unsupported(q: jax.Array, v: jax.Array) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
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
    reason = unsupported(q, v)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), jnp.float32)
    if segment_ids is not None:
        log_decay = _documents_as_decay(log_decay, segment_ids, q.shape[2])
    real = None if segment_ids is None else segments.is_real(segment_ids)
    run = functools.partial(
        _run, interpret=interpret, block=block, heads_per_block=heads_per_block
    )
    if causal == "token":
        return run(q, k, v, log_decay, initial_state, real)
    chunk_size = tiling.needed_chunk(chunk_size, q.shape[1])
    if real is None and chunk_size % tiling.LANES == 0:
        late = include_current_chunk
        return run(q, k, v, log_decay, initial_state, None, chunk_size=chunk_size, late=late)
    return _by_events(
        run, q, k, v, log_decay, initial_state, segment_ids, chunk_size, include_current_chunk
    )


def _documents_as_decay(log_decay, segment_ids, heads: int) -> jax.Array:
    """Lets the first token of each later document wipe the state; no decay at padding."""
    wipe = jnp.diff(segments.document_index(segment_ids), axis=1, prepend=0) > 0
    if log_decay is None:
        log_decay = jnp.zeros((*segment_ids.shape, heads), jnp.float32)
    log_decay = jnp.where(segments.is_real(segment_ids)[:, :, None], log_decay, 0)
    return jnp.where(wipe[:, :, None], WIPE, log_decay)


def _by_events(run, q, k, v, log_decay, initial, segment_ids, chunk_size, include_current):
    """Causal by chunk, for documents and for chunks that are not whole blocks."""
    places = events.arrange(q.shape[1], chunk_size, include_current, segment_ids)
    writes = jnp.ones(q.shape[:2], bool) if segment_ids is None else segments.is_real(segment_ids)
    # `where`, not a product: padded positions may hold NaN.
    q = jnp.where((writes & places.reads_own)[:, :, None, None], q, 0)
    k, v = (jnp.where(writes[:, :, None, None], x, 0) for x in (k, v))
    if log_decay is not None:
        log_decay = events.spread(log_decay, places.writes)
    q = events.spread(q, places.reads)
    k, v = (events.spread(x, places.writes) for x in (k, v))
    out, final = run(q, k, v, log_decay, initial, None)
    return events.collect(out, places.reads), final


def _run(
    q, k, v, log_decay, initial, real, *, chunk_size: int | None = None, late: bool = False,
    interpret, block: int | None, heads_per_block: int | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Pads widths, decays and the tokens' mask, and calls the kernels.

    Causal by token; with `chunk_size` by chunk, and then `late` as `include_current_chunk`.
    """
    batch, length, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    dims = tiling.padded_dims(heads, key_dim, value_dim)
    plan = tiling.choose(
        length, heads, *dims, q.dtype.itemsize, block=block, chunk_size=chunk_size,
        heads_per_block=heads_per_block,
    )  # fmt: skip
    call = Call(plan, batch, length, heads)
    if chunk_size is not None:
        chunk_blocks = chunk_size // plan.block
        call = ChunkCall(plan, batch, length, heads, chunk_blocks, chunk_blocks if late else 0)
    whole = call.blocks * plan.block
    if log_decay is not None:
        log_decay = jnp.maximum(log_decay.astype(jnp.float32), WIPE)
        log_decay = _pad(jnp.moveaxis(log_decay, 2, 1), {2: whole})
    if real is None and whole > length and chunk_size is None:
        real = jnp.ones((1, length), bool)
    valid = None if real is None else _pad(real.astype(jnp.int32), {1: whole})[:, None]
    initial = _pad(initial.astype(jnp.float32), {2: dims[0], 3: dims[1]})
    q, k, v = (
        _pad(x, {3: dim}).reshape(batch, length, heads * dim)
        for x, dim in ((q, dims[0]), (k, dims[0]), (v, dims[1]))
    )
    out, final = mosaic_tpu_vjp.core(q, k, v, log_decay, initial, valid, call, interpret)
    out = out.reshape(batch, length, heads, dims[1])[..., :value_dim]
    return out, final[:, :, :key_dim, :value_dim]


def _pad(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """`x` with zeros behind it along the axes named, up to their new sizes."""
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x
