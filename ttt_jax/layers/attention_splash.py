"""Causal attention on TPUs by JAX's splash attention, which skips the blocks outside the window.

`jax.experimental.pallas.ops.tpu.splash_attention` has the kernels; here are the mask, the padding
to whole blocks, documents, and the cut over devices, which a Pallas kernel needs by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.sharding import on_each_device
from ttt_kernels import compat

_BLOCK = 512  # queries and keys of a block; shorter sequences take one block
_LANES = 128  # the kernel wants blocks of a multiple of this


def obstacle(q, previous) -> Exception | None:
    """Why splash attention cannot run a call, as the error to raise where it was asked for by name.

    Args:
      q: [batch, time, heads, head_dim].
      previous: as in `causal_attention`.

    Returns:
      A ValueError or NotImplementedError that is not raised, or None.

    >>> print(obstacle(jnp.ones((1, 2, 1, 8)), None))
    implementation='splash' needs a TPU, this program is for 'cpu'; 'auto' and 'xla' run here
    """
    if previous is not None:
        return ValueError("implementation='splash' has no cache: decode with 'auto' or 'xla'")
    platform = compat.target_platform()
    if platform != "tpu":
        return NotImplementedError(
            f"implementation='splash' needs a TPU, this program is for {platform!r};"
            " 'auto' and 'xla' run here"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return NotImplementedError(
            f"implementation='splash' needs bfloat16 or float32, not {q.dtype};"
            " 'auto' and 'xla' run this"
        )
    return None


def attention(q, k, v, window, documents, *, interpret=False):
    """As `causal_attention`, for a call without `obstacle`.

    Under a mesh every device computes its own rows and heads, and nothing is communicated. The
    backward pass is the unfused one: the fused one writes a dq for each block of keys.

    Args:
      q: [batch, time, heads, head_dim], bfloat16 or float32.
      k: likewise.
      v: likewise.
      window: tokens that a query sees, or None.
      documents: [batch, time], int32, or None.
      interpret: run in Pallas' interpreter, on any device, for tests.

    Returns:
      Like q.

    >>> x = jnp.ones((1, 6, 2, 8))
    >>> attention(x, x, x, 4, None, interpret=True).shape
    (1, 6, 2, 8)
    """
    time, wide = q.shape[1], at_least_float32(q.dtype)
    block = min(_BLOCK, -(-time // _LANES) * _LANES)
    length = -(-time // block) * block
    kernel = _kernel(length, window, block, interpret)

    def padded_attention(q, k, v, *documents):
        # Padding comes after every real token, so that causality hides it.
        q, k, v = (jnp.pad(x, ((0, 0), (0, length - time), (0, 0), (0, 0))) for x in (q, k, v))
        q, k, v = (x.transpose(0, 2, 1, 3)[:, :, None] for x in (q, k, v))
        q = (q.astype(wide) * q.shape[-1] ** -0.5).astype(k.dtype)  # the kernel does not scale
        segments = None
        if documents:
            ids = jnp.pad(documents[0], ((0, 0), (0, length - time)), constant_values=-1)
            segments = splash.SegmentIds(ids, ids)
        # One head a call: its mask is that of all heads, and is built once.
        heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        out = jax.vmap(heads)(q, k, v, segments)
        return out[:, :, 0, :time].transpose(0, 2, 1, 3)

    names = ("batch", None, "heads", None)
    arguments = [(x, names) for x in (q, k, v)]
    if documents is not None:
        arguments.append((documents, ("batch", None)))
    return on_each_device(padded_attention, *zip(*arguments, strict=True), names)


class _WindowMask(masks.LocalMask):
    """The mask of `causal_attention` over length² pairs, in blocks.

    Blocks that lie inside or outside of the window are recognised without looking at their pairs:
    at 32,768 tokens that takes a fifth of the time.
    """

    def __init__(self, length: int, window: int):
        super().__init__((length, length), (window - 1, 0), 0)

    def __getitem__(self, block):
        queries, keys = block
        nearest, farthest = queries.start - keys.stop + 1, queries.stop - 1 - keys.start
        left = self.window_size[0]
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        if farthest < 0 or nearest > left:
            return np.broadcast_to(False, shape)
        if nearest >= 0 and farthest <= left:
            return np.broadcast_to(True, shape)
        return super().__getitem__(block)


@functools.lru_cache(maxsize=32)
def _kernel(length: int, window: int | None, block: int, interpret: bool):
    """The kernel for one head, with its block masks as NumPy arrays: constants of any program.

    `splash.make_splash_mha` would put them on the ambient mesh, whose devices need not be there.
    """
    mask = masks.MultiHeadMask([_WindowMask(length, length if window is None else window)])
    by_query, mask_function = mask_info.process_mask(mask, (block, block))
    by_key, _ = mask_info.process_mask_dkv(mask, (block, block))
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.SplashAttentionKernel(
        by_query,
        by_query,
        by_key,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=mask_function,
        interpret=interpret,
    )
