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
from ttt_kernels.row_walk import Walk

COLUMNS = 256  # of a piece of a row, at most
# Rows of a step, at most; warpgroups; slots of each one's ring.
ERRORS = (8, 3, 6)
ERRORS_BACKWARD = (4, 3, 6)
HIDDEN = (8, 3, 8)
HIDDEN_BACKWARD = (8, 3, 6)
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
    walk = _walk(error, *ERRORS, inputs=3)

    def glu_errors_forward(gate_up_ref, error_ref, rates_ref, hidden_ref, errors_ref, *scratch):
        def step(row, each_piece):
            rows = pl.ds(row, walk.step)
            rate = [_load_rate(walk, rates_ref.at[rows, n]) for n in range(3)]

            def piece(columns, arrays, carry):
                gate, up, error = arrays
                sigmoid = _sigmoid(gate)
                value = gate * sigmoid
                _store(hidden_ref.at[rows, columns], value * up * rate[1])
                gate_error = error * up * _slope(value, sigmoid) * rate[0]
                _store(errors_ref.at[rows, 0, columns], gate_error)
                _store(errors_ref.at[rows, 1, columns], error * value * rate[2])
                return carry

            each_piece(piece, ())

        walk.run_pieces([*_apart(gate_up_ref), error_ref], scratch, step)

    hidden, errors = _call(
        glu_errors_forward, walk, interpret, (error, gate_up), gate_up, error, rates
    )
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
    walk = _walk(error, *ERRORS_BACKWARD, inputs=6)

    def glu_errors_backward(
        gate_up_ref, error_ref, rates_ref, d_hidden_ref, d_errors_ref,
        d_gate_up_ref, d_error_ref, d_rates_ref, *scratch,
    ):  # fmt: skip
        def step(row, each_piece):
            rows = pl.ds(row, walk.step)
            rate = [_load_rate(walk, rates_ref.at[rows, n]) for n in range(3)]

            def piece(columns, arrays, sums):
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
                _store(d_error_ref.at[rows, columns], d_gate_error * up_slope + d_up_error * value)
                through = d_gate_error * error
                d_gate = through * up * bend + d_value * up_slope + d_up_error * error * slope
                _store(d_gate_up_ref.at[rows, 0, columns], d_gate)
                _store(d_gate_up_ref.at[rows, 1, columns], through * slope + d_value * value)
                return tuple(a + b for a, b in zip(sums, terms, strict=True))

            zeros = jnp.zeros((walk.step, walk.columns), jnp.float32)
            zeros = compat.mosaic_gpu().layout_cast(zeros, walk.layout())
            for n, total in enumerate(each_piece(piece, (zeros,) * 3)):
                compat.store(d_rates_ref.at[rows, n], jnp.sum(total, axis=1))

        sources = [*_apart(gate_up_ref), error_ref, d_hidden_ref, *_apart(d_errors_ref)]
        walk.run_pieces(sources, scratch, step)

    made = _call(
        glu_errors_backward, walk, interpret, (gate_up, error, rates),
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
    walk = _walk(like, *HIDDEN, inputs=2)

    def glu_hidden_forward(gate_up_ref, hidden_ref, *scratch):
        def step(row, each_piece):
            rows = pl.ds(row, walk.step)

            def piece(columns, arrays, carry):
                gate, up = arrays
                _store(hidden_ref.at[rows, columns], gate * _sigmoid(gate) * up)
                return carry

            each_piece(piece, ())

        walk.run_pieces(_apart(gate_up_ref), scratch, step)

    (made,) = _call(glu_hidden_forward, walk, interpret, (like,), pairs)
    return made.reshape(*gate_up.shape[:-1], -1)


def _hidden_forward(gate_up, interpret):
    return _hidden(gate_up, interpret), gate_up


@functools.partial(jax.jit, static_argnums=0)
def _hidden_backward(interpret, gate_up, error):
    shape = gate_up.shape
    gate_up, error = _pairs(gate_up), _rows(error)
    walk = _walk(error, *HIDDEN_BACKWARD, inputs=3)

    def glu_hidden_backward(gate_up_ref, error_ref, out_ref, *scratch):
        def step(row, each_piece):
            rows = pl.ds(row, walk.step)

            def piece(columns, arrays, carry):
                gate, up, error = arrays
                sigmoid = _sigmoid(gate)
                value = gate * sigmoid
                _store(out_ref.at[rows, 0, columns], error * up * _slope(value, sigmoid))
                _store(out_ref.at[rows, 1, columns], error * value)
                return carry

            each_piece(piece, ())

        walk.run_pieces([*_apart(gate_up_ref), error_ref], scratch, step)

    (made,) = _call(glu_hidden_backward, walk, interpret, (gate_up,), gate_up, error)
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


def _walk(like, step: int, warpgroups: int, stages: int, inputs: int) -> Walk:
    rows, hidden = like.shape
    columns, step = math.gcd(hidden, COLUMNS), math.gcd(rows, step)
    pieces = hidden // columns
    return Walk(rows, columns, inputs, warpgroups, stages, step=step, pieces=pieces, turns=True)


def _call(body, walk: Walk, interpret, like, *operands):
    """The kernel's results, arrays like those given."""
    return compat.gpu_kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        scratch_types=walk.scratch(),
        **walk.launch(interpret),
    )(*operands)


def _load_rate(walk: Walk, ref):
    """A number a row, for every column."""
    rates = compat.mosaic_gpu().load(ref, layout=walk.layout().reduce(1), optimized=False)
    return lax.broadcast_in_dim(rates, (walk.step, walk.columns), (0,))


def _store(ref, value) -> None:
    compat.store(ref, value.astype(jnp.bfloat16))


def _sigmoid(x):
    """1 / (1 + exp(-x)); there is no instruction for the quotient."""
    root = lax.rsqrt(1 + jnp.exp2(x * -math.log2(math.e)))
    return root * root


def _slope(value, sigmoid):
    """silu'(x) = σ (1 + x (1 - σ)), where value = x σ."""
    return sigmoid + value * (1 - sigmoid)
