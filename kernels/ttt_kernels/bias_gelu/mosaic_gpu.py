"""Bias and GELU on Hopper GPUs through Pallas' Mosaic GPU backend, at the speed of the memory.

XLA's error function takes more time than reading and writing does. Here Φ and its density come
from one exponential, and the bias' gradient from the pass that makes the input's.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.rows import Rows, store, wide

MAX_COLUMNS = 256  # of a thread block
ROWS = 8  # of a step, where they divide the array's
# Of the backward pass: as many as a Hopper GPU holds at once, of 96 registers a lane.
THREAD_BLOCKS = 5 * 132
# log2 Φ(−t) for t >= 0 as a polynomial, highest power first; Φ is then off by at most 3e-7. A least
# squares fit on [0, 6] whose weights, at first Φ(−t), are raised where Φ is off most.
_TAIL = (-0.00051885916, 0.00738720403, -0.0525380233, -0.459276679, -1.15108315, -1.00000084)


def unsupported(x: jax.Array) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    rows, features = x.shape
    if x.dtype != jnp.bfloat16:
        return f"the input is {x.dtype}; the Mosaic GPU kernel takes bfloat16"
    if rows % 4 or rows * features >= 2**31:
        return f"{rows} rows; the Mosaic GPU kernel takes multiples of 4, below 2^31 numbers"
    if features % 128:
        return f"{features} features; the Mosaic GPU kernel takes multiples of 128"
    return compat.layout_problem()


def bias_gelu(x, bias, interpret: bool = False) -> jax.Array:
    """`ttt_kernels.bias_gelu` by the kernels, for arguments without `unsupported`.

    Args:
      x, bias: as there; the sum is not rounded.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).

    Returns:
      Like x.
    """
    return _core(x, bias, compat.gpu_interpret_params() if interpret else None)


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
def forward(x, bias, interpret) -> jax.Array:
    """z Φ(z) of z = x + bias; x [rows, features] bfloat16, bias [features]; like x."""
    pieces = _pieces(x)

    def bias_gelu_forward(x_ref, bias_ref, out_ref):
        columns, bias = pieces.here(), pieces.load_vector(bias_ref)

        def step(rows, arrays, carry):
            z = arrays[0] + wide(bias, arrays[0])
            store(out_ref.at[rows, columns], jnp.maximum(z, 0.0) - jnp.abs(z) * _tail(z))
            return carry

        pieces.walk([x_ref], step)

    call = compat.gpu_kernel(
        bias_gelu_forward,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        **pieces.launch(interpret),
    )
    return call(x, bias.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="interpret")
def backward(x, bias, error, interpret) -> tuple[jax.Array, jax.Array]:
    """Gradients of `forward` with respect to x and bias; `error`, like x, is that of the result."""
    pieces = _pieces(x, THREAD_BLOCKS)

    def bias_gelu_backward(x_ref, bias_ref, error_ref, dx_ref, sums_ref, scratch):
        columns, bias = pieces.here(), pieces.load_vector(bias_ref)

        def step(rows, arrays, total):
            x_step, error = arrays
            z = x_step + wide(bias, x_step)
            dz = error * (_normal(z) + z * _density(z))
            store(dx_ref.at[rows, columns], dz)
            return total + pieces.fold(dz)

        total = pieces.walk([x_ref, error_ref], step, pieces.zeros(4))
        pieces.store_sums(sums_ref, [total], scratch)

    dx, sums = compat.gpu_kernel(
        bias_gelu_backward,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((pieces.groups, 1, x.shape[1]), jnp.float32),
        ],
        scratch_types=pieces.scratch(),
        **pieces.launch(interpret),
    )(x, bias.astype(jnp.float32), error)
    return dx, jnp.sum(sums, axis=(0, 1)).astype(bias.dtype)


def _pieces(x, thread_blocks: int | None = None) -> Rows:
    """How x is dealt out: to so many thread blocks, or each step to one."""
    rows, features = x.shape
    columns, step, steps = math.gcd(features, MAX_COLUMNS), math.gcd(rows, ROWS), 1
    blocks = features // columns
    if thread_blocks is not None:
        steps = -(-rows * blocks // (step * thread_blocks))
    return Rows(rows, columns, step, blocks, steps)


def _tail(z):
    """Φ(−|z|) in float32: a polynomial and one exponential."""
    t = jnp.abs(z)
    return jnp.exp2(functools.reduce(lambda sum_, c: sum_ * t + c, _TAIL[1:], _TAIL[0]))


def _normal(z):
    """Φ(z)."""
    tail = _tail(z)
    return jnp.where(z < 0, tail, 1 - tail)


def _density(z):
    """Φ's derivative, exp(−z²/2) / sqrt(2π)."""
    return jnp.exp2(z * z * (-0.5 * math.log2(math.e)) - 0.5 * math.log2(2 * math.pi))
