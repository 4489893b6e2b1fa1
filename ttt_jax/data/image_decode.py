"""From the bytes of an image file to RGB, whatever the file's mode; bad files say so."""

import io
import pathlib
import warnings

import numpy as np
from PIL import Image, ImageOps


class UnreadableImage(ValueError):
    """One image that cannot be used: the others go on without it."""


def decode(data: bytes | pathlib.Path, name: str) -> Image.Image:
    """Reads an image as RGB.

    Args:
      data: the file's bytes, or its path.
      name: said in the error.

    Returns:
      The image, mode "RGB", as of `to_rgb`.

    Raises:
      UnreadableImage: the file is missing, cut off, no image, or of a mode that has no RGB form.
    """
    try:
        with warnings.catch_warnings():
            # Files with odd metadata are read all the same.
            warnings.simplefilter("ignore")
            opened = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)
            opened.load()
            return to_rgb(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableImage(f"{name} cannot be read as an image: {first}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any mode to "RGB", upright.

    Grey becomes three equal channels, 16-bit grey is scaled to 8 bits, what is transparent shows
    white, and the camera's orientation tag is applied.

    Args:
      image: any Pillow image.

    Returns:
      The image in RGB.

    Raises:
      ValueError: a mode of unbounded numbers ("F", or "I" with values outside 16 bits).

    >>> to_rgb(Image.new("LA", (1, 1), (0, 0))).getpixel((0, 0))
    (255, 255, 255)
    >>> to_rgb(Image.new("I;16", (1, 1), 65535)).getpixel((0, 0))
    (255, 255, 255)
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError(f"mode {image.mode!r} has no fixed range; save it with 8 bits")
        image = Image.fromarray((values // 257).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
