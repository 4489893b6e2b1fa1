"""Bias and GELU on NVIDIA GPUs through Pallas' Triton backend, at the speed of the memory.

XLA's error function takes more time than reading and writing does. Here Φ and its density come
from one exponential, and the bias' gradient from the pass that makes the input's.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat

ROWS = 8  # of a step
MAX_COLUMNS = 512  # of a program
PROGRAMS = 396  # of the backward kernel, 3 a multiprocessor
_WARPS = 4
# 1 - erf(t) = (c1 k + ... + c5 k^5) exp(-t²), k = 1 / (1 + c0 t), to 1.5e-7 for t >= 0.
# Abramowitz & Stegun 1964, 7.1.26.
_STEP = 0.3275911
_TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def unsupported(x: jax.Array) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    rows, features = x.shape
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Triton kernel takes bfloat16"
    if rows % ROWS or rows * features >= 2**31:
        return f"{rows} rows; the Triton kernel takes multiples of {ROWS}, below 2^31 numbers"
    if features % 128:
        return f"{features} features; the Triton kernel takes multiples of 128"
    return None


def bias_gelu(x, bias, interpret: bool = False) -> jax.Array:
    """`ttt_kernels.bias_gelu` by the kernels, for arguments without `unsupported`.

    Args:
      x, bias: as there; the sum is not rounded.
      interpret: runs in Pallas' interpreter, on any device.

    Returns:
      Like x.
    """
    return _core(x, bias, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _core(x, bias, interpret):
    return forward(x, bias, interpret)


def _core_forward(x, bias, interpret):
    return forward(x, bias, interpret), (x, bias)


def _core_backward(interpret, residuals, error):
    return backward(*residuals, error, interpret)


_core.defvjp(_core_forward, _core_backward)


# Jitted by themselves, so that a model of many layers lowers and compiles them once.
@functools.partial(jax.jit, static_argnames="interpret")
def forward(x, bias, interpret: bool) -> jax.Array:
    """z Φ(z) of z = x + bias; x [rows, features] bfloat16, bias [features]; like x."""
    rows, features = x.shape
    width = _width(features)

    def bias_gelu_forward(x_ref, bias_ref, out_ref):
        block = pl.ds(pl.program_id(0) * ROWS, ROWS)
        columns = pl.ds(pl.program_id(1) * width, width)
        z = x_ref[block, columns].astype(jnp.float32) + bias_ref[columns]
        out_ref[block, columns] = (z * _normal(z)[0]).astype(x.dtype)

    return compat.triton_kernel(
        bias_gelu_forward,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // ROWS, features // width),
        num_warps=_WARPS,
        interpret=interpret,
    )(x, bias.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="interpret")
def backward(x, bias, error, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Gradients of `forward` with respect to x and bias; `error`, like x, is that of the result."""
    rows, features = x.shape
    width, blocks = _width(features), rows // ROWS
    programs = max(1, min(PROGRAMS * width // features, blocks))

    def bias_gelu_backward(x_ref, bias_ref, error_ref, dx_ref, sums_ref):
        program = pl.program_id(0)
        columns = pl.ds(pl.program_id(1) * width, width)
        bias = bias_ref[columns]
        low, high = program * blocks // programs, (program + 1) * blocks // programs

        def load(index):
            here = pl.ds(index * ROWS, ROWS), columns
            return x_ref[here], error_ref[here]

        def block(index, carry):
            total, (x, error) = carry
            ahead = load(jnp.minimum(index + 1, high - 1))  # arrives while this is computed
            z = x.astype(jnp.float32) + bias
            normal, exponential = _normal(z)
            slope = normal + z * exponential * (2 * jnp.pi) ** -0.5
            dz = error.astype(jnp.float32) * slope
            dx_ref[pl.ds(index * ROWS, ROWS), columns] = dz.astype(x.dtype)
            return total + dz, ahead

        start = jnp.zeros((ROWS, width), jnp.float32), load(low)
        total, _ = lax.fori_loop(low, high, block, start)
        sums_ref[program, columns] = jnp.sum(total, axis=0)

    dx, sums = compat.triton_kernel(
        bias_gelu_backward,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, features), jnp.float32),
        ],
        grid=(programs, features // width),
        num_warps=_WARPS,
        interpret=interpret,
    )(x, bias.astype(jnp.float32), error)
    return dx, jnp.sum(sums, axis=0).astype(bias.dtype)


def _width(features: int) -> int:
    """Columns of a program: a power of two, which Triton asks for."""
    return min(features & -features, MAX_COLUMNS)


def _normal(z):
    """(Φ(z), exp(−z²/2)) in float32."""
    exponential = jnp.exp2(z * z * (-0.5 * math.log2(math.e)))
    root = lax.rsqrt(1 + (_STEP * 2**-0.5) * jnp.abs(z))
    k = root * root  # two instructions; a division is more
    tail = functools.reduce(lambda sum_, c: sum_ * k + c / 2, _TAIL[1:], _TAIL[0] / 2)
    tail = tail * k * exponential
    return jnp.where(z < 0, tail, 1 - tail), exponential
