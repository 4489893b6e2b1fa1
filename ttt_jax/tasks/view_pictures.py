"""Pictures of view synthesis: a strip of views side by side, and a turntable."""

import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

_TILE = 96  # least side of a view in a picture, in pixels
_GAP, _WIDE_GAP = 4, 14
_ERROR_TOP = 0.5  # absolute error of the brightest colour
_FRAME_MS = 80


def draw_strip(
    path: pathlib.Path,
    inputs: np.ndarray,
    targets: np.ndarray,
    renderings: np.ndarray,
    captions: Sequence[str],
) -> pathlib.Path:
    """Draws one row a scene: its input views, a target view, its rendering, and the error.

    Args:
      path: of the PNG.
      inputs: [scenes, views, height, width, 3] in [0, 1].
      targets: [scenes, height, width, 3].
      renderings: [scenes, height, width, 3].
      captions: one a scene, written on its rendering.

    Returns:
      The path.
    """
    views = inputs.shape[1]
    error = np.mean(np.abs(targets - renderings), axis=-1)
    colours = matplotlib.colormaps["magma"](np.clip(error / _ERROR_TOP, 0, 1))[..., :3]
    tiles = np.concatenate([inputs, np.stack([targets, renderings, colours], 1)], 1)
    tiles = enlarge(tiles)
    height, width = tiles.shape[2:4]
    lefts = [(width + _GAP) * i + _GAP + (_WIDE_GAP if i >= views else 0) for i in range(views + 3)]
    row = height + _GAP
    titles = [f"input {view}" for view in range(1, views + 1)]
    titles += ["target", "rendering", f"error, 0 to {_ERROR_TOP}"]
    letters = _letters(width)
    header = 2 * letters
    size = lefts[-1] + width + _GAP, header + row * len(tiles)
    picture = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(letters)
    for left, title in zip(lefts, titles, strict=True):
        draw.text((left, letters // 3), title, fill="black", font=font)
    for index, (scene, caption) in enumerate(zip(tiles, captions, strict=True)):
        top = header + row * index
        for left, tile in zip(lefts, scene, strict=True):
            picture.paste(Image.fromarray(tile), (left, top))
        corner = lefts[views + 1] + 3, top + height - letters - 4
        draw.text(corner, caption, "white", font, stroke_width=2, stroke_fill="black")
    picture.save(path)
    return path


def draw_turntable(path: pathlib.Path, frames: np.ndarray) -> pathlib.Path:
    """Writes an endless GIF with the scenes side by side, each under its number.

    Args:
      path: of the GIF.
      frames: [frames, scenes, height, width, 3] in [0, 1].

    Returns:
      The path.
    """
    tiles = enlarge(frames)
    width = tiles.shape[3]
    letters = _letters(width)
    header = Image.new("RGB", (width * tiles.shape[1], 2 * letters), "white")
    for scene in range(tiles.shape[1]):
        place, font = (width * scene + 3, letters // 3), ImageFont.load_default(letters)
        ImageDraw.Draw(header).text(place, f"scene {scene + 1}", fill="black", font=font)
    rows = [
        np.concatenate([np.asarray(header), np.concatenate(list(frame), axis=1)]) for frame in tiles
    ]
    # One palette for all frames: one a frame would flicker.
    palette = Image.fromarray(np.concatenate(rows[:: max(1, len(rows) // 6)])).quantize(256)
    images = [Image.fromarray(row).quantize(palette=palette, dither=0) for row in rows]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=_FRAME_MS, loop=0, disposal=2
    )
    return path


def _letters(width: int) -> int:
    """Size of the letters over tiles of some width, in pixels."""
    return max(12, width // 12)


def enlarge(images: np.ndarray) -> np.ndarray:
    """Bytes of images, each pixel a square, so that the shorter side has at least 96.

    >>> enlarge(np.ones((2, 32, 48, 3))).shape
    (2, 96, 144, 3)
    """
    factor = -(-_TILE // min(images.shape[-3:-1]))
    levels = np.round(255 * np.clip(images, 0, 1)).astype(np.uint8)
    return levels.repeat(factor, axis=-3).repeat(factor, axis=-2)
