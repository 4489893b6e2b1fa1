"""Linear attention on TPUs as one differentiable function of prepared arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ttt_kernels.linear_attention import decay as decays
from ttt_kernels.linear_attention import mosaic_tpu_chunk as chunk
from ttt_kernels.linear_attention import mosaic_tpu_token as token
from ttt_kernels.linear_attention.mosaic_tpu_common import Call, Inputs

# A log decay has its own exponential in its gradient: below exp(-16), float32's resolution, what
# the kernel returns for it is the rounding error of the sums around it.
_NEGLIGIBLE = -16.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def core(q, k, v, log_decay, initial, valid, call: Call, interpret):
    """Outputs and final state. Widths are padded and heads lie in the lanes already.

    Args:
      q, k: [batch, time, heads · key_dim].
      v: [batch, time, heads · value_dim].
      log_decay: [batch, heads, blocks · block] float32 from -200 to 0, 0 behind the row, or None.
      initial: [batch, heads, key_dim, value_dim] float32.
      valid: [batch or 1, 1, blocks · block] int32, or None: every token is real.
      call: sizes and tiling; a `ChunkCall` (then `valid` is None) is causal by chunk.
      interpret: None, or the interpreter's parameters.

    Returns:
      (out [batch, time, heads · value_dim] in v's dtype, final as `initial`).
    """
    x = _inputs(q, k, v, log_decay, valid, call)
    kernels = chunk if isinstance(call, chunk.ChunkCall) else token
    return kernels.forward(x, initial, call, save_states=False, interpret=interpret)[:2]


def _inputs(q, k, v, log_decay, valid, call: Call) -> Inputs:
    sums = None
    if log_decay is not None:
        blocks = log_decay.reshape(*log_decay.shape[:2], -1, call.tiling.block)
        sums = decays.cumulative(blocks, axis=-1)
        sums = jnp.stack([y.reshape(log_decay.shape) for y in sums], axis=2)
    return Inputs(q, k, v, valid, sums)


def _forward(q, k, v, log_decay, initial, valid, call: Call, interpret):
    x = _inputs(q, k, v, log_decay, valid, call)
    kernels = chunk if isinstance(call, chunk.ChunkCall) else token
    out, final, states = kernels.forward(x, initial, call, save_states=True, interpret=interpret)
    return (out, final), (x, states, log_decay)


def _backward(call: Call, interpret, residuals, cotangents):
    x, states, log_decay = residuals
    d_out, d_final = cotangents
    d_out = d_out.astype(x.v.dtype)
    kernels = chunk if isinstance(call, chunk.ChunkCall) else token
    dq, dk, dv, d_initial, d_decay = kernels.backward(
        x, states, d_out, d_final, call, interpret=interpret
    )
    if d_decay is not None:
        d_decay = jnp.where(log_decay < _NEGLIGIBLE, 0, d_decay[:, :, 0])
    return dq, dk, dv, d_decay, d_initial, None


core.defvjp(_forward, _backward)
