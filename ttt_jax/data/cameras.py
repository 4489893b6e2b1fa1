"""Camera files: LaCT's JSON and RealEstate10K's text, and the checks that both must pass.

Intrinsics are held as fractions of the image (fx / width, fy / height, cx / width, cy / height),
so that they are true at any resolution; `ttt_jax.data.views` turns them into pixels of the image
that the model gets. Poses are camera to world, OpenCV's convention.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_RIGID = 2e-3  # largest entry of R Rᵀ − I that is borne; files keep six digits
# A focal length, over the image's side: angles of view between 3 and 157 degrees.
_FOCAL = (0.1, 20.0)
_JSON_FIELDS = ("w", "h", "fx", "fy", "cx", "cy", "w2c", "file_path")
_FRAME_SUFFIXES = (".png", ".jpg", ".jpeg")


class BadView(ValueError):
    """One view that cannot be used: the others go on without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """One posed image.

    Attributes:
      image: path of the image file.
      intrinsics: float64 [4]: fx, cx as fractions of the width, fy, cy of the height, in the order
        fx, fy, cx, cy.
      pose: float64 [4, 4], camera to world.
      aspect: width over height that the camera file states, or None.
    """

    image: pathlib.Path
    intrinsics: np.ndarray
    pose: np.ndarray
    aspect: float | None


def read_json(path: pathlib.Path) -> tuple[list[View], list[BadView]]:
    """Reads a camera file of LaCT's format: a list of objects, one a view.

    Each has w, h (pixels), fx, fy, cx, cy (pixels), w2c (4×4, world to camera, OpenCV) and
    file_path (relative to the file).

    Args:
      path: the file.

    Returns:
      (views, what was wrong with the others).

    Raises:
      ValueError: the file is missing, or is not of this format.
    """
    entries = load_json(path)
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ValueError(f"{path}: a camera file is a JSON list of objects, one a view")
    return _collect(lambda entry: _json_view(path, *entry), list(enumerate(entries)))


def _json_view(path: pathlib.Path, number: int, entry: dict[str, Any]) -> View:
    name = f"{path}, view {number}"
    missing = [field for field in _JSON_FIELDS if field not in entry]
    if missing:
        raise BadView(f"{name}: has no {missing[0]!r}; it needs {', '.join(_JSON_FIELDS)}")
    size = _numbers(name, [entry["w"], entry["h"]], (2,))
    raw = _numbers(name, [entry[field] for field in ("fx", "fy", "cx", "cy")], (4,))
    if not (size > 0).all():
        raise BadView(f"{name}: w, h = {size.tolist()} must be positive")
    world_to_camera = _numbers(name, entry["w2c"], (4, 4))
    return View(
        image=_existing(name, path.parent / str(entry["file_path"])),
        intrinsics=_checked_intrinsics(name, raw, raw / np.tile(size, 2), "pixels", "fractions"),
        pose=_inverted(name, world_to_camera),
        aspect=float(size[0] / size[1]),
    )


def read_realestate10k(
    path: pathlib.Path, frames: pathlib.Path
) -> tuple[list[View], list[BadView]]:
    """Reads a file of RealEstate10K: the video's address, then one line a frame.

    A line has a timestamp (microseconds), fx, fy, cx, cy as fractions of the image, two numbers
    that are not used, and the 3×4 matrix from world to camera by rows. Source:
    google.github.io/realestate10k.

    Args:
      path: the file, NAME.txt.
      frames: folder that holds NAME/TIMESTAMP.png or .jpg.

    Returns:
      (views, what was wrong with the others).

    Raises:
      ValueError: the file is not of this format.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not lines or "://" not in lines[0]:
        raise ValueError(f"{path}: a RealEstate10K file begins with the address of its video")
    numbered = [(n, line.split()) for n, line in enumerate(lines, 1) if n > 1 and line.strip()]
    folder = frames / path.stem
    # One listing a scene: the whole set has ten million frames.
    files = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return _collect(lambda entry: _realestate_view(path, folder, files, *entry), numbered)


def _realestate_view(
    path: pathlib.Path, folder: pathlib.Path, files: set[str], number: int, words: list[str]
) -> View:
    name = f"{path}, line {number}"
    if len(words) != 19:
        raise BadView(f"{name}: has {len(words)} columns; a frame has 19")
    values = _numbers(name, words[1:], (18,))
    world_to_camera = np.vstack([values[6:].reshape(3, 4), [0.0, 0.0, 0.0, 1.0]])
    names = [words[0] + suffix for suffix in _FRAME_SUFFIXES if words[0] + suffix in files]
    if not names:
        raise BadView(f"{name}: there is no image {folder / words[0]}.png or .jpg")
    return View(
        image=folder / names[0],
        intrinsics=_checked_intrinsics(name, values[:4], values[:4], "fractions", "pixels"),
        pose=_inverted(name, world_to_camera),
        aspect=None,
    )


def load_json(path: pathlib.Path) -> Any:
    """Reads a JSON file. Raises ValueError naming it where it is missing or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error


def check_rigid(name: str, pose: np.ndarray) -> None:
    """Raises BadView unless a [4, 4] matrix is a rotation and a translation.

    >>> check_rigid("camera", np.eye(4))
    >>> check_rigid("camera", np.diag([2.0, 2.0, 2.0, 1.0]))
    Traceback (most recent call last):
    ...
    ttt_jax.data.cameras.BadView: camera: the pose is not rigid (it scales by about 2); its 3×3 \
part must be a rotation
    """
    rotation = pose[:3, :3]
    if not np.allclose(pose[3], [0, 0, 0, 1], atol=1e-6):
        raise BadView(f"{name}: the pose's last row is {pose[3].tolist()}; it must be 0 0 0 1")
    determinant = np.linalg.det(rotation)
    if np.abs(rotation @ rotation.T - np.eye(3)).max() > _RIGID or determinant < 0:
        scale = np.cbrt(abs(determinant))
        how = "it mirrors" if determinant < 0 else f"it scales by about {scale:.3g}"
        if determinant > 0 and abs(scale - 1) < 1e-3:
            how = "it shears"
        raise BadView(f"{name}: the pose is not rigid ({how}); its 3×3 part must be a rotation")


def _inverted(name: str, world_to_camera: np.ndarray) -> np.ndarray:
    check_rigid(name, world_to_camera)
    return np.linalg.inv(world_to_camera)


def _checked_intrinsics(
    name: str, raw: np.ndarray, fractions: np.ndarray, unit: str, other: str
) -> np.ndarray:
    """The fractions, where they can be those of a camera; a wrong unit is called by its name."""
    focal, centre = fractions[:2], fractions[2:]
    low, high = _FOCAL
    # Of a centre in pixels that lies in the corner's pixel, the unit is wrong.
    mistaken = (raw[2:] <= 1).all() if unit == "pixels" else (raw > high).all()
    inside = ((focal >= low) & (focal <= high) & (centre > 0) & (centre < 1)).all()
    if inside and not mistaken:
        return fractions
    hint = f"; they look like {other}, and this format has {unit}" if mistaken else ""
    raise BadView(
        f"{name}: fx, fy, cx, cy = {raw.tolist()} are no intrinsics in {unit}: focal lengths must "
        f"be {low} to {high} times the image's side and the centre inside the image{hint}"
    )


def _numbers(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Values as float64 of a shape, all finite; else BadView."""
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise BadView(f"{name}: {values!r} are not numbers") from error
    if array.shape != shape or not np.isfinite(array).all():
        raise BadView(f"{name}: {values!r} must be {shape} finite numbers")
    return array


def _existing(name: str, path: pathlib.Path) -> pathlib.Path:
    """The path, where it is a file; else BadView."""
    if not path.is_file():
        raise BadView(f"{name}: there is no image {path}")
    return path


def _collect(
    read: Callable[[Any], View], entries: Sequence[Any]
) -> tuple[list[View], list[BadView]]:
    views, bad = [], []
    for entry in entries:
        try:
            views.append(read(entry))
        except BadView as error:
            bad.append(error)
    return views, bad
