"""Chunk-causal linear attention on Hopper GPUs: the chunks' summaries, a prefix and the outputs.

The kernels are those of `ttt_kernels.chunk_products`; the decays within a chunk are the rates of
its tokens. The rules of what it runs are in `unsupported`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels.chunk_products import mosaic_gpu, vjp
from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention.decay import LogSum

_DECAY_DIM = 384  # widest heads with decays that implementation=None leaves to the kernels


def unsupported(q: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if segment_ids is not None:
        return "segment_ids with causal='chunk': the Mosaic GPU kernels take one document a row"
    return mosaic_gpu.unsupported(q.dtype, q.shape[-1], v.shape[-1])


def untimed(
    q: jax.Array, v: jax.Array, log_decay: jax.Array | None, chunk_size: int
) -> str | None:
    """Why these kernels are not known to be the fastest for these arguments, or None."""
    if log_decay is not None and max(q.shape[-1], v.shape[-1]) > _DECAY_DIM:
        return f"causal='chunk' with log_decay has been timed at widths up to {_DECAY_DIM}"
    return mosaic_gpu.untimed(q.shape[1], chunk_size, q.shape[-1], v.shape[-1])


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int,
    include_current_chunk: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Chunk-causal linear attention; see `ttt_kernels.linear_attention`.

    Raises:
      NotImplementedError: an argument beyond the kernels' limits, see `unsupported`.
    """
    reason = unsupported(q, v, segment_ids)
    if reason is not None:
        raise NotImplementedError(f"{reason}; implementation='xla' runs it")
    return by_products(
        q, k, v, log_decay, initial_state, chunk_size, include_current_chunk, mosaic_gpu.Kernels()
    )


def by_products(
    q, k, v, log_decay, initial_state, chunk_size: int, include: bool, backend
) -> tuple[jax.Array, jax.Array]:
    """Chunk-causal linear attention by any backend of `ttt_kernels.chunk_products`.

    With `D_c` the decay of chunk c and `w_t` the decay from token t to its chunk's end,
    `G_c = sum_t w_t k_t^T v_t`, `S_c = D_c S_{c-1} + G_c` and `o_t = q_t S_{c-1}` (or `q_t S_c`
    with `include`). G has the dtype of the tokens, the sums are float32: the final state of bf16
    tokens has the error of one rounding of each summary.
    """
    if initial_state is not None:
        initial_state = initial_state.astype(jnp.float32)
    rates = decay = None
    if log_decay is not None:
        sums = _running_sums(log_decay.astype(jnp.float32), chunk_size)
        totals = sums[..., -1]
        decay = decays.factor(totals)
        rates = jnp.moveaxis(decays.factor(totals[..., None], sums), 1, 3)
        rates = rates.reshape(q.shape[0], -1, q.shape[2])[:, : q.shape[1]]
    summaries = vjp.summaries(k, v, chunk_size, k.dtype, backend, rates)
    states, final = vjp.states(
        summaries, decay, initial_state, include, False, q.dtype, backend
    )
    return vjp.outputs(q, states, chunk_size, False, backend), final


def _running_sums(log_decay: jax.Array, chunk_size: int) -> LogSum:
    """Sums of [batch, time, heads] from each chunk's start, [batch, heads, chunks, chunk]."""
    chunk_size = min(chunk_size, log_decay.shape[1])
    x = jnp.pad(log_decay, ((0, 0), (0, -log_decay.shape[1] % chunk_size), (0, 0)))
    x = x.reshape(x.shape[0], -1, chunk_size, x.shape[2])
    return decays.cumulative(jnp.moveaxis(x, 3, 1), axis=-1)
