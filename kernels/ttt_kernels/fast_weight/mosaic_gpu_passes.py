"""Mosaic GPU kernels between XLA's products, for hidden layers too wide for kernels of the whole.

What LaCT's fast network makes of gate and up, elementwise, each way one pass at the speed of the
memory. Gate and up, their errors and their gradients lie beside each other in one array, as one
product makes or takes them; XLA would write two and copy them together.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.rows import Rows, store

COLUMNS = 256  # of a thread block, or of a piece of the rows that it goes through, at most
TIMED_WIDTH = 1024  # of the hidden layer


def unsupported(rows: int, hidden: int) -> str | None:
    """Why the kernels cannot run so many tokens of all heads, bfloat16, on any device, or None."""
    if hidden % 128:
        return "kernels between XLA's products take hidden widths that are multiples of 128"
    if rows % 4 or rows * 2 * hidden >= 2**31:
        limit = "multiples of 4 tokens, below 2^31 numbers"
        return f"kernels between XLA's products take {limit}, not {rows} tokens of all heads"
    return compat.layout_problem()


def untimed(hidden: int) -> str | None:
    """Why the kernels are taken by name alone, or None."""
    if hidden < TIMED_WIDTH:
        return f"a hidden width of {hidden}: below {TIMED_WIDTH} nothing has been timed"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def errors(gate_up, error, rates, interpret=None):
    """(hidden · rate 1, [errors of gate · rate 0, of up · rate 2]) in one pass.

    Args:
      gate_up: [..., 2 hidden] bfloat16.
      error: [..., hidden] bfloat16, of silu(gate) up.
      rates: [..., 3] float32.
      interpret: None, or what `compat.gpu_interpret_params` returns.

    Returns:
      ([..., hidden], [..., 2 hidden]) bfloat16.
    """
    return _errors(gate_up, error, rates, interpret)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames="interpret")
def _errors(gate_up, error, rates, interpret):
    shape = gate_up.shape
    gate_up, error, rates = _pairs(gate_up), _rows(error), _rows(rates)
    pieces = _pieces(error)

    def glu_errors_forward(gate_up_ref, error_ref, rates_ref, hidden_ref, errors_ref):
        columns = pieces.here()

        def step(rows, arrays, carry):
            gate, up, error = arrays
            rate = [pieces.load_numbers(rates_ref.at[rows, n]) for n in range(3)]
            sigmoid = _sigmoid(gate)
            value = gate * sigmoid
            store(hidden_ref.at[rows, columns], value * up * rate[1])
            gate_error = error * up * _slope(value, sigmoid) * rate[0]
            store(errors_ref.at[rows, 0, columns], gate_error)
            store(errors_ref.at[rows, 1, columns], error * value * rate[2])
            return carry

        pieces.walk([*_apart(gate_up_ref), error_ref], step)

    operands = gate_up, error, rates
    hidden, errors = _call(glu_errors_forward, pieces, interpret, (error, gate_up), *operands)
    return hidden.reshape(*shape[:-1], -1), errors.reshape(shape)


def _errors_forward(gate_up, error, rates, interpret):
    return _errors(gate_up, error, rates, interpret), (gate_up, error, rates)


@functools.partial(jax.jit, static_argnums=0)
def _errors_backward(interpret, kept, cotangents):
    shapes = [x.shape for x in kept]
    (gate_up, error, rates), (d_hidden, d_errors) = kept, cotangents
    gate_up, d_errors, error, d_hidden = (*map(_pairs, (gate_up, d_errors)),
                                          *map(_rows, (error, d_hidden)))  # fmt: skip
    rates = _rows(rates)
    hidden = error.shape[1]
    pieces = Rows(len(error), math.gcd(hidden, COLUMNS), ahead=True)

    def glu_errors_backward(
        gate_up_ref, error_ref, rates_ref, d_hidden_ref, d_errors_ref,
        d_gate_up_ref, d_error_ref, d_rates_ref,
    ):  # fmt: skip
        sources = [*_apart(gate_up_ref), error_ref, d_hidden_ref, *_apart(d_errors_ref)]

        def step(rows, _, carry):
            rate = [pieces.load_numbers(rates_ref.at[rows, n]) for n in range(3)]

            def place(i):
                return rows, pl.ds(i * pieces.columns, pieces.columns)

            def piece(place, arrays, sums):
                columns = place[1]
                gate, up, error, d_value, d_gate_error, d_up_error = arrays
                sigmoid = _sigmoid(gate)
                value = gate * sigmoid
                slope = _slope(value, sigmoid)
                # slope' = σ' (2 + gate (1 - 2 σ)), σ' = σ (1 - σ)
                bend = sigmoid * (1 - sigmoid) * (2 + gate * (1 - 2 * sigmoid))
                up_slope = up * slope
                terms = (d_gate_error * error * up_slope, d_value * value * up,
                         d_up_error * error * value)  # fmt: skip
                d_gate_error, d_value, d_up_error = (
                    d * r for d, r in zip((d_gate_error, d_value, d_up_error), rate, strict=True)
                )
                store(d_error_ref.at[rows, columns], d_gate_error * up_slope + d_up_error * value)
                through = d_gate_error * error
                d_gate = through * up * bend + d_value * up_slope + d_up_error * error * slope
                store(d_gate_up_ref.at[rows, 0, columns], d_gate)
                store(d_gate_up_ref.at[rows, 1, columns], through * slope + d_value * value)
                return tuple(a + b for a, b in zip(sums, terms, strict=True))

            count, zeros = hidden // pieces.columns, (pieces.zeros(),) * 3
            for n, total in enumerate(pieces.loop(count, place, sources, piece, zeros)):
                compat.store(d_rates_ref.at[rows, n], jnp.sum(total, axis=1))
            return carry

        pieces.walk([], step)

    made = _call(
        glu_errors_backward, pieces, interpret, (gate_up, error, rates),
        gate_up, error, rates, d_hidden, d_errors,
    )  # fmt: skip
    return tuple(y.reshape(shape) for y, shape in zip(made, shapes, strict=True))


errors.defvjp(_errors_forward, _errors_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def hidden(gate_up, interpret=None):
    """silu(gate) up, [..., hidden], of [..., 2 hidden]; as of `errors`."""
    return _hidden(gate_up, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _hidden(gate_up, interpret):
    pairs = _pairs(gate_up)
    like = jax.ShapeDtypeStruct(pairs.shape[::2], pairs.dtype)
    pieces = _pieces(like)

    def glu_hidden_forward(gate_up_ref, hidden_ref):
        def step(rows, arrays, carry):
            gate, up = arrays
            store(hidden_ref.at[rows, pieces.here()], gate * _sigmoid(gate) * up)
            return carry

        pieces.walk(_apart(gate_up_ref), step)

    (made,) = _call(glu_hidden_forward, pieces, interpret, (like,), pairs)
    return made.reshape(*gate_up.shape[:-1], -1)


def _hidden_forward(gate_up, interpret):
    return _hidden(gate_up, interpret), gate_up


@functools.partial(jax.jit, static_argnums=0)
def _hidden_backward(interpret, gate_up, error):
    shape = gate_up.shape
    gate_up, error = _pairs(gate_up), _rows(error)
    pieces = _pieces(error)

    def glu_hidden_backward(gate_up_ref, error_ref, out_ref):
        columns = pieces.here()

        def step(rows, arrays, carry):
            gate, up, error = arrays
            sigmoid = _sigmoid(gate)
            value = gate * sigmoid
            store(out_ref.at[rows, 0, columns], error * up * _slope(value, sigmoid))
            store(out_ref.at[rows, 1, columns], error * value)
            return carry

        pieces.walk([*_apart(gate_up_ref), error_ref], step)

    (made,) = _call(glu_hidden_backward, pieces, interpret, (gate_up,), gate_up, error)
    return (made.reshape(shape),)


hidden.defvjp(_hidden_forward, _hidden_backward)


def _rows(x):
    """[rows, columns]."""
    return x.reshape(-1, x.shape[-1])


def _pairs(x):
    """[rows, 2, hidden]: gate's and up's."""
    return x.reshape(-1, 2, x.shape[-1] // 2)


def _apart(pairs_ref):
    """Gate's and up's of pairs."""
    return [pairs_ref.at[:, n] for n in range(2)]


def _pieces(like) -> Rows:
    rows, hidden = like.shape
    columns = math.gcd(hidden, COLUMNS)
    return Rows(rows, columns, blocks=hidden // columns)


def _call(body, pieces: Rows, interpret, like, *operands):
    """The kernel's results, arrays like those given."""
    return compat.gpu_kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        **pieces.launch(interpret),
    )(*operands)


def _sigmoid(x):
    """1 / (1 + exp(-x)); there is no instruction for the quotient."""
    root = lax.rsqrt(1 + jnp.exp2(x * -math.log2(math.e)))
    return root * root


def _slope(value, sigmoid):
    """silu'(x) = σ (1 + x (1 - σ)), where value = x σ."""
    return sigmoid + value * (1 - sigmoid)
