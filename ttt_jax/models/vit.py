"""The softmax vision transformer: the baseline of ViTTT, of the same size and from the same parts.

Source: ViT (Dosovitskiy et al. 2021, arXiv 2010.11929); as in ViTTT, positions come from a
depthwise convolution in every block and the tokens are averaged instead of read at a class token.
"""

import dataclasses

from flax import nnx

from ttt_jax.layers.attention import IMPLEMENTATIONS
from ttt_jax.layers.full_attention import FullAttention
from ttt_jax.models.decoder_config import check_choice
from ttt_jax.models.vision import VisionModel
from ttt_jax.models.vision_config import VisionConfig


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class ViTConfig(VisionConfig):
    """A softmax vision transformer; the other fields are those of `VisionConfig`.

    Attributes:
      attention_implementation: as in `layers.full_attention`.

    >>> ViTConfig(num_heads=5).validate()
    Traceback (most recent call last):
    ...
    ValueError: num_heads=5 must divide hidden_size=768: every head has the same size
    """

    attention_implementation: str = "auto"

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value and the rule that it breaks.
        """
        VisionConfig.validate(self)
        check_choice(self, "attention_implementation", IMPLEMENTATIONS)


# The sizes of the ViTTT presets, with the usual heads of 64 channels.
PRESETS = {
    "tiny": dict(
        num_classes=10, image_size=16, patch_size=2, hidden_size=64, num_layers=3, num_heads=4,
        initializer_range=0.08,  # 0.02 is for widths of hundreds
    ),
    "t": dict(hidden_size=192, num_heads=3),
    "s": dict(hidden_size=384, num_heads=6, drop_path_rate=0.1),
    "b": dict(drop_path_rate=0.4),
}  # fmt: skip


def preset(name: str, **overrides) -> ViTConfig:
    """A configuration by size.

    Args:
      name: "tiny", "t", "s" or "b".
      **overrides: fields to change.

    Returns:
      The configuration, of the width and depth of the ViTTT of that name.

    Raises:
      ValueError: if the name is unknown.

    >>> preset("s").num_heads
    6
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return ViTConfig(**{**PRESETS[name], **overrides})


class GridAttention(nnx.Module):
    """`FullAttention` over the tokens of an image.

    >>> import jax.numpy as jnp
    >>> GridAttention(ViTConfig(hidden_size=16, num_heads=2), nnx.Rngs(0))(
    ...     jnp.ones((2, 3, 4, 16))).shape
    (2, 3, 4, 16)
    """

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        """Makes the projections.

        Args:
          config: the model's configuration.
          rngs: random streams; "params" is used.
        """
        self.hidden_size = config.hidden_size
        self.attention = FullAttention(
            config.hidden_size,
            config.num_heads,
            qk_norm=False,
            bias=True,
            stddev=config.initializer_range,
            out_stddev=config.initializer_range,
            dtype=config.dtype,
            implementation=config.attention_implementation,
            rngs=rngs,
        )

    def __call__(self, x):
        """Mixes the tokens of each image.

        Args:
          x: [batch, height, width, hidden].

        Returns:
          Same shape, in the compute dtype.
        """
        batch, height, width, hidden = x.shape
        return self.attention(x.reshape(batch, height * width, hidden)).reshape(x.shape)

    def branch(self, x):
        """(the layer's result, no bias still to be added), as `GeluMLP.branch`."""
        return self(x), None

    def flops(self, height: int, width: int) -> float:
        """Matmul FLOPs of one image, forward.

        Args:
          height: rows of tokens.
          width: their columns.

        Returns:
          2 FLOPs a multiply-add of projections, scores and weighted sums.
        """
        tokens, hidden = height * width, self.hidden_size
        return 2 * tokens * (4 * hidden * hidden + 2 * hidden * tokens)


class ViT(VisionModel):
    """Softmax attention in every block.

    >>> model = nnx.eval_shape(lambda: ViT(preset("b"), nnx.Rngs(0)))
    >>> f"{model.num_params():,} parameters, {model.flops_per_image() / 2e9:.2f}G multiply-adds"
    '86,507,752 parameters, 17.47G multiply-adds'
    """

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs) -> GridAttention:
        """The attention of one block.

        Args:
          config: the model's configuration.
          rngs: random streams of that block.

        Returns:
          The layer.
        """
        return GridAttention(config, rngs)
