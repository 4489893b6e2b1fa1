"""The kernels of token-causal linear attention on TPUs: one launch forwards, one backwards.

With `w_ij` the decay from token j to i of a block, `e_i` from the block's start to i, `f_j` from j
to its end and `S`, `R` the state at its start and the gradient of the state at its end
(arXiv 2312.06635, appendix C, for the gated form):

    o_i  = sum_{j<=i} w_ij (q_i . k_j) v_j + e_i q_i S          S' = e_end S + sum_j f_j k_j^T v_j
    dq_i = sum_{j<=i} w_ij (do_i . v_j) k_j + e_i do_i S^T
    dk_j = sum_{i>=j} w_ij (v_j . do_i) q_i + f_j v_j R^T
    dv_j = sum_{i>=j} w_ij (k_j . q_i) do_i + f_j k_j R         R' = e_end R + sum_i e_i q_i^T do_i

The gradient of the log decays is summed inside a block only, from `<S', R>` at its end:
`da_t = <S', R> + sum_{i>=t} (q_i . dq_i - k_i . dk_i)`, so no rounding error outlives a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels.linear_attention.mosaic_tpu_common import (
    Call,
    Inputs,
    carried,
    forwards,
    read_decay,
    read_tokens,
    read_valid,
    scaled,
    sum_from_right,
)
from ttt_kernels.tpu import COLUMNS, ROWS, dot


def forward(
    x: Inputs, initial: jax.Array, call: Call, *, save_states: bool, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Outputs, final state and, with `save_states`, the state at each block's start.

    Args:
      x: the operands.
      initial: [batch, heads, key_dim, value_dim] float32.
      call: sizes and tiling.
      save_states: whether a backward pass will want the states.
      interpret: None, or the interpreter's parameters.

    Returns:
      out [batch, time, heads · value_dim] in v's dtype; final, as `initial`; states
      [batch, heads, blocks, key_dim, value_dim] in v's dtype, or None.
    """
    tiling, dtype = call.tiling, x.v.dtype
    sizes = (tiling.key_dim, tiling.value_dim)
    states = None
    if save_states:
        states = jax.ShapeDtypeStruct((call.batch, call.heads, call.blocks, *sizes), dtype)
    results = (
        jax.ShapeDtypeStruct(x.v.shape, dtype),
        jax.ShapeDtypeStruct(initial.shape, jnp.float32),
        states,
    )
    specs = (
        call.token_spec(tiling.value_dim, forwards),
        call.state_spec(),
        call.states_spec(forwards) if save_states else None,
    )
    return call.launch(
        _forward_body(call),
        "token_forward",
        (x, initial),
        [call.input_specs(x, forwards), call.state_spec()],
        results,
        specs,
        products=tiling.block * sum(sizes) + 2 * sizes[0] * sizes[1],
        backward=False,
        interpret=interpret,
    )


def _forward_body(call: Call):
    tiling = call.tiling

    def body(x: Inputs, initial, out, state, states):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state[...] = initial[...]

        valid = read_valid(x)
        for h in range(tiling.heads_per_block):
            q, k = (read_tokens(ref, h, tiling.key_dim, valid) for ref in (x.q, x.k))
            v = read_tokens(x.v, h, tiling.value_dim, valid)
            decay = read_decay(x, h, tiling.block)
            start = state[0, h]
            rounded = start.astype(v.dtype)
            if states is not None:
                states[0, h, 0] = rounded
            scores = dot(q, k, COLUMNS, COLUMNS) * decay.between
            inherited = dot(q, rounded, COLUMNS, ROWS)
            found = dot(scores.astype(v.dtype), v, COLUMNS, ROWS)
            found += scaled(inherited, decay.from_start)
            lanes = slice(h * tiling.value_dim, (h + 1) * tiling.value_dim)
            out[0, :, lanes] = found.astype(out.dtype)
            state[0, h] = carried(start, decay) + dot(scaled(k, decay.to_end), v, ROWS, ROWS)

    return body


def backward(
    x: Inputs,
    states: jax.Array,
    d_out: jax.Array,
    d_final: jax.Array,
    call: Call,
    *,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of q, k, v, the initial state and, where there are decays, their logarithms.

    Args:
      x, states, call: as in `forward`, which made `states`.
      d_out: gradient of the outputs.
      d_final: gradient of the final state, float32.
      interpret: None, or the interpreter's parameters.

    Returns:
      dq, dk, dv as q, k, v; d_initial as `d_final`; d_log_decay [batch, heads, 1, blocks · block]
      float32, or None.
    """
    tiling, blocks = call.tiling, call.blocks

    def order(t):
        return blocks - 1 - t

    d_decay = None
    if x.sums is not None:
        shape = (call.batch, call.heads, 1, blocks * tiling.block)
        d_decay = jax.ShapeDtypeStruct(shape, jnp.float32)
    results = (
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.q, x.k, x.v, d_final)), d_decay,
    )  # fmt: skip
    specs = call.input_specs(x, order)
    sizes = (tiling.key_dim, tiling.value_dim)
    decay_spec = None if d_decay is None else call.vector_spec(1, order)
    return call.launch(
        _backward_body(call),
        "token_backward",
        (x, states, d_out, d_final),
        [specs, call.states_spec(order), specs.v, call.state_spec()],
        results,
        (specs.q, specs.k, specs.v, call.state_spec(), decay_spec),
        products=tiling.block * (3 * sizes[0] + 2 * sizes[1]) + 4 * sizes[0] * sizes[1],
        backward=True,
        interpret=interpret,
    )


def _backward_body(call: Call):
    tiling = call.tiling

    def body(x: Inputs, states, d_out, d_final, dq, dk, dv, d_state, d_decay):
        @pl.when(pl.program_id(2) == 0)
        def _():
            d_state[...] = d_final[...]

        valid = read_valid(x)
        for h in range(tiling.heads_per_block):
            q, k = (read_tokens(ref, h, tiling.key_dim, valid) for ref in (x.q, x.k))
            v, do = (read_tokens(ref, h, tiling.value_dim, valid) for ref in (x.v, d_out))
            decay = read_decay(x, h, tiling.block)
            start, d_end = states[0, h, 0], d_state[0, h]
            rounded = d_end.astype(v.dtype)
            scores = (dot(q, k, COLUMNS, COLUMNS) * decay.between).astype(v.dtype)
            d_scores = (dot(do, v, COLUMNS, COLUMNS) * decay.between).astype(v.dtype)
            q_gradient = dot(d_scores, k, COLUMNS, ROWS)
            q_gradient += scaled(dot(do, start, COLUMNS, COLUMNS), decay.from_start)
            k_beyond = scaled(dot(v, rounded, COLUMNS, COLUMNS), decay.to_end)
            k_gradient = dot(d_scores, q, ROWS, ROWS) + k_beyond
            v_gradient = dot(scores, do, ROWS, ROWS)
            v_gradient += scaled(dot(k, rounded, COLUMNS, ROWS), decay.to_end)
            keys = slice(h * tiling.key_dim, (h + 1) * tiling.key_dim)
            dq[0, :, keys] = q_gradient.astype(dq.dtype)
            dk[0, :, keys] = k_gradient.astype(dk.dtype)
            values = slice(h * tiling.value_dim, (h + 1) * tiling.value_dim)
            dv[0, :, values] = v_gradient.astype(dv.dtype)
            d_start = carried(d_end, decay)
            if d_decay is not None:
                edge = jnp.sum(start * d_start, keepdims=True) + jnp.sum(
                    k * k_beyond, keepdims=True
                )
                change = q * q_gradient - k * k_gradient
                d_decay[0, h] = edge + sum_from_right(change)
            d_state[0, h] = d_start + dot(scaled(q, decay.from_start), do, ROWS, ROWS)

    return body
