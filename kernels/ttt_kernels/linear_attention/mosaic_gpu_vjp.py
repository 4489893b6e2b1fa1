"""Forward and backward of the Mosaic GPU linear attention, as one differentiable function.

The gradients are linear attentions again. With `w_ij` the decay from j to i, `R` the gradient of
the state and `S` the state (arXiv 2312.06635, appendix C, for the gated form):

    dq_i = sum_{j<=i} w_ij (do_i . v_j) k_j + do_i S_0^T ...      forwards:  (do, v, k), states S^T
    dv_j = sum_{i>=j} w_ij (k_j . q_i) do_i + k_j R_T ...         backwards: (k, q, do), states R
    dk_j = sum_{i>=j} w_ij (v_j . do_i) q_i + v_j R_T^T ...       backwards: (v, do, q), states R^T

The last two in one pass for heads of 64 and of 128 (`mosaic_gpu_key_value`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ttt_kernels.linear_attention import (
    mosaic_gpu_decay,
    mosaic_gpu_key_value,
    mosaic_gpu_outputs,
    mosaic_gpu_prefix,
    mosaic_gpu_summaries,
)
from ttt_kernels.linear_attention.mosaic_gpu_common import Weights
from ttt_kernels.linear_attention.tiling import BLOCK, Tiling, choose

# Below exp(-16), float32's resolution, the gradient of a log decay counts as zero; see
# `_log_decay_gradient`.
_NEGLIGIBLE = -16.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def core(q, k, v, log_decay, initial_state, real, tiling: Tiling, interpret):
    """Outputs and final state. Widths, heads and time are padded already.

    Args:
      q, k, v: [batch, time, heads, dim] bf16.
      log_decay: [batch, blocks * 64, heads] float32, 0 past the end, or None.
      initial_state: [batch, heads, key_dim, value_dim] float32, or None for zero.
      real: [batch, blocks * 64] bool, false for padding, which may hold NaN, or None.
      tiling: static choices of the launch.
      interpret: None, or the interpreter's parameters.

    Returns:
      (out [batch, time, heads, value_dim] bf16, final [batch, heads, key_dim, value_dim] f32).
    """
    return _forward(q, k, v, log_decay, initial_state, real, tiling, interpret)[0]


def _edge_states(k, v, weights, edge, tiling: Tiling, reverse: bool, interpret) -> tuple:
    """State ahead of each segment (in reverse: behind it), [b, h, segments, key_dim, value_dim].

    And the sums of log decays, if forwards there are any.
    """
    if tiling.segments == 1:
        if edge is None:
            shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
            edge = jnp.zeros(shape, jnp.float32)
        sums = None
        if weights.log_decay is not None and not reverse:
            sums = mosaic_gpu_decay.block_sums(weights.log_decay)
        return edge[:, :, None], sums
    how = dict(reverse=reverse, interpret=interpret)
    parts, factors, sums = mosaic_gpu_summaries.summaries(k, v, weights, tiling, **how)
    return mosaic_gpu_prefix.prefix(parts, edge, factors, **how), sums


def _forward(q, k, v, log_decay, initial_state, real, tiling: Tiling, interpret):
    raw = Weights(log_decay, None, *mosaic_gpu_decay.padding(real))
    how = dict(reverse=False, interpret=interpret)
    states, sums = _edge_states(k, v, raw, initial_state, tiling, **how)
    weights = raw._replace(log_decay=None, sums=sums)
    out, final = mosaic_gpu_outputs.outputs(q, k, v, states, weights, tiling, **how)
    return (out, final), (q, k, v, raw, sums, states, final, initial_state is not None)


def _swapped(q, v, tiling: Tiling, decay: bool) -> Tiling:
    """The tiling with the widths of keys and values exchanged."""
    batch, length, heads, key_dim = q.shape
    return choose(batch, length, heads, v.shape[-1], key_dim, decay=decay,
                  portable=tiling.portable, segments=tiling.segments)


def _backward(tiling: Tiling, interpret, residuals, cotangents):
    q, k, v, raw, sums, states, final, starts = residuals
    weights = raw._replace(log_decay=None, sums=sums)
    d_out, d_final = cotangents
    d_out = d_out.astype(q.dtype)
    other = _swapped(q, v, tiling, sums is not None)
    run = functools.partial(mosaic_gpu_outputs.outputs, interpret=interpret)
    transposed = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
    # The gradient of the decays needs q . dq and v . dv of every token.
    beside_q, beside_v = (None, None) if sums is None else (q, v)
    dq, _, *q_dq = run(d_out, v, k, transposed(states), weights, other, reverse=False,
                       beside=beside_q)
    d_states, _ = _edge_states(q, d_out, raw, d_final, tiling, True, interpret)
    if mosaic_gpu_key_value.supported(tiling):
        dk, dv, d_initial, *v_dv = mosaic_gpu_key_value.key_value_gradients(
            q, k, v, d_out, d_states, weights, tiling, interpret=interpret
        )
    else:
        dv, d_initial, *v_dv = run(k, q, d_out, d_states, weights, tiling, reverse=True,
                                   beside=beside_v)
        dk, _ = run(v, d_out, q, transposed(d_states), weights, other, reverse=True)
    d_log_decay = None
    if sums is not None:
        edges = _edge_gradients(states, d_states, final, d_final, d_initial)
        change = jnp.sum(q_dq[0], axis=0) - jnp.sum(v_dv[0], axis=0)
        d_log_decay = _log_decay_gradient(change, raw, edges, tiling)
    return dq, dk, dv, d_log_decay, d_initial if starts else None, None


core.defvjp(_forward, _backward)


def _edge_gradients(states, d_states, final, d_final, d_initial) -> jax.Array:
    """`<S, R>` at each edge between segments: the gradient of the log decay of the token after it.

    [batch, heads, segments + 1] float32, from the row's start to the final state.
    """
    edge_states = jnp.concatenate([states, final[:, :, None]], axis=2)
    gradients = jnp.concatenate(
        [d_initial[:, :, None], d_states[:, :, :-1], d_final[:, :, None]], axis=2
    )
    return jnp.sum(edge_states * gradients, axis=(-1, -2))


def _log_decay_gradient(change, raw: Weights, edges, tiling: Tiling) -> jax.Array:
    """Gradient of the log decays, [batch, time, heads].

    `da_t = sum_{i>=t>j} w_ij (...)` obeys `da_t = da_{t+1} + q_t . dq_t - v_t . dv_t` (also with
    `k_t . dk_t = v_t . dv_t`), a running sum from the right whose rounding errors add up. It is
    tied to exact values: at every segment's edge, and to zero at every token whose own decay is
    below float32's resolution. What the sum misses at the next tie to its left is spread evenly
    over the tokens in between. `change` is that difference, [batch, heads, blocks * 64].
    """
    length = change.shape[-1]
    if raw.real is not None:
        change = jnp.where(raw.real[:, None] > 0, change, 0)
    first = mosaic_gpu_decay.segment_edges(length, tiling.segments)[:-1] * BLOCK
    tied = jnp.zeros(change.shape, bool).at[..., first].set(True)
    value = jnp.zeros_like(change).at[..., first].set(edges[..., :-1])
    negligible = jnp.moveaxis(raw.log_decay, 2, 1) < _NEGLIGIBLE
    tied, value = tied | negligible, jnp.where(negligible, 0, value)
    value = jnp.concatenate([value, edges[..., -1:]], axis=-1)
    # Positions of the last tie at or before each token and of the next one after it; the row's
    # first token and its end are ties.
    time = jnp.arange(length)
    left = lax.cummax(jnp.where(tied, time, 0), axis=2)
    right = lax.cummin(jnp.where(tied, time, length), axis=2, reverse=True)
    right = jnp.pad(right[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=length)
    sums = jnp.pad(jnp.cumsum(change, axis=-1), ((0, 0), (0, 0), (1, 0)))
    take = functools.partial(jnp.take_along_axis, axis=-1)
    end = take(value + sums, right)
    missed = take(value + sums, left) - end
    share = (right - time) / (right - left)
    gradient = end - sums[..., :-1] + missed * share.astype(missed.dtype)
    return jnp.moveaxis(gradient, 1, 2)
