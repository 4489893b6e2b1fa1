"""The steps of glu_step's kernels on tiles of tokens and on the two matrices.

Of a warpgroup's half of the columns, arrays are (what belongs to W1 | what belongs to W2), and of
the network f(x) = a ⊙ silu(z) they are (a | z) = x W.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ttt_kernels import compat
from ttt_kernels.glu_step.mosaic_gpu_common import load
from ttt_kernels.glu_step.mosaic_gpu_plan import HALF, TILE

_PIECE = 8  # columns that a warpgroup computes at a time


def accumulator():
    """[64, 64] float32 of a warpgroup."""
    return compat.mosaic_gpu().ACC((TILE, TILE), jnp.float32)


def product(*pairs):
    """Σ a b of pairs of tiles, float32 in registers; waits for all products before, too."""
    plgpu = compat.mosaic_gpu()

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, accumulator())


def turned(ref):
    """The transpose of a tile in shared memory."""
    return ref.transpose((1, 0))


def store(*pairs):
    """Rounds values to shared memory, (reference, value), for products and copies that follow."""
    for ref, value in pairs:
        ref[...] = value.astype(jnp.bfloat16)
    compat.mosaic_gpu().commit_smem()


def outputs(y):
    """a ⊙ silu(z)."""
    value, gate = _two(y)
    return value * _silu(gate)[0]


def errors(y, error):
    """Gradients of ⟨outputs, error⟩: (error ⊙ silu(z) | error ⊙ a ⊙ silu'(z))."""
    value, gate = _two(y)
    silu, slope, _ = _silu(gate)
    return _both(error * silu, error * (value * slope))


def errors_of_errors(y, error, e):
    """`errors`, and the gradients of ⟨errors, e⟩ with respect to y and to the error, rounded."""

    def piece(value, gate, error, e1, e2):
        silu, slope, curve = _silu(gate)
        through = value * slope
        dz = error * (e1 * slope + e2 * (value * (0.5 * curve)))
        derror = e1 * silu + e2 * through
        return error * silu, error * through, error * (e2 * slope), dz, derror

    arrays, pieces = (*_two(y), error, *_two(e)), []
    for first in range(0, HALF, _PIECE):
        columns = (x[:, first : first + _PIECE].astype(jnp.float32) for x in arrays)
        made = piece(*columns)
        pieces.append([x.astype(jnp.bfloat16) for x in made])
    r1, r2, da, dz, derror = (jnp.concatenate(x, axis=1) for x in zip(*pieces, strict=True))
    return _both(r1, r2), _both(da, dz), derror


def _silu(z):
    """(silu, its derivative, twice its second derivative).

    σ(z) = (tanh(z / 2) + 1) / 2: one instruction, to 5e-4, where 1 / (1 + exp(-z)) is ten.
    """
    h = 0.5 * z
    t = jnp.tanh(h)
    curve = 1 - t * t
    return h + h * t, 0.5 + 0.5 * t + 0.5 * h * curve, curve * (1 - h * t)


def gradient(group, then):
    """Σ kᵀ errors of keys and values, the gradient of ⟨f(k), v⟩; calls `then` after each tile."""
    plgpu, whole = compat.mosaic_gpu(), group

    def run(g):
        @pl.loop(0, whole.plan.tiles)
        def _(i):
            group = whole.anew()
            weights, spare = group.weights.at[group.side], group.products[0]
            bias = group.value_bias()
            group.wait(0, i)
            y = product((group.tile(i), weights))
            store((spare, errors(y, group.values(i, bias).astype(jnp.float32))))
            then(group, i)
            plgpu.wgmma(g, turned(group.tile(i)), spare)

        return g[...]

    return pl.run_scoped(run, accumulator())


def move(group, g, scale: float, clip: bool):
    """The weights after the step; `g` is the gradient of ⟨f(k), v⟩."""
    initial = load(group.initial)
    if not clip:
        return initial + scale * g
    spare = group.products[0]
    store((spare, g * g))
    factor, _ = _factor(_sum_of_rows(group, spare), scale)
    return initial + g * _columns(group, factor)


def move_backwards(group, error, g, spares, scale: float, clip: bool):
    """Gradient with respect to `g` of the weights after the step, given theirs."""
    if not clip:
        return scale * error
    store(*zip(spares, (g * g, g * error), strict=True))
    norm2, along = (_sum_of_rows(group, spare) for spare in spares)
    factor, inverse = _factor(norm2, scale)
    back = _columns(group, factor * factor * inverse * along)
    return error * _columns(group, factor) - g * back


def _sum_of_rows(group, tile):
    """[64], one number a column, by a product of the transpose with [64, 8] eighths.

    It is rounded as operands of products are: 2e-4 of a norm.
    """
    plgpu = compat.mosaic_gpu()

    def run(acc):
        plgpu.wgmma(acc, turned(tile), turned(group.eighths))
        return acc[...]

    acc = plgpu.ACC((TILE, 8), jnp.float32)
    return jnp.sum(pl.run_scoped(run, acc), axis=1)


def _factor(norm2, scale: float):
    """(scale / (scale |g| + 1), 1 / |g|) of |g|²."""
    inverse = lax.rsqrt(jnp.maximum(norm2, 1e-30))
    return scale / (scale * norm2 * inverse + 1), inverse


def _columns(group, x):
    """One number a column, over all rows; registers have rows' numbers elsewhere than columns'."""
    plgpu = compat.mosaic_gpu()
    group.vector[...] = x
    plgpu.commit_smem()
    row = compat.load(group.vector, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(row, (TILE, TILE), (1,))


def _two(y):
    return y[:, :HALF], y[:, HALF:]


def _both(a, b):
    return jnp.concatenate([a, b], axis=1)
