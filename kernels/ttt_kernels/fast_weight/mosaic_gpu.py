"""The fast weight on Hopper GPUs through Pallas' Mosaic GPU backend.

One kernel makes the hidden activations from the tokens, one the errors of gate and up; one the
factors of all three gradients, one what comes back to them. Their arrays are token-major. Where the
layers are too wide for these (`not_whole`), the products are XLA's, and `mosaic_gpu_passes` makes
what lies between them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.chunk_products import mosaic_gpu as chunk_kernels
from ttt_kernels.chunk_products import vjp as chunk_vjp
from ttt_kernels.chunk_products.tiling import MAX_HEAD_DIM
from ttt_kernels.fast_weight import mosaic_gpu_hidden as kernels
from ttt_kernels.fast_weight import mosaic_gpu_passes as passes
from ttt_kernels.fast_weight import mosaic_gpu_plan as plans
from ttt_kernels.fast_weight import xla

_WIDTH = 64  # key_dim is padded to a multiple of it
_HIDDEN = 32  # hidden likewise
_TILE = 192  # rows and columns of a sum over tokens that one thread block makes
_PIECE = 128  # tokens that a sum is cut by
_MULTIPROCESSORS = 132


def unsupported(w0: jax.Array, x: jax.Array, value_dim: int) -> str | None:
    """Why no kernels here can run these arguments on any device, or None."""
    whole = not_whole(w0, x, value_dim)
    if whole is None or x.dtype != jnp.bfloat16:
        return whole
    between = passes.unsupported(math.prod(x.shape[:-1]), w0.shape[-1])
    return between and f"{whole}, and {between}"


def untimed(w0: jax.Array, x: jax.Array, value_dim: int) -> str | None:
    """Why the kernels that can run these arguments are taken by name alone, or None."""
    return not_whole(w0, x, value_dim) and passes.untimed(w0.shape[-1])


def not_whole(w0: jax.Array, x: jax.Array, value_dim: int = 1) -> str | None:
    """Why kernels of all of it cannot run these arguments on any device, or None."""
    if x.dtype != jnp.bfloat16:
        return f"the tokens are {x.dtype}; the Mosaic GPU kernels take bfloat16"
    key_dim = _up(x.shape[-1], _WIDTH)
    if plans.choose(1, 1, 1, key_dim, _HIDDEN, parts=4, results=1) is None:
        return f"key_dim={x.shape[-1]}: its slab of the matrices does not fit in shared memory"
    hidden = _up(w0.shape[-1], _HIDDEN)
    if 2 * hidden > MAX_HEAD_DIM:  # gate and up lie beside each other
        return f"a hidden width of {w0.shape[-1]} is above {MAX_HEAD_DIM // 2}"
    return chunk_kernels.unsupported(x.dtype, key_dim, value_dim)


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
    w0, w2 = (_pad(w, _WIDTH, _HIDDEN) for w in (w0, w2))
    if rates is not None:
        rates = _pad(jnp.swapaxes(rates.astype(jnp.float32), 1, 2), 1, plans.ROWS)
    params = compat.gpu_interpret_params() if interpret else None
    return _core(w0, w2, _pad_tokens(x), rates, params)[:, :length, :, :width]


def _pad(x: jax.Array, *multiples: int) -> jax.Array:
    """Zeros behind the last axes, up to multiples of the sizes."""
    behind = [-size % m for size, m in zip(x.shape[-len(multiples):], multiples, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(behind)) + [(0, n) for n in behind])


def _pad_tokens(x: jax.Array) -> jax.Array:
    """[batch, time, heads, key_dim] with time as the copy engine takes it: rows of 8, or fewer."""
    return _pad(x, 8 if x.shape[1] > 8 else 1, 1, _WIDTH)


def _pad_tiles(x: jax.Array) -> jax.Array:
    """[batch, time, heads, channels] by whole tiles of tokens, for what kernels read as such."""
    return _pad(x, plans.ROWS, 1, 1)


def _plan(w0: jax.Array, x: jax.Array, results: int, parts: int = 2) -> plans.Plan:
    return plans.choose(*x.shape, w0.shape[-1], parts=parts, results=results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _core(w0, w2, x, rates, interpret):
    """All sizes padded; rates [batch, heads, tiles * 64] float32, or None."""
    plan = _plan(w0, x, 1)
    return kernels.hidden(plan, x, plans.slabs((w0, w2), plan.slab), rates, interpret)


def _forward(w0, w2, x, rates, interpret):
    return _core(w0, w2, x, rates, interpret), (w0, w2, x, rates)


def _backward(interpret, residuals, d_hidden):
    w0, w2, x, rates = residuals
    plan = _plan(w0, x, 2)
    weights = plans.slabs((w0, w2), plan.slab)
    d_hidden = _pad_tiles(d_hidden.astype(x.dtype))
    errors, d_rates = kernels.errors(plan, x, weights, rates, d_hidden, interpret)
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
    """`f(q)`, head-major; see `ttt_kernels.fast_weight_apply`."""
    if not_whole(w0, q, w1.shape[-1]):
        params = compat.gpu_interpret_params() if interpret else None
        between = functools.partial(passes.hidden, interpret=params)
        return xla.apply(w0, w1, w2, q, hidden_of=between)
    w0, w1, w2, x = (_one_head_a_row(a, q.shape[0]) for a in (w0, w1, w2, q))
    value = hidden(w0, w2, jnp.swapaxes(x, 1, 2), None, interpret=interpret)
    out = _read(value, w1, chunk_kernels.Kernels(interpret=interpret))
    return out.reshape(*q.shape[:3], out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _read(value: jax.Array, w1: jax.Array, products: chunk_kernels.Kernels) -> jax.Array:
    """`value W1`, token-major."""
    return products.outputs(value, w1[:, :, None], value.shape[1], False)


def _read_forward(value, w1, products):
    return _read(value, w1, products), (value, w1)


def _read_backward(products, residuals, d_out):
    value, w1 = residuals
    d_value = products.outputs(d_out, w1[:, :, None], value.shape[1], True)
    return d_value, _outer(products, value, d_out).astype(w1.dtype)


_read.defvjp(_read_forward, _read_backward)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array,
    *, interpret: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The summed gradients, head-major; see `ttt_kernels.fast_weight_gradients`."""
    if not_whole(w0, k, w1.shape[-1]):
        params = compat.gpu_interpret_params() if interpret else None
        between = functools.partial(passes.errors, interpret=params)
        rates = rates.astype(jnp.float32)
        return xla.gradients(w0, w1, w2, k, error, rates, errors_of=between)
    batch, heads, _, key_dim = k.shape
    width = w0.shape[-1]
    arrays = (w0, w1, w2, k, error, rates)
    w0, w1, w2, k, error, rates = (_one_head_a_row(a, batch) for a in arrays)
    k, error = (jnp.swapaxes(x, 1, 2) for x in (k, error))
    if rates.shape[-1] == 1:
        value = hidden(w0, w2, k, jnp.swapaxes(rates[..., 0], 1, 2), interpret=interpret)
        made = (_outer(chunk_kernels.Kernels(interpret=interpret), value, error),)
    else:
        w0, w2 = (_pad(w, _WIDTH, _HIDDEN) for w in (w0, w2))
        k, error = _pad_tokens(k), _pad(error, 8 if k.shape[1] > 8 else 1, 1, 1)
        rates = _pad(jnp.moveaxis(rates.astype(jnp.float32), 3, 0), plans.ROWS)
        params = compat.gpu_interpret_params() if interpret else None
        d_w0, d_w1, d_w2 = _learn(w0, _pad(w1, _HIDDEN, 1), w2, k, error, rates, params)
        made = d_w0[..., :key_dim, :width], d_w1[..., :width, :], d_w2[..., :key_dim, :width]
    return tuple(g.reshape(batch, heads, *g.shape[-2:]) for g in made)


def _outer(products: chunk_kernels.Kernels, left: jax.Array, right: jax.Array) -> jax.Array:
    """`left^T right` over all tokens, [batch, heads, in, out] float32, by as many sums as fill the
    chip: one sum has few tiles.
    """
    batch, length, heads, _ = left.shape
    tiles = batch * heads * math.prod(-(-x.shape[3] // _TILE) for x in (left, right))
    pieces = max(1, min(length // _PIECE, _MULTIPROCESSORS // tiles))
    chunk = _up(-(-length // pieces), _PIECE)
    sums = chunk_vjp.summaries(left, right, chunk, jnp.dtype(jnp.float32), products)
    return sums[:, :, 0] if sums.shape[2] == 1 else jnp.sum(sums, 2)


def _one_head_a_row(x: jax.Array, batch: int) -> jax.Array:
    """[batch or 1, heads, a, b] to [batch * heads, 1, a, b]: head-major is then token-major."""
    return jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(-1, 1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _learn(w0, w1, w2, k, error, rates, interpret):
    """Gradients of all three matrices, token-major rows of one head, all sizes padded.

    rates [3, rows, 1, tiles * 64] float32.
    """
    products = chunk_kernels.Kernels(interpret=interpret is not None)
    d_hidden = _pad_tiles(products.outputs(error, w1[:, :, None], error.shape[1], True))
    plan = _plan(w0, k, 3)
    weights = plans.slabs((w0, w2), plan.slab)
    errors, value = kernels.learn(plan, k, weights, tuple(rates), d_hidden, interpret)
    d_w0, d_w2 = jnp.split(_outer(products, k, errors), 2, -1)
    return d_w0, _outer(products, value, error), d_w2


def _learn_forward(*arguments):
    return _learn(*arguments), arguments[:6]


def _learn_backward(interpret, residuals, cotangents):
    """From the arguments alone: nothing of the hidden width was kept."""
    w0, w1, w2, k, error, rates = residuals
    c0, c1, c2 = (c.astype(k.dtype) for c in cotangents)
    products = chunk_kernels.Kernels(interpret=interpret is not None)
    plan = _plan(w0, k, 6, parts=4)
    # Rows of W1 and C1 slab by slab side by side: one product makes what arrives from both.
    outer = [w.reshape(*w.shape[:2], plan.slabs, plan.slab, -1) for w in (w1, c1)]
    outer = jnp.concatenate(outer, -2).reshape(*w1.shape[:2], 1, 2 * plan.hidden, -1)
    above = _pad_tiles(products.outputs(error, outer, error.shape[1], True))
    weights = plans.slabs((w0, w2, c0, c2), plan.slab)
    errors, inner, value, d_d, *d_rates = kernels.learn_errors(
        plan, k, weights, tuple(rates), above, interpret
    )
    both, d_both = (jnp.concatenate(pair, -1) for pair in ((w0, w2), (c0, c2)))
    times = functools.partial(xla._product, wide=True)
    dk = times("rtnf,rnif->rtni", errors, d_both) + times("rtnf,rnif->rtni", inner, both)
    d_error = times("rtnf,rnfo->rtno", value, c1) + times("rtnf,rnfo->rtno", d_d, w1)
    d_w0, d_w2 = jnp.split(_outer(products, k, inner).astype(w0.dtype), 2, -1)
    d_w1 = _outer(products, d_d, error).astype(w1.dtype)
    d_rates = jnp.stack([jnp.sum(d, axis=2) for d in d_rates])
    return d_w0, d_w1, d_w2, dk.astype(k.dtype), d_error.astype(error.dtype), d_rates


_learn.defvjp(_learn_forward, _learn_backward)
