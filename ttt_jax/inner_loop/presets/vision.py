"""ViTTT's two inner loops: one step on all tokens of an image, then applied to them."""

from ttt_jax.inner_loop.fast_nets import GLU, DepthwiseConv3x3, FastNet
from ttt_jax.inner_loop.losses import DotProduct
from ttt_jax.inner_loop.spec import InnerLoop

_SCALE = 9**-0.5  # of the official code, for both branches and whatever the head's width


def vittt_glu() -> InnerLoop:
    """ViTTT's gated branch: ``f(x) = (x W1) ⊙ silu(x W2)`` after one step on the whole image.

    ``L = −9^(−½) · mean_i ⟨f(k_i), v_i⟩`` and ``W ← W − g / (|g| + 1)``, the norm over the input
    axis. The rate is 1; ``lr``, ``momentum`` and ``forget`` are not used. The paper's variant 1 is
    ``dataclasses.replace(spec, update="last_layer")``, which freezes ``W2``: a linear attention
    with a fixed output gate.

    Source: ViTTT, ``vittt/models/ttt_block.py``.

    Example:
      >>> vittt_glu().trained
      ('w1', 'w2')
    """
    return _full_batch(GLU())


def vittt_dwconv(height: int, width: int) -> InnerLoop:
    """ViTTT's convolutional branch: a 3×3 depthwise kernel after one step on the whole image.

    ``f(x)_p = Σ_j w_j x_{p+j}``; loss, rate and clip as in ``vittt_glu``, the norm over the 9 taps
    of a kernel. Channels are heads: tokens are ``[batch, height·width, channels, 1]``.

    Args:
      height: rows of the image, in tokens.
      width: its columns.

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
