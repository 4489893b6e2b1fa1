"""The fast weight by XLA's products and, between them, kernels of Pallas' Triton backend.

What LaCT's fast network makes of gate and up, elementwise, each way one pass. Gate and up, their
errors and their gradients lie beside each other in one array, as one product makes or takes them;
XLA would write two and copy them together.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.fast_weight import xla

ROWS = 4  # of a program
MAX_COLUMNS = 512  # of a step
TIMED_WIDTH = 1024  # of the hidden layer
_WARPS = 4


def unsupported(hidden: int, x: jax.Array) -> str | None:
    """Why the kernels cannot run x, [batch, heads, time, key_dim], on any device, or None."""
    rows = math.prod(x.shape[:-1])
    if x.dtype != jnp.bfloat16:
        return f"the tokens are {x.dtype}; the Triton kernels take bfloat16"
    if rows * 2 * hidden >= 2**31 or x.shape[-2] % ROWS:
        return f"{x.shape[-2]} tokens; the Triton kernels take multiples of {ROWS}, < 2^31 numbers"
    if hidden % 128:
        return f"a hidden width of {hidden}; the Triton kernels take multiples of 128"
    return None


def untimed(hidden: int) -> str | None:
    """Why the kernels are taken by name alone, or None."""
    if hidden < TIMED_WIDTH:
        return f"a hidden width of {hidden}: below {TIMED_WIDTH} nothing has been timed"
    return None


def apply(w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array) -> jax.Array:
    """`(silu(q W0) * (q W2)) W1`; see `ttt_kernels.fast_weight_apply`."""
    return xla.apply(w0, w1, w2, q, hidden_of=hidden)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of all matrices, or of `w1` for one rate; `ttt_kernels.fast_weight_gradients`."""
    return xla.gradients(w0, w1, w2, k, error, rates, errors_of=errors)


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _call(body, out_shapes, rows: int, steps: int, interpret, *operands):
    return compat.triton_kernel(
        body,
        out_shape=[jax.ShapeDtypeStruct(*pair) for pair in out_shapes],
        grid=(rows // ROWS, steps),
        num_warps=_WARPS,
        interpret=interpret,
    )(*operands)


def _columns(hidden: int):
    """(columns of a step, their number)."""
    width = min(hidden & -hidden, MAX_COLUMNS)
    return width, hidden // width


def _wide(ref, *index):
    return ref[index].astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def errors(gate_up, error, rates, interpret: bool = False):
    """(hidden · rate 1, [errors of gate · rate 0, of up · rate 2]) in one pass.

    Args:
      gate_up: [..., 2 hidden] bfloat16.
      error: [..., hidden], of silu(gate) up.
      rates: [..., 3] float32.

    Returns:
      ([..., hidden], [..., 2 hidden]) bfloat16.
    """
    return _errors(gate_up, error, rates, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _errors(gate_up, error, rates, interpret):
    shape, hidden = gate_up.shape, error.shape[-1]
    gate_up, error, rates = (x.reshape(-1, x.shape[-1]) for x in (gate_up, error, rates))
    rows, dtype = len(error), gate_up.dtype
    width, steps = _columns(hidden)

    def glu_errors_forward(gate_up_ref, error_ref, rates_ref, hidden_ref, errors_ref):
        here = pl.ds(pl.program_id(0) * ROWS, ROWS)
        column = pl.program_id(1) * width
        first, second = pl.ds(column, width), pl.ds(hidden + column, width)
        gate, up = _wide(gate_up_ref, here, first), _wide(gate_up_ref, here, second)
        error = _wide(error_ref, here, first)
        rate = [rates_ref[here, n][:, None] for n in range(3)]
        sigmoid = _sigmoid(gate)
        value = gate * sigmoid
        hidden_ref[here, first] = (value * up * rate[1]).astype(dtype)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        errors_ref[here, first] = (error * up * slope * rate[0]).astype(dtype)
        errors_ref[here, second] = (error * value * rate[2]).astype(dtype)

    made = _call(
        glu_errors_forward, [((rows, hidden), dtype), ((rows, 2 * hidden), dtype)],
        rows, steps, interpret, gate_up, error, rates,
    )  # fmt: skip
    return made[0].reshape(*shape[:-1], hidden), made[1].reshape(shape)


def _errors_forward(gate_up, error, rates, interpret):
    return _errors(gate_up, error, rates, interpret), (gate_up, error, rates)


@functools.partial(jax.jit, static_argnums=(0,))
def _errors_backward(interpret, kept, cotangents):
    shapes = [x.shape for x in kept]
    gate_up, error, rates, d_hidden, d_errors = (
        x.reshape(-1, x.shape[-1]) for x in (*kept, *cotangents)
    )
    rows, hidden = error.shape
    dtype = gate_up.dtype
    width, steps = _columns(hidden)

    def glu_errors_backward(
        gate_up_ref, error_ref, rates_ref, d_hidden_ref, d_errors_ref,
        d_gate_up_ref, d_error_ref, d_rates_ref,
    ):  # fmt: skip
        here = pl.ds(pl.program_id(0) * ROWS, ROWS)
        rate = [rates_ref[here, n][:, None] for n in range(3)]
        sums = [jnp.zeros(ROWS, jnp.float32)] * 3
        for step in range(steps):
            first, second = (pl.ds(start + step * width, width) for start in (0, hidden))
            gate, up = _wide(gate_up_ref, here, first), _wide(gate_up_ref, here, second)
            error, d_value = _wide(error_ref, here, first), _wide(d_hidden_ref, here, first)
            d_gate_error, d_up_error = (_wide(d_errors_ref, here, c) for c in (first, second))
            sigmoid = _sigmoid(gate)
            value = gate * sigmoid
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            # slope' = σ' (2 + gate (1 - 2 σ)), σ' = σ (1 - σ)
            bend = sigmoid * (1 - sigmoid) * (2 + gate * (1 - 2 * sigmoid))
            terms = (d_gate_error * error * up * slope, d_value * value * up,
                     d_up_error * error * value)  # fmt: skip
            sums = [s + jnp.sum(t, axis=1) for s, t in zip(sums, terms, strict=True)]
            d_gate_error, d_value, d_up_error = (
                d * r for d, r in zip((d_gate_error, d_value, d_up_error), rate, strict=True)
            )
            d_gate = d_gate_error * error * up * bend + (d_value * up + d_up_error * error) * slope
            d_gate_up_ref[here, first] = d_gate.astype(dtype)
            d_up = d_gate_error * error * slope + d_value * value
            d_gate_up_ref[here, second] = d_up.astype(dtype)
            d_error = d_gate_error * up * slope + d_up_error * value
            d_error_ref[here, first] = d_error.astype(dtype)
        for n, total in enumerate(sums):
            d_rates_ref[here, n] = total

    out = [((rows, 2 * hidden), dtype), ((rows, hidden), dtype), ((rows, 3), jnp.float32)]
    made = _call(glu_errors_backward, out, rows, 1, interpret, gate_up, error, rates, d_hidden,
                 d_errors)  # fmt: skip
    return tuple(y.reshape(shape) for y, shape in zip(made, shapes, strict=True))


errors.defvjp(_errors_forward, _errors_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def hidden(gate_up, interpret: bool = False):
    """silu(gate) up, [..., hidden], of [..., 2 hidden]; forward XLA is as fast."""
    gate, up = (x.astype(jnp.float32) for x in jnp.split(gate_up, 2, axis=-1))
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _hidden_forward(gate_up, interpret):
    return hidden(gate_up, interpret), gate_up


@functools.partial(jax.jit, static_argnums=0)
def _hidden_backward(interpret, gate_up, error):
    shape, hidden = gate_up.shape, error.shape[-1]
    gate_up, error = (x.reshape(-1, x.shape[-1]) for x in (gate_up, error))
    rows, dtype = len(error), gate_up.dtype
    width, steps = _columns(hidden)

    def glu_hidden_backward(gate_up_ref, error_ref, out_ref):
        here = pl.ds(pl.program_id(0) * ROWS, ROWS)
        column = pl.program_id(1) * width
        first, second = pl.ds(column, width), pl.ds(hidden + column, width)
        gate, up = _wide(gate_up_ref, here, first), _wide(gate_up_ref, here, second)
        error, sigmoid = _wide(error_ref, here, first), _sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        out_ref[here, first] = (error * up * slope).astype(dtype)
        out_ref[here, second] = (error * gate * sigmoid).astype(dtype)

    (made,) = _call(
        glu_hidden_backward, [((rows, 2 * hidden), dtype)], rows, steps, interpret, gate_up, error
    )
    return (made.reshape(shape),)


hidden.defvjp(_hidden_forward, _hidden_backward)
