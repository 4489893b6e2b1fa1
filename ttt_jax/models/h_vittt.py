"""H-ViTTT: ViTTT in stages of falling resolution and growing width.

Source: ViTTT (Han et al. 2025, arXiv 2512.01643), `vittt/models/h_vittt.py` of its official code
(github.com/LeapLabTHU/ViTTT).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttt_jax.inner_loop.presets import vittt_glu
from ttt_jax.layers.batch_norm import BatchNorm
from ttt_jax.layers.conv_mlp import ConvMLP
from ttt_jax.layers.convolution import Conv, DepthwiseConv
from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.layers.vision_ttt import VisionTTT
from ttt_jax.models.decoder_config import check_count
from ttt_jax.models.vision import classifier, count_params
from ttt_jax.models.vision_blocks import BlockStack, VisionBlock
from ttt_jax.models.vision_config import check_image, check_numbers
from ttt_jax.models.vittt import check_mode
from ttt_jax.sharding import constrain

_PATCH = 4  # pixels a token of the first stage


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class HViTTTConfig:
    """A hierarchical ViTTT; the fields that are not listed are those of `VisionConfig`.

    Attributes:
      widths: of the stages; each a multiple of 4 (rotary positions) and of its heads.
      depths: blocks of the stages.
      heads: heads of the stages.
      norm_epsilon: ε of the layer norms; the batch norms have 1e-5.
      variant, mode: as in `ViTTTConfig`.

    >>> HViTTTConfig(image_size=100).validate()
    Traceback (most recent call last):
    ...
    ValueError: image_size=100 must be a multiple of 4·2³ for 4 stages, for example 96
    """

    num_classes: int = 1000
    image_size: int = 224
    widths: tuple[int, ...] = (64, 128, 320, 512)
    depths: tuple[int, ...] = (1, 3, 9, 4)
    heads: tuple[int, ...] = (2, 4, 10, 16)
    mlp_ratio: float = 4.0
    drop_path_rate: float = 0.2
    norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    variant: int = 0
    mode: str = "auto"
    dtype: str = "float32"
    remat: str = "none"
    scan_layers: bool = True

    def validate(self) -> None:
        """Checks every field, before any work starts.

        Raises:
          ValueError: naming the field, its value, the rule that it breaks and the way out.
        """
        for name in ("num_classes", "image_size"):
            check_count(self, name)
        stages = len(self.widths)
        if not stages or not stages == len(self.depths) == len(self.heads):
            raise ValueError(
                f"widths={self.widths}, depths={self.depths}, heads={self.heads} must have one"
                " entry for each stage"
            )
        for width, depth, heads in zip(self.widths, self.depths, self.heads, strict=True):
            if min(width, depth, heads) < 1 or width % heads or width % 4:
                raise ValueError(
                    f"a stage of width {width}, depth {depth} and {heads} heads: all must be at"
                    " least 1, and the width a multiple of 4 and of the heads"
                )
        reason = f"{_PATCH}·2{'⁰¹²³⁴⁵⁶⁷⁸⁹'[stages - 1]} for {stages} stages"
        check_image(self, _PATCH * 2 ** (stages - 1), reason)
        check_numbers(self)
        check_mode(self)
        vittt_glu(self.variant)


PRESETS = {
    "tiny": dict(
        num_classes=10, image_size=16, widths=(32, 64), depths=(1, 1), heads=(2, 4),
        drop_path_rate=0.0,
    ),
    "t": dict(),
    "s": dict(depths=(2, 6, 18, 8), drop_path_rate=0.4),
    "b": dict(
        widths=(96, 192, 448, 640), depths=(2, 6, 18, 8), heads=(3, 6, 14, 20), drop_path_rate=0.6
    ),
}  # fmt: skip


def preset(name: str, **overrides) -> HViTTTConfig:
    """A configuration by size.

    Args:
      name: "tiny", "t", "s" or "b".
      **overrides: fields to change.

    Returns:
      The configuration: four stages, images of 224² and 1,000 classes but for "tiny".

    Raises:
      ValueError: if the name is unknown.

    >>> preset("s").depths
    (2, 6, 18, 8)
    """
    if name not in PRESETS:
        raise ValueError(f"{name=} must be one of {tuple(PRESETS)}")
    return HViTTTConfig(**{**PRESETS[name], **overrides})


class Stem(nnx.Module):
    """Five convolutions, each with a batch norm and all but the last with a ReLU: 1/4 the size."""

    def __init__(self, width: int, *, dtype: str, rngs: nnx.Rngs):
        """Makes the layers.

        Args:
          width: of the output; even.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        half, wide = width // 2, width * 4
        # (in, out, size, stride)
        sizes = ((3, half, 3, 2), (half, half, 3, 1), (half, half, 3, 1), (half, wide, 3, 2))
        sizes += ((wide, width, 1, 1),)
        options = dict(bias=False, dtype=dtype, rngs=rngs)
        self.convs = nnx.List([Conv(a, b, size=k, stride=s, **options) for a, b, k, s in sizes])
        self.norms = nnx.List([BatchNorm(b) for _, b, _, _ in sizes])

    def __call__(self, images, *, train: bool):
        """Applies the layers.

        Args:
          images: [batch, height, width, 3].
          train: as in `BatchNorm`.

        Returns:
          [batch, height / 4, width / 4, features].
        """
        x = images
        last = len(self.convs) - 1
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x), train=train)
            x = x if index == last else jax.nn.relu(x)
        return x


class Downsample(nnx.Module):
    """Half the rows and columns: a wide 1×1, a depthwise 3×3 of stride 2, a narrow 1×1, a norm."""

    def __init__(self, width: int, out_width: int, *, dtype: str, rngs: nnx.Rngs):
        """Makes the layers.

        Args:
          width: of the input.
          out_width: of the output; four times as many channels lie between.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        wide = 4 * out_width
        options = dict(size=1, bias=True, dtype=dtype, rngs=rngs)
        self.up = Conv(width, wide, **options)
        self.conv = DepthwiseConv(wide, dtype=dtype, rngs=rngs, stride=2)
        self.down = Conv(wide, out_width, **options)
        self.norm = BatchNorm(out_width)

    def __call__(self, x, *, train: bool):
        """Applies the layers.

        Args:
          x: [batch, height, width, channels].
          train: as in `BatchNorm`.

        Returns:
          [batch, height / 2, width / 2, out_width].
        """
        x = jax.nn.relu(self.conv(jax.nn.relu(self.up(x))))
        return self.norm(self.down(x), train=train)


class HViTTT(nnx.Module):
    """The hierarchical classifier; in training its batch norms record running statistics.

    >>> model = nnx.eval_shape(lambda: HViTTT(preset("t"), nnx.Rngs(0)))
    >>> f"{model.num_params():,} parameters, {model.flops_per_image() / 2e9:.2f}G multiply-adds"
    '28,703,560 parameters, 4.84G multiply-adds'
    """

    def __init__(self, config: HViTTTConfig, rngs: nnx.Rngs):
        """Makes the model.

        Args:
          config: the configuration.
          rngs: random streams; "params" is used.

        Raises:
          ValueError: from `config.validate()`.
        """
        config.validate()
        self.config = dataclasses.replace(config)
        dtype, widths = config.dtype, config.widths
        self.stem = Stem(widths[0], dtype=dtype, rngs=rngs)
        self.stages = nnx.List(
            [
                BlockStack(
                    lambda rngs, stage=stage: _make_block(config, stage, rngs),
                    config.depths[stage],
                    scan=config.scan_layers,
                    remat=config.remat,
                    rngs=rngs,
                )
                for stage in range(len(widths))
            ]
        )
        pairs = zip(widths, widths[1:], strict=False)
        self.downsamples = nnx.List([Downsample(*pair, dtype=dtype, rngs=rngs) for pair in pairs])
        self.norm = BatchNorm(widths[-1])
        self.head = classifier(config, widths[-1], rngs)

    def features(self, images, *, key=None):
        """The pooled features of images.

        Args:
          images: [batch, height, width, 3], normalised, any float dtype.
          key: random key of a training step: stochastic depth and the batch's own statistics;
            None in evaluation: running statistics.

        Returns:
          [batch, width of the last stage], float32 (float64 for float64).

        Raises:
          ValueError: if the sides are no multiples of 4·2^(stages − 1).
        """
        config, train = self.config, key is not None
        multiple = _PATCH * 2 ** (len(config.depths) - 1)
        if images.ndim != 4 or images.shape[1] % multiple or images.shape[2] % multiple:
            raise ValueError(
                f"images has shape {images.shape}; it must be [batch, height, width, 3] with sides"
                f" that are multiples of {multiple}: resize the images"
            )
        rates = np.linspace(0.0, config.drop_path_rate, sum(config.depths))
        rates = np.split(rates, np.cumsum(config.depths)[:-1])
        keys = jax.random.split(key, len(rates)) if train else [None] * len(rates)
        x = self.stem(images, train=train)
        for index, (stage, stage_rates) in enumerate(zip(self.stages, rates, strict=True)):
            x = stage(x, stage_rates, keys[index])
            if index < len(self.downsamples):
                x = self.downsamples[index](x, train=train)
        x = self.norm(x, train=train)
        x = jnp.mean(x, axis=(1, 2), dtype=at_least_float32(config.dtype))
        return constrain(x, ("images", None))

    def __call__(self, images, *, key=None):
        """Scores of the classes; arguments as in `features`.

        Args:
          images: [batch, height, width, 3].
          key: random key of a training step, or None.

        Returns:
          [batch, num_classes], float32 (float64 for float64).
        """
        dtype = at_least_float32(self.config.dtype)
        return self.head(self.features(images, key=key), out_dtype=dtype)

    def num_params(self) -> int:
        """Number of parameters, the head included; running statistics do not count.

        Returns:
          The sum of the sizes of all `nnx.Param`s.
        """
        return count_params(self)

    def flops_per_image(self) -> float:
        """FLOPs of a forward pass over one image of the configured size.

        Returns:
          2 FLOPs a multiply-add of products and dense convolutions; depthwise ones are left out.
        """
        config, side = self.config, self.config.image_size
        total, size = 0.0, side
        for conv in self.stem.convs:
            size = -(-size // conv.stride)
            total += 2 * size * size * conv.kernel.size
        for index, (stage, width) in enumerate(zip(self.stages, config.widths, strict=True)):
            block = stage.layers if config.scan_layers else stage.layers[0]
            mlp = 4 * width * int(width * config.mlp_ratio)
            total += config.depths[index] * (block.mixer.flops(size, size) + size * size * mlp)
            if index < len(self.downsamples):
                down = self.downsamples[index]
                total += 2 * size * size * down.up.kernel.size
                size //= 2
                total += 2 * size * size * down.down.kernel.size
        return total + 2 * config.widths[-1] * config.num_classes


def _make_block(config: HViTTTConfig, stage: int, rngs: nnx.Rngs) -> VisionBlock:
    """One block of a stage."""
    width, options = config.widths[stage], dict(stddev=config.initializer_range, rngs=rngs)
    mixer = VisionTTT(
        width,
        config.heads[stage],
        spec=vittt_glu(config.variant),
        rotary=True,
        dtype=config.dtype,
        mode=config.mode,
        **options,
    )
    mlp = ConvMLP(width, int(width * config.mlp_ratio), dtype=config.dtype, **options)
    epsilon = config.norm_epsilon
    return VisionBlock(width, mixer, mlp, epsilon=epsilon, dtype=config.dtype, rngs=rngs)
