"""The TPU kernels of the fast weight's gradients: forwards, and the gradients of these.

With `C_w` the gradient of the sum `G_w`, a token of rates `r` gives, all element by element
(`z = k W0`, `u = k W2`, `h = silu(z) u`, `e` the error, `he = e W1ᵀ`, `s', s''` of `silu` at `z`):

    ge = he u s', ue = he silu(z);  a0 = k C0, a1 = e C1ᵀ, a2 = k C2
    dr = (ge . a0, h . a1, ue . a2)
    dhe = r0 a0 u s' + r2 a2 silu(z)
    du = r0 a0 he s' + r1 a1 silu(z)
    dz = r0 a0 he u s'' + (r2 a2 he + r1 a1 u) s'
    dk = r0 ge C0ᵀ + r2 ue C2ᵀ + dz W0ᵀ + du W2ᵀ;  de = r1 h C1 + dhe W1
    dW0 = kᵀ dz;  dW1 = dheᵀ e;  dW2 = kᵀ du

With `trained="last"` there is but one rate, r1, and what hangs on r0 and r2 is left out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.fast_weight.mosaic_tpu_apply import cost
from ttt_kernels.fast_weight.mosaic_tpu_network import Sizes, column, hidden
from ttt_kernels.tpu import COLUMNS, ROWS, clean, dot, inside, row_sums

_SEMANTICS = ("parallel", "parallel", "arbitrary")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def core(w0, w1, w2, k, error, rates, sizes: Sizes, interpret):
    """The sums `G`, three or, for one rate, that of w1, each [batch, heads, in, out] float32.

    Args:
      w0, w1, w2: [batch, heads, in, out].
      k, error: [batch, heads, time, key_dim] and [.., value_dim], all of one dtype.
      rates: [batch, heads, 3 or 1, blocks · block] float32, 0 behind the row.
      sizes, interpret: static.
    """
    everything = rates.shape[2] == 3
    specs, results = sizes.matrix_specs(), _sums(sizes)
    key, last = sizes.key_dim * sizes.hidden, sizes.hidden * sizes.value_dim
    if not everything:
        specs, results = specs[1:2], results[1:2]
    return tuple(compat.tpu_kernel(
        functools.partial(_forward_body, sizes=sizes, everything=everything),
        name="fast_weight_gradients_forward",
        semantics=_SEMANTICS,
        vmem_bytes=sizes.vmem_bytes(backward=False),
        interpret=interpret,
        out_shape=results,
        grid=sizes.grid,
        in_specs=[*sizes.matrix_specs(), *_token_specs(sizes, rates)],
        out_specs=specs,
        cost_estimate=cost(
            sizes, 4 * key + 2 * last if everything else 2 * key + last,
            (w0, w1, w2, k, error, rates, *results),
        ),
    )(w0, w1, w2, k, error, rates))  # fmt: skip


def _sums(sizes: Sizes) -> list[jax.ShapeDtypeStruct]:
    shape = (sizes.batch, sizes.heads)
    return [jax.ShapeDtypeStruct((*shape, *s), jnp.float32) for s in sizes.matrices]


def _token_specs(sizes: Sizes, rates) -> tuple[pl.BlockSpec, ...]:
    key, value = (sizes.token_spec(d) for d in (sizes.key_dim, sizes.value_dim))
    return key, value, sizes.rate_spec(rates.shape[2])


def _start_sums(*refs) -> None:
    """Zeroes the sums of a head at its first block."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)


def _forward_body(w0, w1, w2, k, error, rates, *sums, sizes: Sizes, everything: bool):
    _start_sums(*sums)
    valid, dtype = inside(pl.program_id(2), sizes.block, sizes.length), k.dtype
    tokens, e = clean(k[0, 0], valid), clean(error[0, 0], valid)
    x = hidden(tokens, w0[0, 0], w2[0, 0])
    rate = column(rates, 1 if everything else 0)
    sums[len(sums) // 2][0, 0] += dot((x.value * rate).astype(dtype), e, ROWS, ROWS)
    if everything:
        hidden_error = dot(e, w1[0, 0], COLUMNS, COLUMNS)
        gate_error = hidden_error * x.up * x.slope * column(rates, 0)
        up_error = hidden_error * x.activated * column(rates, 2)
        sums[0][0, 0] += dot(tokens, gate_error.astype(dtype), ROWS, ROWS)
        sums[2][0, 0] += dot(tokens, up_error.astype(dtype), ROWS, ROWS)


def _forward(w0, w1, w2, k, error, rates, sizes: Sizes, interpret):
    residuals = (w0, w1, w2, k, error, rates)
    return core(*residuals, sizes, interpret), residuals


def _backward(sizes: Sizes, interpret, residuals, cotangents):
    *weights, k, error, rates = residuals
    everything = rates.shape[2] == 3
    matrices, tokens = sizes.matrix_specs(), _token_specs(sizes, rates)
    d_sums = [c.astype(k.dtype) for c in cotangents]
    results = (*_sums(sizes), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, error, rates)))
    key, last = sizes.key_dim * sizes.hidden, sizes.hidden * sizes.value_dim
    *d_weights, dk, de, dr = compat.tpu_kernel(
        functools.partial(_backward_body, sizes=sizes, everything=everything),
        name="fast_weight_gradients_backward",
        semantics=_SEMANTICS,
        vmem_bytes=sizes.vmem_bytes(backward=True),
        interpret=interpret,
        out_shape=results,
        grid=sizes.grid,
        in_specs=[*matrices, *tokens, *(matrices if everything else matrices[1:2])],
        out_specs=(*matrices, *tokens),
        cost_estimate=cost(
            sizes, 10 * key + 5 * last if everything else 6 * key + 2 * last,
            (*residuals, *d_sums, *results),
        ),
    )(*residuals, *d_sums)  # fmt: skip
    return (*(d.astype(k.dtype) for d in d_weights), dk, de, dr)


core.defvjp(_forward, _backward)


def _backward_body(w0, w1, w2, k, error, rates, *refs, sizes: Sizes, everything: bool):
    *c, d_w0, d_w1, d_w2, dk, de, dr = refs
    _start_sums(d_w0, d_w1, d_w2)
    valid, dtype = inside(pl.program_id(2), sizes.block, sizes.length), k.dtype
    tokens, e = clean(k[0, 0], valid), clean(error[0, 0], valid)
    x = hidden(tokens, w0[0, 0], w2[0, 0])
    rate = column(rates, 1 if everything else 0)
    c1 = c[len(c) // 2][0, 0]
    weighed = dot(e, c1, COLUMNS, COLUMNS)
    d_error = dot((x.value * rate).astype(dtype), c1, COLUMNS, ROWS)
    d_rates = [row_sums(x.value * weighed)]
    weighed = weighed * rate
    d_up, d_activated = weighed * x.activated, weighed * x.up
    d_gate = d_activated * x.slope
    d_tokens = 0
    if everything:
        extra = _inner_gradients(x, tokens, e, w1[0, 0], c[0][0, 0], c[2][0, 0], rates)
        d_tokens, d_hidden_error, more_up, more_gate, d_rate0, d_rate2 = extra
        d_rates = [d_rate0, *d_rates, d_rate2]
        d_up, d_gate = d_up + more_up, d_gate + more_gate
        d_hidden_error = d_hidden_error.astype(dtype)
        d_error += dot(d_hidden_error, w1[0, 0], COLUMNS, ROWS)
        d_w1[0, 0] += dot(d_hidden_error, e, ROWS, ROWS)
    d_gate, d_up = d_gate.astype(dtype), d_up.astype(dtype)
    d_tokens += dot(d_gate, w0[0, 0], COLUMNS, COLUMNS) + dot(d_up, w2[0, 0], COLUMNS, COLUMNS)
    d_w0[0, 0] += dot(tokens, d_gate, ROWS, ROWS)
    d_w2[0, 0] += dot(tokens, d_up, ROWS, ROWS)
    dk[0, 0] = d_tokens.astype(dk.dtype)
    de[0, 0] = d_error.astype(de.dtype)
    for i, row in enumerate(d_rates):
        dr[0, 0, i : i + 1, :] = row


def _inner_gradients(x, tokens, error, w1, c0, c2, rates) -> tuple:
    """What the sums of w0 and w2 add: (dk, dhe, du, dz, dr0, dr2), names as above."""
    dtype = tokens.dtype
    hidden_error = dot(error, w1, COLUMNS, COLUMNS)
    gate_error = hidden_error * x.up * x.slope
    up_error = hidden_error * x.activated
    rate0, rate2 = column(rates, 0), column(rates, 2)
    a0, a2 = dot(tokens, c0, COLUMNS, ROWS), dot(tokens, c2, COLUMNS, ROWS)
    d_rate0, d_rate2 = row_sums(gate_error * a0), row_sums(up_error * a2)
    a0, a2 = a0 * rate0, a2 * rate2
    d_tokens = dot((gate_error * rate0).astype(dtype), c0, COLUMNS, COLUMNS)
    d_tokens += dot((up_error * rate2).astype(dtype), c2, COLUMNS, COLUMNS)
    d_hidden_error = a0 * x.up * x.slope + a2 * x.activated
    d_up = a0 * hidden_error * x.slope
    d_gate = a0 * hidden_error * x.up * x.curvature + a2 * hidden_error * x.slope
    return d_tokens, d_hidden_error, d_up, d_gate, d_rate0, d_rate2
