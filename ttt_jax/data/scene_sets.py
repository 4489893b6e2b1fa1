"""Finds the scenes of a source and splits them, or their views, into training and held-out."""

import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Sequence

import numpy as np

from ttt_jax.config_views import ViewsConfig
from ttt_jax.data import cameras
from ttt_jax.data.cameras import BadView, View


@dataclasses.dataclass(frozen=True, kw_only=True)
class PosedScene:
    """Views of one scene, all in one frame of reference.

    Attributes:
      name: of the scene, for messages and file names.
      views: all of its usable views.
      inputs: numbers of the views that may be given to the model.
      targets: numbers of the views that may be asked for.
    """

    name: str
    views: tuple[View, ...]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    def poses(self) -> np.ndarray:
        """Returns the poses of all views, float64 [n, 4, 4]."""
        return np.stack([view.pose for view in self.views])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneSet:
    """The scenes of a source.

    Attributes:
      train: scenes to train on.
      held_out: scenes to evaluate on.
      skipped_views: views that were at fault.
      skipped_scenes: scenes that had too few views left, or a broken camera file.
      hash: 16 hex digits over all cameras and the names of their images.
    """

    train: tuple[PosedScene, ...]
    held_out: tuple[PosedScene, ...]
    skipped_views: int
    skipped_scenes: int
    hash: str


def open_scenes(config: ViewsConfig) -> SceneSet:
    """Reads the camera files of a source; images are not opened.

    A view or a scene at fault is left out, counted, and the first of them is named in a warning.

    Args:
      config: a validated configuration whose source is no "builtin".

    Returns:
      The scenes.

    Raises:
      ValueError: the source does not exist, holds no camera file, or no scene with enough usable
        views; or nothing is left to train on or to evaluate.
    """
    files, frames = find_camera_files(config)
    scenes, faults, skipped_views = [], [], 0
    for path in files:
        try:
            views, bad = _read(path, frames)
            skipped_views += len(bad)
            scenes.append(_scene(path, views, bad, config))
        except ValueError as error:
            faults.append(error)
    if not scenes:
        raise ValueError(f"config.data.source={config.source!r} holds no usable scene: {faults[0]}")
    if faults:
        logging.warning("%d of %d scenes left out: %s", len(faults), len(files), faults[0])
    train, held_out = split(scenes, config)
    return SceneSet(
        train=train,
        held_out=held_out,
        skipped_views=skipped_views,
        skipped_scenes=len(faults),
        hash=_hash(scenes),
    )


def _scene(
    path: pathlib.Path, views: list[View], bad: list[BadView], config: ViewsConfig
) -> PosedScene:
    """One scene, with all its views for everything; ValueError where they are too few."""
    name = f"{path.parent.name}/{path.stem}"  # the folder or the file: either may name the scene
    if bad:
        logging.warning(
            "%s: %d of %d views left out: %s", path, len(bad), len(bad) + len(views), bad[0]
        )
    needed = config.input_views + config.target_views
    held_out = 0
    if config.held_out == "views":
        held_out = len(_held_out_views(len(views), config))
        if held_out < config.target_views:
            raise ValueError(
                f"{path}: of {len(views)} usable views {held_out} are held out, and "
                f"{config.target_views} are needed: raise config.data.eval_fraction"
            )
    if len(views) - held_out < needed:
        why = f"; the first fault is: {bad[0]}" if bad else ""
        raise ValueError(
            f"{path}: has {len(views) - held_out} usable views to draw from, {needed} are "
            f"needed{why}"
        )
    every = tuple(range(len(views)))
    return PosedScene(name=name, views=tuple(views), inputs=every, targets=every)


def find_camera_files(
    config: ViewsConfig,
) -> tuple[list[pathlib.Path], pathlib.Path | None]:
    """Lists the camera files of a source.

    Args:
      config: a validated configuration.

    Returns:
      (paths in a fixed order, the folder of frames where they are RealEstate10K's, else None).

    Raises:
      ValueError: the source does not exist or holds no camera file.
    """
    source = pathlib.Path(config.source)
    if source.is_dir():
        texts = sorted(source.glob("*.txt"))
        if texts:
            frames = pathlib.Path(config.frames or config.source)
            if not frames.is_dir():
                raise ValueError(f"config.data.frames={config.frames!r} is no folder")
            return texts, frames
        files = sorted(source.glob("*cameras.json")) + sorted(source.glob("*/*cameras.json"))
        if not files:
            raise ValueError(
                f"config.data.source={config.source!r} has no RealEstate10K .txt file, and neither "
                "it nor its subfolders have a camera file *cameras.json"
            )
        return files, None
    if not source.is_file():
        raise ValueError(f"config.data.source={config.source!r}: there is no such file or folder")
    entries = cameras.load_json(source)
    if isinstance(entries, list) and entries and all(isinstance(e, str) for e in entries):
        return [source.parent / entry for entry in entries], None
    return [source], None


def split(
    scenes: Sequence[PosedScene], config: ViewsConfig
) -> tuple[tuple[PosedScene, ...], tuple[PosedScene, ...]]:
    """Holds out scenes, or views of each scene, as a function of the scenes and the fraction alone.

    Scenes: the last ones in the order of a hash of their names, so that adding scenes moves few
    from one side to the other. Views: every k-th of a scene, k = 1 / eval_fraction; evaluation
    gives the model views of training and asks for held-out ones.

    Args:
      scenes: all scenes, each with enough views.
      config: held_out, eval_fraction, input_views and target_views are used.

    Returns:
      (training scenes, held-out scenes), the latter in the order in which they came.

    Raises:
      ValueError: no scene would be left to train on.
    """
    if config.held_out == "views":
        pairs = [_split_views(scene, config) for scene in scenes]
        return tuple(train for train, _ in pairs), tuple(held_out for _, held_out in pairs)
    count = max(1, round(config.eval_fraction * len(scenes)))
    if count >= len(scenes):
        raise ValueError(
            f"config.data.held_out='scenes': {len(scenes)} scene(s) leave none to train on; give "
            "more scenes, or hold out 'views'"
        )
    order = sorted(scenes, key=lambda s: hashlib.sha256(s.name.encode()).digest())
    chosen = {id(scene) for scene in order[len(scenes) - count :]}
    train = tuple(scene for scene in scenes if id(scene) not in chosen)
    return train, tuple(scene for scene in scenes if id(scene) in chosen)


def _split_views(scene: PosedScene, config: ViewsConfig) -> tuple[PosedScene, PosedScene]:
    held_out = _held_out_views(len(scene.views), config)
    rest = tuple(i for i in range(len(scene.views)) if i not in held_out)
    train = dataclasses.replace(scene, inputs=rest, targets=rest)
    return train, dataclasses.replace(scene, inputs=rest, targets=held_out)


def _held_out_views(count: int, config: ViewsConfig) -> tuple[int, ...]:
    """Every k-th view, k = 1 / eval_fraction, so that they lie all around."""
    every = max(2, round(1 / config.eval_fraction))
    return tuple(range(every // 2, count, every))


def _read(path: pathlib.Path, frames: pathlib.Path | None) -> tuple[list[View], list[BadView]]:
    return cameras.read_json(path) if frames is None else cameras.read_realestate10k(path, frames)


def _hash(scenes: Sequence[PosedScene]) -> str:
    digest = hashlib.sha256()
    for scene in scenes:
        digest.update(scene.name.encode())
        for view in scene.views:
            digest.update(view.image.name.encode())
            digest.update(view.intrinsics.tobytes() + view.pose.tobytes())
    return digest.hexdigest()[:16]
