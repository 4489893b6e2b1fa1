"""ViTTT's two inner loops: one step on all tokens of an image, then applied to them."""

import dataclasses

from ttt_jax.inner_loop.fast_nets import GLU, DepthwiseConv3x3, FastNet, Linear
from ttt_jax.inner_loop.losses import DotProduct
from ttt_jax.inner_loop.presets.lact import check_variant
from ttt_jax.inner_loop.spec import InnerLoop

_SCALE = 9**-0.5  # of the official code, for both branches and whatever the head's width


def vittt_glu(variant: int = 0) -> InnerLoop:
    """ViTTT's gated branch: ``f(x) = (x W1) ⊙ silu(x W2)`` after one step on the whole image.

    ``L = −9^(−½) · mean_i ⟨f(k_i), v_i⟩`` and ``W ← W − g / (|g| + 1)``, the norm over the input
    axis. The rate is 1; ``lr``, ``momentum`` and ``forget`` are not used.

    Args:
      variant: a step of the paper's reduction. 0: as published. 1: ``W2`` is frozen, a linear
        attention with a fixed output gate. 2: the same, there is no weight norm to remove.
        3: no gate, ``f(x) = x W``. 4, 5: the same, there are no rates and no momentum. 6: no clip,
        ``q (W + 9^(−½)/n Σ kᵀ v)``.

    Raises:
      ValueError: ``variant`` is not 0 to 6.

    Source: ViTTT, ``vittt/models/ttt_block.py``; *Test-Time Training with KV Binding Is Secretly
    Linear Attention*, its table of ablations.

    Example:
      >>> vittt_glu().trained, vittt_glu(1).trained, vittt_glu(6).clip
      (('w1', 'w2'), ('w1',), False)
    """
    check_variant(variant)
    spec = _full_batch(GLU() if variant < 3 else Linear())
    update = "all" if variant == 0 else "last_layer"
    return dataclasses.replace(spec, update=update, clip=variant < 6)


def vittt_dwconv(height: int, width: int) -> InnerLoop:
    """ViTTT's convolutional branch: a 3×3 depthwise kernel after one step on the whole image.

    ``f(x)_p = Σ_j w_j x_{p+j}``; loss, rate and clip as in ``vittt_glu``, the norm over the 9 taps
    of a kernel. Channels are heads: tokens are ``[batch, height·width, channels, 1]``.

    Args:
      height: rows of the image, in tokens.
      width: its columns.

    Raises:
      ValueError: one of them is not a whole number from 1 on.

    Source: ViTTT, ``vittt/models/ttt_block.py``.

    Example:
      >>> import jax
      >>> vittt_dwconv(4, 4).init(jax.random.key(0), heads=8, key_dim=1)["w"].shape
      (8, 9, 1)
    """
    return _full_batch(DepthwiseConv3x3(height=height, width=width))


def _full_batch(net: FastNet) -> InnerLoop:
    return InnerLoop(
        fast_net=net,
        loss=DotProduct(scale=_SCALE, reduction="mean"),
        chunk_size=None,
        order="update_then_apply",
        clip=True,
    )
