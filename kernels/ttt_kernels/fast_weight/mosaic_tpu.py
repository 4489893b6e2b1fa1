"""The fast weight on TPUs through Pallas' Mosaic backend: all of a head's layers in one kernel.

bfloat16 or float32 products, float32 sums. A head's matrices stay in VMEM while its tokens pass,
so that nothing of the hidden width is ever written to memory. The rules are in `unsupported`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ttt_kernels import compat
from ttt_kernels.fast_weight import mosaic_tpu_apply, mosaic_tpu_gradients
from ttt_kernels.fast_weight.mosaic_tpu_network import LANES, Sizes

# By the compiler's schedules 512 tokens take 7 % less than 256, and half the grid points.
_BLOCKS = (512, 256, LANES)


def unsupported(w0: jax.Array, w1: jax.Array, x: jax.Array) -> str | None:
    """Why these kernels cannot run these arguments on any device, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the tokens are {x.dtype}; the Mosaic TPU kernels take bfloat16 and float32"
    try:
        _sizes(w0, w1, x, None)
    except ValueError as error:
        return str(error)
    return None


def _sizes(w0: jax.Array, w1: jax.Array, x: jax.Array, block: int | None) -> Sizes:
    """Sizes and the block of a call; raises ValueError where nothing fits."""
    if block is not None and block % LANES:
        raise ValueError(f"block={block} must be a multiple of {LANES}")
    batch, heads, length, key_dim = x.shape
    wanted = [block] if block else [b for b in _BLOCKS if b < 2 * length] or [LANES]
    made = [
        Sizes(batch, heads, length, key_dim, w0.shape[-1], w1.shape[-1], b, x.dtype.itemsize)
        for b in wanted
    ]
    for sizes in made:
        if sizes.vmem_bytes(backward=True) <= compat.TPU_VMEM_BYTES:
            return sizes
    raise ValueError(
        f"block={made[-1].block} tokens of a {key_dim} x {w0.shape[-1]} x {w1.shape[-1]} network "
        f"need {made[-1].vmem_bytes(backward=True)} bytes of VMEM and there are "
        f"{compat.TPU_VMEM_BYTES}; make block smaller (at least {LANES}) or hidden_dim smaller"
    )


def apply(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, q: jax.Array, *, block: int | None = None,
    interpret=None,
) -> jax.Array:  # fmt: skip
    """`f(q)` by one kernel; see `ttt_kernels.fast_weight_apply`.

    Under a mesh, call it inside `jax.shard_map(..., check_vma=False)` over batch and heads.

    Args:
      w0, w1, w2: [batch, heads, in, out] in q's dtype.
      q: [batch, heads, time, key_dim].
      block: tokens of a grid point, a multiple of 128; None chooses.
      interpret: None compiles for a TPU; what `compat.tpu_interpret_params` returns runs in
        JAX's TPU interpreter on a CPU.

    Raises:
      ValueError: `block`, or the network, does not fit in VMEM.
    """
    return mosaic_tpu_apply.core(w0, w1, w2, q, _sizes(w0, w1, q, block), interpret)


def gradients(
    w0: jax.Array, w1: jax.Array, w2: jax.Array, k: jax.Array, error: jax.Array, rates: jax.Array,
    *, block: int | None = None, interpret=None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The summed gradients by one kernel; see `ttt_kernels.fast_weight_gradients`.

    Arguments as of `apply`; error [batch, heads, time, value_dim] in k's dtype, and rates
    [batch, heads, time, 3], or [.., 1] for w1 alone.
    """
    sizes = _sizes(w0, w1, k, block)
    tail = sizes.blocks * sizes.block - sizes.length
    rates = jnp.swapaxes(rates.astype(jnp.float32), 2, 3)
    rates = jnp.pad(rates, ((0, 0), (0, 0), (0, 0), (0, tail)))
    return mosaic_tpu_gradients.core(w0, w1, w2, k, error, rates, sizes, interpret)
