"""The configuration that the plain vision models share."""

import dataclasses

from ttt_jax.models.decoder_config import DTYPES, REMAT, check_choice, check_count, check_divides


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class VisionConfig:
    """Sizes and numerics of an image classifier whose blocks all have one width.

    Hashed by value, so that a model that keeps one can be an argument of a jitted function; a
    model keeps a copy, so that later changes here do not reach it.

    Attributes:
      num_classes: outputs of the head.
      image_size: rows and columns of an image, in pixels.
      patch_size: rows and columns of a patch, a token; divides the image.
      hidden_size: width.
      num_layers: blocks.
      num_heads: heads; divide the width.
      mlp_ratio: width of the feed-forward layer over the model's.
      drop_path_rate: stochastic depth of the last block, in [0, 1); grows linearly from 0 at the
        first.
      norm_epsilon: ε of the norms.
      initializer_range: standard deviation of the initial projections and fast weights.
      dtype: compute dtype; parameters are float32 whatever it is. "float64" needs
        `jax_enable_x64`.
      remat: what the backward pass recomputes of each block: "none", "full" (everything), or
        "dots" (everything but the weight products).
      scan_layers: stack the blocks and run them in a scan.
    """

    num_classes: int = 1000
    image_size: int = 224
    patch_size: int = 16
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    drop_path_rate: float = 0.0
    norm_epsilon: float = 1e-6
    initializer_range: float = 0.02
    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True

    def validate(self) -> None:
        """Checks every field, before any work starts.

        Raises:
          ValueError: naming the field, its value, the rule that it breaks and the way out.
        """
        for name in ("num_classes", "image_size", "patch_size", "hidden_size"):
            check_count(self, name)
        for name in ("num_layers", "num_heads"):
            check_count(self, name)
        check_divides(self, "num_heads")
        check_image(self, self.patch_size, f"patch_size={self.patch_size}")
        check_numbers(self)

    def grid(self) -> int:
        """Rows (and columns) of tokens.

        >>> VisionConfig().grid()
        14
        """
        return self.image_size // self.patch_size


def check_image(config, multiple: int, reason: str) -> None:
    """Raises ValueError unless `image_size` is a multiple of `multiple`.

    Args:
      config: a configuration with `image_size`.
      multiple: pixels.
      reason: what asks for the multiple.
    """
    if config.image_size % multiple:
        below = max(config.image_size // multiple, 1) * multiple
        raise ValueError(
            f"image_size={config.image_size} must be a multiple of {reason}, for example {below}"
        )


def check_numbers(config) -> None:
    """Raises ValueError unless the fields that all vision models have are in their ranges.

    Args:
      config: a configuration with mlp_ratio, drop_path_rate, dtype, remat and so on.
    """
    for name in ("mlp_ratio", "norm_epsilon", "initializer_range"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name}={getattr(config, name)!r} must be positive")
    if not 0 <= config.drop_path_rate < 1:
        raise ValueError(f"drop_path_rate={config.drop_path_rate!r} must lie in [0, 1)")
    check_choice(config, "dtype", DTYPES)
    check_choice(config, "remat", REMAT)
