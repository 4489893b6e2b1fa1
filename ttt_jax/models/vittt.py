"""ViTTT: a vision transformer whose attention is a step of test-time training, variants 0 to 6.

Source: ViTTT (Han et al. 2025, arXiv 2512.01643), sizes and initial values of its official code
(github.com/LeapLabTHU/ViTTT); *Test-Time Training with KV Binding Is Secretly Linear Attention*
for the variants.
"""

import dataclasses

from flax import nnx

from ttt_jax.inner_loop.presets import vittt_glu
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.vision_ttt import VisionTTT
from ttt_jax.models.decoder_config import check_choice
from ttt_jax.models.vision import VisionModel
from ttt_jax.models.vision_config import VisionConfig

MODES = ("auto", "recurrent", "parallel", "kernel")


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class ViTTTConfig(VisionConfig):
    """A ViTTT; the other fields are those of `VisionConfig`.

    Attributes:
      variant: 0 (as published) to 6 (linear attention) of the gated branch, see
        `presets.vittt_glu`; the convolutional branch stays as it is. Parameters that a variant
        does not use do not exist.
      direction: "descent", or "ascent" on the inner loss of the gated branch.
      query: read the gated branch with the "query" or with the "key".
      mode: "auto", "recurrent" or "parallel", as in `ttt_jax.ttt`, or "kernel": the gated branch by
        `ttt_kernels.glu_step`, for variant 0; "auto" does that where it is one kernel (Hopper).

    >>> preset("b", image_size=225).validate()
    Traceback (most recent call last):
    ...
    ValueError: image_size=225 must be a multiple of patch_size=16, for example 224
    """

    variant: int = 0
    direction: str = "descent"
    query: str = "query"
    mode: str = "auto"

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value, the rule that it breaks and the way out.
        """
        VisionConfig.validate(self)
        check_mode(self)
        self.inner_loop()

    def inner_loop(self) -> InnerLoop:
        """The inner loop of the gated branch of every block.

        Returns:
          `presets.vittt_glu` of the variant, with the options of this configuration.

        Raises:
          ValueError: for an unknown variant or option.
        """
        spec = vittt_glu(self.variant)
        return dataclasses.replace(spec, direction=self.direction, query=self.query)


def check_mode(config) -> None:
    """Raises ValueError unless `mode` is one of `MODES` that runs the configuration's inner loop.

    Args:
      config: a configuration with mode and variant, and perhaps direction.
    """
    check_choice(config, "mode", MODES)
    direction = getattr(config, "direction", "descent")
    if config.mode == "kernel" and (config.variant != 0 or direction != "descent"):
        raise ValueError(
            f"mode='kernel' with variant={config.variant} and {direction=}: the kernel is for "
            "variant 0, which descends; use mode='auto'"
        )


PRESETS = {
    "tiny": dict(
        num_classes=10, image_size=16, patch_size=2, hidden_size=64, num_layers=3, num_heads=4,
        initializer_range=0.08,  # 0.02 is for widths of hundreds
    ),
    "t": dict(hidden_size=192, num_heads=6),
    "s": dict(hidden_size=384, num_heads=6, drop_path_rate=0.1),
    "b": dict(drop_path_rate=0.4),
}  # fmt: skip


def preset(name: str, **overrides) -> ViTTTConfig:
    """A configuration by size.

    Args:
      name: "tiny", "t", "s" or "b".
      **overrides: fields to change.

    Returns:
      The configuration: 12 blocks, patches of 16², images of 224² and 1,000 classes but for
      "tiny".

    Raises:
      ValueError: if the name is unknown.

    >>> preset("t", variant=6).hidden_size
    192
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return ViTTTConfig(**{**PRESETS[name], **overrides})


class ViTTT(VisionModel):
    """The classifier.

    >>> model = nnx.eval_shape(lambda: ViTTT(preset("b"), nnx.Rngs(0)))
    >>> f"{model.num_params():,} parameters, {model.flops_per_image() / 2e9:.2f}G multiply-adds"
    '90,055,912 parameters, 17.92G multiply-adds'
    """

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs) -> VisionTTT:
        """The two inner loops of one block.

        Args:
          config: the model's configuration.
          rngs: random streams of that block.

        Returns:
          The layer.
        """
        return VisionTTT(
            config.hidden_size,
            config.num_heads,
            spec=config.inner_loop(),
            rotary=False,
            stddev=config.initializer_range,
            dtype=config.dtype,
            mode=config.mode,
            rngs=rngs,
        )
