"""From scenes of posed views to batches, through grain; the position can be saved and restored."""

import functools
import hashlib
import logging
from typing import Any, NamedTuple, Protocol

import numpy as np

from ttt_jax.config_views import ViewsConfig
from ttt_jax.data import scenes
from ttt_jax.data.cameras import BadView
from ttt_jax.data.pipeline import BatchIterator
from ttt_jax.data.scene_sets import PosedScene, SceneSet, open_scenes
from ttt_jax.data.view_loading import load_view
from ttt_jax.data.view_sampling import centre_cameras, draw_views, spread_views

_ENDLESS = 2**50  # batches of a stream without an end; grain wants a length
_CACHE_BYTES = 2**28  # of decoded images that are kept
_PROBES = 16  # examples tried before a run starts, until one can be made
_TRAIN, _EVAL = 1, 2  # what a stream of draws is for
_SPLITS = ("train", "eval")


class Example(NamedTuple):
    """Views of one scene, those for the model's input first.

    Attributes:
      images: uint8 [views, height, width, 3].
      intrinsics: float32 [views, 4]: fx, fy, cx, cy in pixels of these images.
      poses: float32 [views, 4, 4], camera to world.
    """

    images: np.ndarray
    intrinsics: np.ndarray
    poses: np.ndarray


class Examples(Protocol):
    """Examples by number, each a function of its number alone.

    Attributes:
      fault: the last view that could not be used, or None.
    """

    fault: BadView | None

    def __len__(self) -> int:
        """Examples of one pass, or very many."""

    def example(self, index: int) -> Example | None:
        """Makes one; None where its scene's files are damaged."""

    def names(self) -> list[str]:
        """Names the scene of each held-out example."""


class RenderedExamples:
    """Examples of scenes that the project renders, a new scene for each number."""

    fault = None

    def __init__(self, config: ViewsConfig, train: bool):
        """Describes the examples; the held-out ones do not depend on the seed."""
        self._config, self._train = config, train

    def __len__(self) -> int:
        return _ENDLESS if self._train else self._config.eval_scenes

    def names(self) -> list[str]:
        """Names the scene of each held-out example: its number."""
        return [f"rendered {index}" for index in range(self._config.eval_scenes)]

    def example(self, index: int) -> Example:
        """Renders the views of scene `index`."""
        config = self._config
        seed = [_TRAIN, config.shuffle_seed, index] if self._train else [_EVAL, index]
        random = np.random.default_rng(seed)
        scene = scenes.random_scene(random)
        count, size = config.input_views + config.target_views, (config.height, config.width)
        cameras = scenes.random_cameras(random, count, *size)
        return _finish(scenes.render(scene, *cameras, *size), *cameras, config)


class FileExamples:
    """Examples of scenes in files.

    In training, number g is scene order[g mod n] of epoch g div n, the order drawn from (seed,
    epoch), and its views are drawn from (seed, g). In evaluation every scene comes once, or, where
    views are held out, as often as it has groups of target_views of them; inputs are spread, or,
    with "nearest", are those nearest to the first target.
    """

    def __init__(self, scene_list: tuple[PosedScene, ...], config: ViewsConfig, train: bool):
        """Describes the examples."""
        self._scenes, self._config, self._train = scene_list, config, train
        self._orders: dict[int, np.ndarray] = {}
        self._groups = [] if train else list(_eval_groups(scene_list, config))
        self._reported: set[Any] = set()
        self.fault: BadView | None = None
        self._open_cache()

    def __len__(self) -> int:
        return _ENDLESS if self._train else len(self._groups)

    def names(self) -> list[str]:
        """Names the scene of each held-out example."""
        return [self._scenes[number].name for number, _, _ in self._groups]

    def example(self, index: int) -> Example | None:
        """Loads the views of example `index`; views that cannot be read give way to others."""
        config, count = self._config, self._config.input_views + self._config.target_views
        if self._train:
            number = self._scene_of(index)
            random = np.random.default_rng([_TRAIN, config.shuffle_seed, index])
            inputs, targets = draw_views(random, self._scenes[number], config)
        else:
            number, inputs, targets = self._groups[index]
        chosen = self._usable(number, targets, config.target_views, [])
        used = list(chosen)
        chosen = self._usable(number, inputs, config.input_views, used) + chosen
        if len(chosen) < count:
            return None
        views = [self._load(number, view) for view in chosen]
        poses = self._scenes[number].poses()[chosen]
        images, intrinsics = (np.stack(x) for x in zip(*views, strict=True))
        return _finish(images, intrinsics, poses, config)

    def check_readable(self, name: str) -> None:
        """Tries some examples, so that images damaged as a whole are found before a run starts.

        Args:
          name: of the split, said in the error.

        Raises:
          ValueError: none can be made.
        """
        probes = np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(int))
        if all(self.example(int(index)) is None for index in probes):
            raise ValueError(
                f"config.data.source: of {len(probes)} examples of the split {name!r} none has "
                f"enough images that can be read; the last fault: {self.fault}"
            )

    def _usable(self, number: int, candidates: list[int], count: int, used: list[int]) -> list[int]:
        """The first candidates that can be read and are not used, at most `count`."""
        found: list[int] = []
        for view in candidates:
            if len(found) == count:
                break
            if view not in used and not isinstance(self._load(number, view), BadView):
                found.append(view)
        return found

    def _scene_of(self, index: int) -> int:
        epoch, place = divmod(index, len(self._scenes))
        if epoch not in self._orders:
            random = np.random.default_rng([_TRAIN, self._config.shuffle_seed, epoch, 0])
            self._orders = {epoch: random.permutation(len(self._scenes))}
        return int(self._orders[epoch][place])

    def _open_cache(self) -> None:
        size = 3 * self._config.height * self._config.width
        self._load = functools.lru_cache(maxsize=max(64, _CACHE_BYTES // size))(self._read)

    def _read(self, number: int, view: int) -> Any:
        """A view's (image, intrinsics), or the BadView that says why there is none."""
        try:
            found = self._scenes[number].views[view]
            return load_view(found, self._config.height, self._config.width)
        except BadView as error:
            self.fault = error
            if (number, view) not in self._reported:
                self._reported.add((number, view))
                logging.warning("%d damaged views so far: %s", len(self._reported), error)
            return error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_load"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_cache()


def _eval_groups(scene_list: tuple[PosedScene, ...], config: ViewsConfig) -> Any:
    """(scene, input candidates, target candidates) of each held-out example."""
    for number, scene in enumerate(scene_list):
        inputs, targets = draw_views(np.random.default_rng([_EVAL, number]), scene, config)
        if config.held_out == "views":
            targets = sorted(targets)
            starts = range(0, len(targets) - config.target_views + 1, config.target_views)
        else:
            starts = range(1)
        for start in starts:
            group = targets[start : start + config.target_views]
            others = [view for view in inputs if view not in group]
            if config.sampling == "random":
                others = spread_views(scene.poses(), others)
            else:
                centres = scene.poses()[:, :3, 3]
                distance = np.linalg.norm(centres - centres[group[0]], axis=-1)
                others.sort(key=distance.__getitem__)
            spare = targets[config.target_views :] if config.held_out == "scenes" else []
            yield number, others, group + spare


def _finish(
    images: np.ndarray, intrinsics: np.ndarray, poses: np.ndarray, config: ViewsConfig
) -> Example:
    if config.centre_cameras:
        poses = centre_cameras(poses, config.input_views)
    return Example(images, intrinsics.astype(np.float32), poses.astype(np.float32))


class ViewBatches:
    """A grain data source: batch s of process p holds examples (s P + p) B .. (s P + p + 1) B - 1.

    A batch is a dict of images uint8 [B, V, H, W, 3], intrinsics float32 [B, V, 4], poses float32
    [B, V, 4, 4], scenes int32 [B] (the example's number, -1 for the filling of the last batch) and
    weights float32 [B], 0 for a damaged scene and the filling. A batch of more than three damaged
    scenes and nothing else is an error.
    """

    def __init__(
        self,
        examples: Examples,
        config: ViewsConfig,
        *,
        batch_size: int,
        process_index: int,
        process_count: int,
    ):
        """Describes the batches of process p of P, B rows each."""
        self._examples, self._config, self._batch_size = examples, config, batch_size
        self._process_index, self._process_count = process_index, process_count

    def __len__(self) -> int:
        return -(-len(self._examples) // (self._batch_size * self._process_count))

    def __getitem__(self, step: Any) -> dict[str, np.ndarray]:
        shapes = batch_shapes(self._config, self._batch_size)
        batch = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        batch["scenes"][:] = -1
        # A camera that divides by no zero, for rows that count for nothing.
        batch["intrinsics"][:] = 1
        batch["poses"][:] = np.eye(4)
        first = (int(step) * self._process_count + self._process_index) * self._batch_size
        inside = range(min(self._batch_size, len(self._examples) - first))
        for row in inside:
            example = self._examples.example(first + row)
            batch["scenes"][row] = (first + row) % 2**31
            if example is not None:
                batch["images"][row] = example.images
                batch["intrinsics"][row] = example.intrinsics
                batch["poses"][row] = example.poses
                batch["weights"][row] = 1
        if len(inside) > 3 and not batch["weights"].any():
            raise ValueError(
                f"none of {len(inside)} scenes has enough images that can be read; the last fault: "
                f"{self._examples.fault}"
            )
        return batch


def batch_shapes(config: ViewsConfig, rows: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns (shape, dtype) of each array of a batch of so many rows."""
    views = config.input_views + config.target_views
    return {
        "images": ((rows, views, config.height, config.width, 3), np.uint8),
        "intrinsics": ((rows, views, 4), np.float32),
        "poses": ((rows, views, 4, 4), np.float32),
        "scenes": ((rows,), np.int32),
        "weights": ((rows,), np.float32),
    }


class ViewSource:
    """The data of a run: both splits of a source, and what they are."""

    def __init__(self, config: ViewsConfig):
        """Opens the source.

        Args:
          config: a validated configuration.

        Raises:
          ValueError: the source cannot be read or holds too little (see `open_scenes`), or the
            images of a split are damaged.
        """
        self._config = config
        self.scenes: SceneSet | None = None
        if config.source == "builtin":
            self._splits = [RenderedExamples(config, train) for train in (True, False)]
            self.hash = hashlib.sha256(self._splits[1].example(0).images).hexdigest()[:16]
        else:
            self.scenes = open_scenes(config)
            sides = ((self.scenes.train, True), (self.scenes.held_out, False))
            self._splits = [FileExamples(side, config, train) for side, train in sides]
            for examples, split in zip(self._splits, _SPLITS, strict=True):
                examples.check_readable(split)
            self.hash = self.scenes.hash

    def examples(self, split: str) -> Examples:
        """Returns the examples of "train" or "eval"."""
        return self._splits[_SPLITS.index(split)]

    def batches(
        self, split: str, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> BatchIterator:
        """Opens a process's share of a split from its beginning; it can be saved and restored.

        Args:
          split: "train", endless, or "eval", every example once.
          batch_size: rows of this process.
          process_index: this process.
          process_count: number of processes.

        Returns:
          An iterator of batches, see `ViewBatches`.
        """
        config = self._config
        batches = ViewBatches(
            self.examples(split),
            config,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
        )
        names = ("height", "width", "input_views", "target_views", "sampling")
        names += ("held_out", "eval_fraction", "centre_cameras", "shuffle_seed")
        identity = {name: getattr(config, name) for name in names}
        identity |= {"split": split, "hash": self.hash, "rows": batch_size * process_count}
        workers = config.num_workers if split == "train" else 0
        return BatchIterator(batches, identity, workers)
