"""The TPU kernels that apply the fast weight: forwards, and the gradients of its result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.fast_weight.mosaic_tpu_network import Sizes, hidden
from ttt_kernels.tpu import COLUMNS, ROWS, clean, dot, inside

_SEMANTICS = ("parallel", "parallel", "arbitrary")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def core(w0, w1, w2, q, sizes: Sizes, interpret):
    """`f(q)`, [batch, heads, time, value_dim]; weights and q of one dtype."""

    def body(w0, w1, w2, q, out):
        x = hidden(q[0, 0], w0[0, 0], w2[0, 0])
        out[0, 0] = dot(x.value.astype(q.dtype), w1[0, 0], COLUMNS, ROWS).astype(out.dtype)

    matrix = sum(a * b for a, b in sizes.matrices)
    result = jax.ShapeDtypeStruct((*q.shape[:3], sizes.value_dim), q.dtype)
    return compat.tpu_kernel(
        body,
        name="fast_weight_apply_forward",
        semantics=_SEMANTICS,
        vmem_bytes=sizes.vmem_bytes(backward=False),
        interpret=interpret,
        out_shape=result,
        grid=sizes.grid,
        in_specs=[*sizes.matrix_specs(), sizes.token_spec(sizes.key_dim)],
        out_specs=sizes.token_spec(sizes.value_dim),
        cost_estimate=cost(sizes, matrix, (w0, w1, w2, q, result)),
    )(w0, w1, w2, q)


def cost(sizes: Sizes, products: int, arrays) -> pl.CostEstimate:
    """`products` multiplications a token and every byte once."""
    tokens = sizes.batch * sizes.heads * sizes.blocks * sizes.block
    return pl.CostEstimate(
        flops=2 * tokens * products,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        transcendentals=tokens * sizes.hidden,
    )


def _forward(w0, w1, w2, q, sizes: Sizes, interpret):
    return core(w0, w1, w2, q, sizes, interpret), (w0, w1, w2, q)


def _backward(sizes: Sizes, interpret, residuals, d_out):
    w0, w1, w2, q = residuals
    results = (
        *(jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in (w0, w1, w2)),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
    )
    matrix = sum(a * b for a, b in sizes.matrices)
    *d_weights, dq = compat.tpu_kernel(
        functools.partial(_backward_body, sizes=sizes),
        name="fast_weight_apply_backward",
        semantics=_SEMANTICS,
        vmem_bytes=sizes.vmem_bytes(backward=True),
        interpret=interpret,
        out_shape=results,
        grid=sizes.grid,
        in_specs=[*sizes.matrix_specs(), sizes.token_spec(sizes.key_dim),
                  sizes.token_spec(sizes.value_dim)],
        out_specs=(*sizes.matrix_specs(), sizes.token_spec(sizes.key_dim)),
        cost_estimate=cost(
            sizes, 2 * matrix + 2 * sizes.key_dim * sizes.hidden, (*residuals, d_out, *results)
        ),
    )(*residuals, d_out.astype(q.dtype))  # fmt: skip
    return (*(d.astype(w0.dtype) for d in d_weights), dq)


core.defvjp(_forward, _backward)


def _backward_body(w0, w1, w2, q, d_out, d_w0, d_w1, d_w2, dq, *, sizes: Sizes):
    t = pl.program_id(2)

    @pl.when(t == 0)
    def _():
        for ref in (d_w0, d_w1, d_w2):
            ref[...] = jnp.zeros_like(ref)

    valid, dtype = inside(t, sizes.block, sizes.length), q.dtype
    tokens, error = clean(q[0, 0], valid), clean(d_out[0, 0], valid)
    x = hidden(tokens, w0[0, 0], w2[0, 0])
    hidden_error = dot(error, w1[0, 0], COLUMNS, COLUMNS)
    gate_error = (hidden_error * x.up * x.slope).astype(dtype)
    up_error = (hidden_error * x.activated).astype(dtype)
    d_w0[0, 0] += dot(tokens, gate_error, ROWS, ROWS)
    d_w1[0, 0] += dot(x.value.astype(dtype), error, ROWS, ROWS)
    d_w2[0, 0] += dot(tokens, up_error, ROWS, ROWS)
    d_tokens = dot(gate_error, w0[0, 0], COLUMNS, COLUMNS)
    d_tokens += dot(up_error, w2[0, 0], COLUMNS, COLUMNS)
    dq[0, 0] = d_tokens.astype(dq.dtype)
