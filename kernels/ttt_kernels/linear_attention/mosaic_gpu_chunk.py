"""Chunk-causal linear attention on Hopper GPUs: the chunks' summaries, a prefix and the outputs.

The kernels are those of `ttt_kernels.chunk_products`. With decays the state at every chunk's edge
is a product of the summaries with a lower-triangular matrix, by XLA, and the decays within a chunk
go into the keys. The rules of what it runs are in `unsupported`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.chunk_products import mosaic_gpu, vjp
from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention.decay import LogSum

# Above this many chunks the triangular matrix is applied group by group, so that its cost stays
# linear in the length.
MAX_GROUP = 64


def unsupported(q: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if segment_ids is not None:
        return "segment_ids with causal='chunk': the Mosaic GPU kernels take one document a row"
    return mosaic_gpu.unsupported(q.dtype, q.shape[-1], v.shape[-1])


def untimed(
    q: jax.Array, v: jax.Array, log_decay: jax.Array | None, chunk_size: int
) -> str | None:
    """Why these kernels are not known to be the fastest for these arguments, or None."""
    if log_decay is not None:
        return "the gradients of causal='chunk' with log_decay have not been timed"
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
    with `include`).
    """
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), jnp.float32)
    initial_state = initial_state.astype(jnp.float32)
    if log_decay is None:
        return _undecayed(q, k, v, initial_state, chunk_size, include, backend)
    sums = _running_sums(log_decay.astype(jnp.float32), chunk_size)
    totals = sums[..., -1]
    weights = decays.factor(totals[..., None], sums)
    weights = jnp.moveaxis(weights, 1, 3).reshape(q.shape[0], -1, q.shape[2], 1)
    k = k * weights[:, : k.shape[1]].astype(k.dtype)
    summaries = vjp.summaries(k, v, chunk_size, jnp.dtype(jnp.float32), backend)
    states, final = _prefix(summaries, totals, initial_state, include, q.dtype)
    return vjp.outputs(q, states, chunk_size, False, backend), final


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _undecayed(q, k, v, initial_state, chunk_size: int, include: bool, backend):
    """`by_products` without decays."""
    return _undecayed_forward(q, k, v, initial_state, chunk_size, include, backend)[0]


def _undecayed_forward(q, k, v, initial_state, chunk_size, include, backend):
    summaries = backend.summaries(k, v, chunk_size, jnp.dtype(jnp.float32))
    states, final = backend.states(summaries, initial_state, include, False, q.dtype)
    return (backend.outputs(q, states, chunk_size, False), final), (q, k, v, states)


def _undecayed_backward(chunk_size, include, backend, residuals, cotangents):
    q, k, v, states = residuals
    d_out, d_final = cotangents
    dq = backend.outputs(d_out, states, chunk_size, True)
    d_states = backend.summaries(q, d_out, chunk_size, jnp.dtype(jnp.float32))
    d_sums, d_initial = backend.states(d_states, d_final, include, True, q.dtype)
    dk = backend.outputs(v, d_sums, chunk_size, True)
    return dq, dk, backend.outputs(k, d_sums, chunk_size, False), d_initial


_undecayed.defvjp(_undecayed_forward, _undecayed_backward)


def _running_sums(log_decay: jax.Array, chunk_size: int) -> LogSum:
    """Sums of [batch, time, heads] from each chunk's start, [batch, heads, chunks, chunk]."""
    chunk_size = min(chunk_size, log_decay.shape[1])
    x = jnp.pad(log_decay, ((0, 0), (0, -log_decay.shape[1] % chunk_size), (0, 0)))
    x = x.reshape(x.shape[0], -1, chunk_size, x.shape[2])
    return decays.cumulative(jnp.moveaxis(x, 3, 1), axis=-1)


def _prefix(summaries, totals: LogSum, initial, include: bool, dtype):
    """(state that each chunk reads, in `dtype`; final state).

    Args:
      summaries: [batch, heads, chunks, key_dim, value_dim] float32.
      totals: sums of log decays of whole chunks, [batch, heads, chunks].
      initial: [batch, heads, key_dim, value_dim] float32.
      include: whether a chunk reads the state at its own end.
    """
    n = summaries.shape[2]
    if n <= MAX_GROUP:
        return _prefix_group(summaries, totals, initial, include, dtype)
    tail = -n % MAX_GROUP

    def grouped(x):
        x = jnp.pad(x, [(0, 0)] * 2 + [(0, tail)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, MAX_GROUP, *x.shape[3:]), 2, 0)

    def step(state, inputs):
        states, final = _prefix_group(*inputs, state, include, dtype)
        return final, states

    final, states = lax.scan(step, initial, (grouped(summaries), totals.map(grouped)))
    states = jnp.moveaxis(states, 0, 2)
    return states.reshape(*states.shape[:2], -1, *states.shape[4:])[:, :, :n], final


def _prefix_group(summaries, totals: LogSum, initial, include: bool, dtype):
    """`_prefix` by one product."""
    n = summaries.shape[2]
    sums = decays.cumulative_sums(totals, axis=-1)
    sums = sums.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0))))
    mask = jnp.tril(jnp.ones((n + 1, n + 1), bool))
    # Row i is the state at edge i; column 0 the initial state, column j + 1 chunk j's summary.
    weights = decays.masked_factor(sums[..., :, None], sums[..., None, :], mask)
    rows = slice(1, n + 1) if include else slice(0, n)
    states = jnp.einsum("bhij,bhjde->bhide", weights[:, :, rows, 1:], summaries)
    states = states + weights[:, :, rows, :1, None] * initial[:, :, None]
    last = weights[:, :, n]
    final = jnp.einsum(
        "bhj,bhjde->bhde", last[..., 1:], summaries, precision=lax.Precision.HIGHEST
    )
    return states.astype(dtype), final + last[..., :1, None] * initial
