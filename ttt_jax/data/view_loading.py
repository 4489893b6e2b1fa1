"""Reads posed images at the size that the model gets, with intrinsics that stay true."""

import numpy as np
from PIL import Image

from ttt_jax.data.cameras import BadView, View
from ttt_jax.data.image_decode import UnreadableImage, decode

_ASPECT = 0.02  # relative difference of aspect ratios that rounding to pixels explains


def resize_and_crop(
    image: Image.Image, intrinsics: np.ndarray, height: int, width: int
) -> tuple[Image.Image, np.ndarray]:
    """Scales an image to cover a size and cuts its middle out, the intrinsics along with it.

    Args:
      image: any Pillow image.
      intrinsics: [4]: fx, fy, cx, cy in pixels of the image.
      height: rows wanted.
      width: columns wanted.

    Returns:
      (the image of that size, its intrinsics in its own pixels).

    >>> image, intrinsics = Image.new("RGB", (8, 4)), np.array([8, 8, 4, 2.0])
    >>> image, intrinsics = resize_and_crop(image, intrinsics, 2, 2)
    >>> image.size, intrinsics.tolist()
    ((2, 2), [4.0, 4.0, 1.0, 1.0])
    """
    scale = max(width / image.width, height / image.height)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    # Of the rounded size, not `scale`: half a pixel's difference in each axis.
    x, y = size[0] / image.width, size[1] / image.height
    image = image.resize(size, Image.Resampling.LANCZOS)
    image = image.crop((left, top, left + width, top + height))
    return image, intrinsics * np.array([x, y, x, y]) - np.array([0, 0, left, top])


def load_view(view: View, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads a view at a size.

    Args:
      view: the view.
      height: rows wanted.
      width: columns wanted.

    Returns:
      (uint8 [height, width, 3], what is transparent shows white; float64 [4], in its pixels).

    Raises:
      BadView: the image cannot be read, or has another shape than its camera file says.
    """
    try:
        image = decode(view.image, str(view.image))
    except UnreadableImage as error:
        raise BadView(str(error)) from error
    aspect = image.width / image.height
    if view.aspect is not None and abs(aspect / view.aspect - 1) > _ASPECT:
        raise BadView(
            f"{view.image} is {image.width} x {image.height}, and its camera file says another "
            f"shape, {view.aspect:.3f} times as wide as high"
        )
    sides = np.array([image.width, image.height] * 2)
    image, intrinsics = resize_and_crop(image, view.intrinsics * sides, height, width)
    return np.asarray(image), intrinsics
