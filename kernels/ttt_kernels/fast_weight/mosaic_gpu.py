"""The fast weight on Hopper GPUs through Pallas' Mosaic GPU backend.

One kernel makes the hidden activations from the tokens, one the errors of gate and up; nothing else
of the hidden width is written. Arrays are token-major. The rules are in `unsupported`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.chunk_products import mosaic_gpu as chunk_kernels
from ttt_kernels.chunk_products import vjp as chunk_vjp
from ttt_kernels.fast_weight import mosaic_gpu_common as common
from ttt_kernels.fast_weight import mosaic_gpu_hidden as kernels
from ttt_kernels.fast_weight import xla

_WIDTH = 64  # key_dim is padded to a multiple of it
_HIDDEN = 32  # hidden likewise
_TILE = 192  # rows and columns of a sum over tokens that one thread block makes
_MULTIPROCESSORS = 132


def unsupported(w0: jax.Array, x: jax.Array, value_dim: int = 1) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if x.dtype != jnp.bfloat16:
        return f"the tokens are {x.dtype}; the Mosaic GPU kernels take bfloat16"
    key_dim = _up(x.shape[-1], _WIDTH)
    if common.choose(1, 1, 1, key_dim, _HIDDEN, tiles=common.LEARNING_TILES) is None:
        return f"key_dim={x.shape[-1]}: its slab of the matrices does not fit in shared memory"
    hidden = _up(w0.shape[-1], _HIDDEN)
    return chunk_kernels.unsupported(x.dtype, key_dim, 2 * hidden) or chunk_kernels.unsupported(
        x.dtype, hidden, value_dim
    )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def hidden(
    w0: jax.Array,
    w2: jax.Array,
    x: jax.Array,
    rates: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`rate (silu(x W0) * (x W2))` by one kernel; see `ttt_kernels.fast_weight_hidden`.

    Under a mesh, call it inside `jax.shard_map(..., check_vma=False)` over batch and heads.

    Args:
      w0, w2: [batch or 1, heads, key_dim, hidden] bf16.
      x: [batch, time, heads, key_dim] bf16.
      rates: [batch, time, heads], or None for 1.
      interpret: runs in JAX's GPU interpreter on a CPU, with race detection (jax >= 0.11).
    """
    length, width = x.shape[1], w0.shape[3]
    d_hidden = jnp.zeros((1, 1, 1, width), x.dtype)
    if rates is not None:
        rates = jnp.swapaxes(rates, 1, 2)[..., None]
    w0, w2, x, _, rates = _pad(w0, w2, x, d_hidden, rates)
    params = compat.gpu_interpret_params() if interpret else None
    rates = None if rates is None else rates[:, :, 0]
    return _core(w0, w2, x, rates, params)[:, :length, :, :width]


def _pad(w0, w2, x, d_hidden, rates):
    """Widths to multiples of 64 and 32, time to one of 8; rates turned to [b, h, R, time]."""
    length, key_dim, width = x.shape[1], x.shape[3], w0.shape[3]
    time = 0 if length < 8 else -length % 8
    deeper, wider = -key_dim % _WIDTH, -width % _HIDDEN
    x = jnp.pad(x, ((0, 0), (0, time), (0, 0), (0, deeper)))
    d_hidden = jnp.pad(d_hidden, ((0, 0), (0, time), (0, 0), (0, wider)))
    w0, w2 = (jnp.pad(w, ((0, 0), (0, 0), (0, deeper), (0, wider))) for w in (w0, w2))
    if rates is not None:
        behind = _up(length, common.BLOCK) - length
        rates = jnp.swapaxes(rates.astype(jnp.float32), 2, 3)
        rates = jnp.pad(rates, ((0, 0), (0, 0), (0, 0), (0, behind)))
    return w0, w2, x, d_hidden, rates


def _plan(w0, x, tiles: int) -> common.Plan:
    return common.choose(*x.shape, w0.shape[-1], tiles=tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _core(w0, w2, x, rates, interpret):
    """All sizes padded; rates [batch, heads, blocks * 128] float32, or None."""
    plan = _plan(w0, x, common.HIDDEN_TILES)
    return kernels.hidden(plan, x, common.slabs(w0, w2, plan.slab), rates, interpret)


def _forward(w0, w2, x, rates, interpret):
    return _core(w0, w2, x, rates, interpret), (w0, w2, x, rates)


def _backward(interpret, residuals, d_hidden):
    w0, w2, x, rates = residuals
    plan = _plan(w0, x, common.ERROR_TILES)
    weights = common.slabs(w0, w2, plan.slab)
    errors, d_rates = kernels.errors(
        plan, x, weights, rates, d_hidden.astype(x.dtype), interpret
    )
    products = chunk_kernels.Kernels(interpret=interpret is not None)
    both = jnp.concatenate([w0, w2], -1)[:, :, None]
    both = jnp.broadcast_to(both, (x.shape[0], *both.shape[1:]))
    dx = products.outputs(errors, both, x.shape[1], True)
    d_both = _outer(products, x, errors)
    if w0.shape[0] == 1:
        d_both = jnp.sum(d_both, 0, keepdims=True)
    d_w0, d_w2 = jnp.split(d_both.astype(w0.dtype), 2, -1)
    return d_w0, d_w2, dx, None if rates is None else jnp.sum(d_rates, axis=2)


_core.defvjp(_forward, _backward)


def apply(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`f(q)` by two kernels, head-major; see `ttt_kernels.fast_weight_apply`."""
    w0, w1, w2, x = (_one_head_a_row(a) for a in (w0, w1, w2, q))
    value = hidden(w0, w2, jnp.swapaxes(x, 1, 2), None, interpret=interpret)
    products = chunk_kernels.Kernels(interpret=interpret)
    out = chunk_vjp.outputs(value, w1[:, :, None], q.shape[2], False, products)
    return out.reshape(*q.shape[:3], out.shape[-1])


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array,
    *, interpret: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The summed gradients, head-major; see `ttt_kernels.fast_weight_gradients`."""
    batch, heads, length = k.shape[:3]
    w0, w1, w2, k, error, rates = (_one_head_a_row(a) for a in (w0, w1, w2, k, error, rates))
    k, error = (jnp.swapaxes(x, 1, 2) for x in (k, error))
    if rates.shape[-1] == 1:
        value = hidden(w0, w2, k, jnp.swapaxes(rates[..., 0], 1, 2), interpret=interpret)
        products = chunk_kernels.Kernels(interpret=interpret)
        made = (_outer(products, value, error),)
    else:
        made = _learn(w0, w1, w2, k, error, rates, interpret)
    return tuple(g.reshape(batch, heads, *g.shape[-2:]) for g in made)


def _outer(products: chunk_kernels.Kernels, left: jax.Array, right: jax.Array) -> jax.Array:
    """`left^T right` over all tokens, [batch, heads, in, out] float32, by as many sums as fill the
    chip: one sum has few tiles.
    """
    batch, length, heads, _ = left.shape
    tiles = batch * heads * math.prod(-(-x.shape[3] // _TILE) for x in (left, right))
    pieces = max(1, min(length // common.BLOCK, _MULTIPROCESSORS // tiles))
    chunk = _up(-(-length // pieces), common.BLOCK)
    sums = chunk_vjp.summaries(left, right, chunk, jnp.dtype(jnp.float32), products)
    return sums[:, :, 0] if sums.shape[2] == 1 else jnp.sum(sums, 2)


def _one_head_a_row(x: jax.Array) -> jax.Array:
    """[batch, heads, a, b] to [batch * heads, 1, a, b]: head-major is then token-major."""
    return x.reshape(-1, 1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _learn(w0, w1, w2, k, error, rates, interpret):
    """Gradients of all three matrices, token-major rows of one head; rates [rows, 1, time, 3]."""
    key_dim, value_dim, width, length = k.shape[3], error.shape[3], w0.shape[3], k.shape[1]
    products = chunk_kernels.Kernels(interpret=interpret)
    d_hidden = products.outputs(error, w1[:, :, None], length, True)
    w0, w2, k, d_hidden, rates = _pad(w0, w2, k, d_hidden, rates)
    plan = _plan(w0, k, common.LEARNING_TILES)
    params = compat.gpu_interpret_params() if interpret else None
    errors, value = kernels.learn(
        plan, k, common.slabs(w0, w2, plan.slab), tuple(jnp.moveaxis(rates, 2, 0)), d_hidden, params
    )
    inner = _outer(products, k, errors)
    outer = _outer(products, value[:, :length], error)
    d_w0, d_w2 = (d[..., :key_dim, :width] for d in jnp.split(inner, 2, -1))
    return d_w0, outer[..., :width, :value_dim], d_w2


def _learn_forward(*arguments):
    return _learn(*arguments), arguments[:6]


def _learn_backward(interpret, residuals, cotangents):
    """Through the XLA form, from the arguments: nothing of the hidden width was kept."""
    def plain(w0, w1, w2, k, error, rates):
        return xla.gradients(w0, w1, w2, jnp.swapaxes(k, 1, 2), jnp.swapaxes(error, 1, 2), rates)

    return jax.vjp(plain, *residuals)[1](tuple(cotangents))


_learn.defvjp(_learn_forward, _learn_backward)
