"""How training varies images, and how evaluation cuts them: pure functions of a generator."""

import math

import numpy as np
from PIL import Image

from ttt_jax.data.rand_augment import rand_augment

# Mean and standard deviation of ImageNet's channels, on a scale of 0 to 1.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_ATTEMPTS = 10
_RATIO = (3 / 4, 4 / 3)  # width over height of a random crop
_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)

Box = tuple[float, float, float, float]  # left, upper, right, lower


def eval_image(image: Image.Image, size: int, crop: float) -> np.ndarray:
    """The centre of an image, resized.

    Args:
      image: RGB.
      size: rows and columns of the result.
      crop: side of the centre over the image's shorter side, in (0, 1].

    Returns:
      uint8 [size, size, 3].

    >>> eval_image(Image.new("RGB", (10, 6)), 4, 1.0).shape
    (4, 4, 3)
    """
    return np.asarray(_resize(image, size, centre_box(*image.size, crop)))


def train_image(image: Image.Image, size: int, config, random: np.random.Generator) -> np.ndarray:
    """A random crop, a mirror image, RandAugment and random erasing, in this order.

    Args:
      image: RGB.
      size: rows and columns of the result.
      config: an `ImageConfig`.
      random: the source of all draws.

    Returns:
      uint8 [size, size, 3].
    """
    if config.crop_min_area < 1:
        box = random_box(*image.size, config.crop_min_area, random)
    else:
        box = centre_box(*image.size, config.eval_crop)
    image = _resize(image, size, box)
    if random.random() < config.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    layers, magnitude = config.randaugment_layers, config.randaugment_magnitude
    pixels = np.array(rand_augment(image, layers, magnitude, random))
    if random.random() < config.erase:
        erase(pixels, random)
    return pixels


def centre_box(width: int, height: int, crop: float) -> Box:
    """A centred square.

    Args:
      width: of the image.
      height: of the image.
      crop: the square's side over the shorter side.

    >>> centre_box(10, 6, 0.5)
    (3.5, 1.5, 6.5, 4.5)
    """
    side = crop * min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(width: int, height: int, min_area: float, random: np.random.Generator) -> Box:
    """A box of a random area and shape (the random resized crop of Szegedy et al. 2015, section 6).

    Area uniform in [min_area, 1] of the image, width / height log-uniform in [3/4, 4/3]; the
    centre square after ten boxes that do not fit.

    Args:
      width: of the image.
      height: of the image.
      min_area: smallest part of the image's area.
      random: the source of all draws.

    >>> left, upper, right, lower = random_box(40, 30, 0.5, np.random.default_rng(0))
    >>> 0 <= left < right <= 40, 0 <= upper < lower <= 30, (right - left) * (lower - upper) > 550
    (True, True, True)
    """
    for _ in range(_ATTEMPTS):
        area = random.uniform(min_area, 1) * width * height
        ratio = math.exp(random.uniform(*np.log(_RATIO)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(random.integers(width - box_width, endpoint=True))
            upper = int(random.integers(height - box_height, endpoint=True))
            return left, upper, left + box_width, upper + box_height
    return centre_box(width, height, 1.0)


def erase(pixels: np.ndarray, random: np.random.Generator) -> None:
    """Fills a random rectangle with noise, in place (Zhong et al. 2020, algorithm 1).

    Area uniform in [0.02, 1/3], height / width log-uniform in [0.3, 1/0.3]; every pixel normal with
    ImageNet's mean and deviation, cut to the range. Nothing happens after ten that do not fit.

    Args:
      pixels: uint8 [height, width, 3].
      random: the source of all draws.
    """
    height, width = pixels.shape[:2]
    for _ in range(_ATTEMPTS):
        area = random.uniform(*_ERASED_AREA) * height * width
        ratio = math.exp(random.uniform(*np.log(_ERASED_RATIO)))
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < columns < width:
            upper = random.integers(height - rows, endpoint=True)
            left = random.integers(width - columns, endpoint=True)
            noise = 255 * random.normal(MEAN, DEVIATION, (rows, columns, 3))
            part = pixels[upper : upper + rows, left : left + columns]
            part[...] = np.clip(np.rint(noise), 0, 255)
            return


def mix_pairs(
    batch: dict[str, np.ndarray],
    mixup_alpha: float,
    cutmix_alpha: float,
    random: np.random.Generator,
) -> None:
    """Mixes rows 2i and 2i + 1 into each other, in place: mixup or cutmix, one share a batch.

        image_a ← s image_a + (1 − s) image_b      mixup (Zhang et al. 2018, eq. 1), or
        image_a ← image_a with a box of image_b    cutmix (Yun et al. 2019, eq. 1)

    and likewise for b; s is Beta(a, a), and for cutmix then the part of the image outside the box.
    With both, either has probability 1/2. A pair with a row of weight 0, and a last row without a
    partner, stays as it is.

    Args:
      batch: images uint8 [B, S, S, 3], labels int32 [B], weights float32 [B]; other_labels int32
        [B] and share float32 [B], the share of `labels` in the target, are changed.
      mixup_alpha: a; 0 turns mixup off.
      cutmix_alpha: likewise for cutmix.
      random: the source of all draws.
    """
    if not mixup_alpha and not cutmix_alpha:
        return
    cut = cutmix_alpha > 0 and (not mixup_alpha or random.random() < 0.5)
    alpha = cutmix_alpha if cut else mixup_alpha
    share = float(random.beta(alpha, alpha))
    images, size = batch["images"], batch["images"].shape[1]
    pairs = np.arange(len(images) // 2 * 2).reshape(-1, 2)
    pairs = pairs[np.all(batch["weights"][pairs] > 0, axis=1)]
    rows, partners = pairs.ravel(), pairs[:, ::-1].ravel()
    if cut:
        upper, lower, left, right, share = _cutmix_box(size, share, random)
        images[rows, upper:lower, left:right] = images[partners, upper:lower, left:right]
    else:
        other = images[partners].astype(np.float32)
        images[rows] = np.rint(share * images[rows] + (1 - share) * other).astype(np.uint8)
    batch["other_labels"][rows] = batch["labels"][partners]
    batch["share"][rows] = share


def _cutmix_box(size: int, share: float, random: np.random.Generator):
    """(upper, lower, left, right, part outside) of a box of area 1 − share, cut at the edges."""
    half = int(size * math.sqrt(1 - share)) // 2
    row, column = random.integers(size, size=2)
    upper, lower = max(row - half, 0), min(row + half, size)
    left, right = max(column - half, 0), min(column + half, size)
    return upper, lower, left, right, 1 - (lower - upper) * (right - left) / size**2


def _resize(image: Image.Image, size: int, box: Box) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
