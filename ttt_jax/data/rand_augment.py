"""RandAugment: a few random operations of one strength on an image (Cubuk et al. 2020).

The operations and their ranges are those of the "increasing" set of timm's policy
``rand-m9-mstd0.5-inc1``, which DeiT and ViTTT's official code train with: every operation gets
stronger with the magnitude, is done half of the time, and the magnitude has a little noise.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageOps

FILL = (124, 116, 104)  # ImageNet's mean colour, where an operation uncovers nothing
_PROBABILITY = 0.5
_NOISE = 0.5  # standard deviation of the magnitude

Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]


def rand_augment(
    image: Image.Image, layers: int, magnitude: float, random: np.random.Generator
) -> Image.Image:
    """Applies `layers` operations, each drawn anew and done with probability 1/2.

    Args:
      image: RGB.
      layers: number of draws.
      magnitude: strength in [0, 10].
      random: the source of all draws.

    Returns:
      An RGB image of the same size.

    >>> image = Image.new("RGB", (8, 8), (200, 10, 30))
    >>> rand_augment(image, 2, 9.0, np.random.default_rng(0)).size
    (8, 8)
    """
    for index in random.integers(len(OPERATIONS), size=layers):
        if random.random() < _PROBABILITY:
            strength = np.clip(random.normal(magnitude, _NOISE), 0, 10) / 10
            image = OPERATIONS[index](image, strength, random)
    return image


def _sign(random: np.random.Generator) -> float:
    return 1.0 if random.random() < 0.5 else -1.0


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """output(x, y) = image(a x + b y + c, d x + e y + f)."""
    size, method, bicubic = image.size, Image.Transform.AFFINE, Image.Resampling.BICUBIC
    return image.transform(size, method, matrix, resample=bicubic, fillcolor=FILL)


def _shear_x(image, strength, random):
    return _affine(image, (1, 0.3 * strength * _sign(random), 0, 0, 1, 0))


def _shear_y(image, strength, random):
    return _affine(image, (1, 0, 0, 0.3 * strength * _sign(random), 1, 0))


def _translate_x(image, strength, random):
    return _affine(image, (1, 0, 0.45 * strength * image.width * _sign(random), 0, 1, 0))


def _translate_y(image, strength, random):
    return _affine(image, (1, 0, 0, 0, 1, 0.45 * strength * image.height * _sign(random)))


def _rotate(image, strength, random):
    angle = 30 * strength * _sign(random)
    return image.rotate(angle, resample=Image.Resampling.BICUBIC, fillcolor=FILL)


def _posterize(image, strength, random):
    return ImageOps.posterize(image, max(4 - int(4 * strength), 1))


def _solarize(image, strength, random):
    return ImageOps.solarize(image, 256 - int(256 * strength))


def _solarize_add(image, strength, random):
    brighter = ImageChops.add(image, Image.new("RGB", image.size, (int(110 * strength),) * 3))
    dark = image.point(lambda value: 255 if value < 128 else 0).split()
    pairs = zip(brighter.split(), image.split(), dark, strict=True)
    return Image.merge("RGB", [Image.composite(new, old, mask) for new, old, mask in pairs])


def _enhance(kind) -> Operation:
    def apply(image, strength, random):
        return kind(image).enhance(max(1 + 0.9 * strength * _sign(random), 0.1))

    return apply


def _plain(function) -> Operation:
    def apply(image, strength, random):
        return function(image)

    return apply


OPERATIONS: tuple[Operation, ...] = (
    _plain(ImageOps.autocontrast),
    _plain(ImageOps.equalize),
    _plain(ImageOps.invert),
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Sharpness),
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
)
