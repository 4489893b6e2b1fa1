"""From labelled images to batches, through grain; the position can be saved and restored."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ttt_jax.config_images import ImageConfig
from ttt_jax.data import augment
from ttt_jax.data.image_decode import UnreadableImage
from ttt_jax.data.image_sources import ImageSet
from ttt_jax.data.pipeline import BatchIterator

_ENDLESS = 2**50  # batches of a stream without an end; grain wants a length
_PROBES = 16  # images read before a run starts
_PADDING = -1  # the label of a row that only fills the last batch

# What a stream of draws is for: the order of an epoch, one image, the mixing of a batch.
_ORDER, _IMAGE, _MIX = range(3)


class ImageBatches:
    """A grain data source: batch s of process p holds the rows (s P + p) B .. (s P + p + 1) B - 1.

    So the batches of P processes, one under the other, are the batch of one process of B P rows.
    In training row g is image order[g mod n] of epoch g div n, the order drawn from (seed, epoch)
    and what varies the image from (seed, epoch, image), so a batch is a function of the images, the
    recipe and (seed, s) alone. Held-out images come once, in their order.

    A batch is a dict of images uint8 [B, S, S, 3], labels and other_labels int32 [B], share float32
    [B] (of `labels` in the target; 1 in evaluation) and weights float32 [B]. A damaged image is
    black, with label 0 and weight 0; a row that fills the last batch has label -1 and weight 0.
    """

    def __init__(
        self,
        images: ImageSet,
        config: ImageConfig,
        *,
        train: bool,
        image_size: int,
        batch_size: int,
        process_index: int,
        process_count: int,
    ):
        """Describes the batches.

        Args:
          images: of the split.
          config: the recipe.
          train: shuffle, vary and repeat.
          image_size: S.
          batch_size: rows of one process, B.
          process_index, process_count: p and P.
        """
        self._images, self._config, self._train = images, config, train
        self._image_size, self._batch_size = image_size, batch_size
        self._process_index, self._process_count = process_index, process_count
        self._orders: dict[int, np.ndarray] = {}
        self._damaged: set[int] = set()  # images that were reported

    def __len__(self) -> int:
        rows = self._batch_size * self._process_count
        return _ENDLESS if self._train else -(-len(self._images) // rows)

    def __getitem__(self, step: Any) -> dict[str, np.ndarray]:
        count, size = self._batch_size, self._image_size
        batch = {
            "images": np.zeros((count, size, size, 3), np.uint8),
            "labels": np.full(count, _PADDING, np.int32),
            "other_labels": np.full(count, _PADDING, np.int32),
            "share": np.ones(count, np.float32),
            "weights": np.zeros(count, np.float32),
        }
        first = (int(step) * self._process_count + self._process_index) * count
        errors = []
        for row in range(count):
            if self._train or first + row < len(self._images):
                errors += self._fill(batch, row, first + row)
        if len(errors) == count > 3:
            raise ValueError(f"none of {count} images can be read; the last one: {errors[-1]}")
        batch["other_labels"][:] = batch["labels"]
        if self._train:
            random = self._random(_MIX, int(step))
            config = self._config
            augment.mix_pairs(batch, config.mixup_alpha, config.cutmix_alpha, random)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}  # a worker draws its orders itself

    def _fill(self, batch: dict[str, np.ndarray], row: int, number: int) -> list[UnreadableImage]:
        """Puts image `number` of all epochs into a row; returns why it cannot, if it cannot."""
        epoch, place = divmod(number, len(self._images))
        index = int(self._order(epoch)[place]) if self._train else place
        try:
            image, label = self._images.read(index)
        except UnreadableImage as error:
            if index not in self._damaged:  # not again in every epoch
                self._damaged.add(index)
                logging.getLogger("ttt_jax").warning(
                    "%d damaged images so far: %s; it is left out", len(self._damaged), error
                )
            batch["labels"][row] = 0  # of an image that is there, unlike padding
            return [error]
        if self._train:
            random = self._random(_IMAGE, epoch, index)
            pixels = augment.train_image(image, self._image_size, self._config, random)
        else:
            pixels = augment.eval_image(image, self._image_size, self._config.eval_crop)
        batch["images"][row], batch["labels"][row] = pixels, label
        batch["weights"][row] = 1
        return []

    def _order(self, epoch: int) -> np.ndarray:
        """Draws an epoch's order, and keeps those of its neighbours for reads across the edge."""
        found = self._orders.get(epoch)
        if found is None:
            found = self._random(_ORDER, epoch).permutation(len(self._images))
            # A new dict, because reader threads may look into the old one at this moment.
            near = {e: order for e, order in self._orders.items() if abs(e - epoch) <= 1}
            self._orders = {**near, epoch: found}
        return found

    def _random(self, *what: int) -> np.random.Generator:
        return np.random.default_rng([self._config.shuffle_seed, *what])


def image_iterator(
    images: ImageSet,
    config: ImageConfig,
    *,
    train: bool,
    image_size: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> BatchIterator:
    """Iterates over the batches of a split (see `ImageBatches`).

    Args:
      images, config, train, image_size, batch_size, process_index, process_count: as there.

    Returns:
      A checkpointable iterator (`get_state`, `set_state`).

    Raises:
      ValueError: several processes have an odd number of rows each, and rows are mixed in pairs.
    """
    mixed = train and (config.mixup_alpha or config.cutmix_alpha)
    if mixed and process_count > 1 and batch_size % 2:
        raise ValueError(
            f"config.data.batch_size={batch_size * process_count} makes {batch_size} rows a "
            "process; mixup and cutmix need an even number, so that pairs do not lie in two"
        )
    batches = ImageBatches(
        images,
        config,
        train=train,
        image_size=image_size,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )
    recipe = dataclasses.asdict(config)
    for name in ("source", "num_workers", "label_smoothing", "batch_size"):
        del recipe[name]
    identity = {"images": images.hash, "image_size": image_size, "train": train, **recipe}
    identity["rows"] = batch_size * process_count
    return BatchIterator(batches, identity, config.num_workers if train else 0)


def check_readable(images: ImageSet, name: str) -> None:
    """Reads a few images, so that a set that is damaged as a whole is found before a run starts.

    Args:
      images: the set.
      name: said in the error.

    Raises:
      ValueError: none of them can be read.
    """
    errors: list[UnreadableImage] = []
    probes: Sequence[int] = np.unique(np.linspace(0, len(images) - 1, _PROBES).astype(int))
    for index in probes:
        try:
            images.read(int(index))
        except UnreadableImage as error:
            errors.append(error)
    if len(errors) == len(probes):
        raise ValueError(
            f"config.data.source: none of {len(probes)} images of {name} can be read; the first: "
            f"{errors[0]}"
        )
