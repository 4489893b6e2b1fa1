"""Image classification: cross entropy with soft targets, and exact top-1 and top-5."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttt_jax import processes
from ttt_jax.data import augment, image_sources
from ttt_jax.data.duplicates import shared_images, warn_of_shared
from ttt_jax.data.image_decode import UnreadableImage
from ttt_jax.data.images import check_readable, image_iterator
from ttt_jax.tasks.base import Result, place_whole_rows, rows_to_read
from ttt_jax.tasks.class_scores import ClassScores
from ttt_jax.tasks.image_grid import draw_predictions
from ttt_kernels import compat

Batch = dict[str, jax.Array]

_PICTURED = 40  # images of a grid


class Classification:
    """Labelled images; a `ttt_jax.tasks.base.Task`.

    A batch is as of `ttt_jax.data.images.ImageBatches`.
    """

    counted = "images"
    loss_name = "loss (nats per image)"
    rows = "images"

    def __init__(self, config: Any):
        """Checks the model; the images are opened when they are first needed.

        Args:
          config: a `ttt_jax.config.Config` whose data is an `ImageConfig`.

        Raises:
          ValueError: the model does not classify images.
        """
        if not hasattr(config.model, "num_classes"):
            raise ValueError(
                f"config.model is a {type(config.model).__name__}, which does not classify images;"
                " with an ImageConfig use a ViTTT, H-ViTTT or ViT"
            )
        self.data, self.model = config.data, config.model

    @functools.cached_property
    def _splits(self) -> dict[str, image_sources.ImageSet]:
        """The two splits, checked. Raises ValueError where they cannot be used."""
        pair = image_sources.open_images(self.data.source, self.data.eval_fraction)
        splits = dict(zip(("train", "eval"), pair, strict=True))
        for name, images in splits.items():
            check_readable(images, f"{self.data.source!r}, split {name},")
        classes = len(splits["train"].classes)
        if classes > self.model.num_classes:
            raise ValueError(
                f"config.model.num_classes={self.model.num_classes} is too small for "
                f"{self.data.source!r}, which has {classes} classes"
            )
        return splits

    def describe(self) -> str:
        """Names the images, their numbers and their hash.

        Warns of held-out images that are trained on, too (see `shared_images`).

        Raises:
          ValueError: they cannot be used.
        """
        train, held_out = self._splits["train"], self._splits["eval"]
        if processes.is_first():
            names = shared_images(train, held_out)
            warn_of_shared(len(names), names[:3], "images", "bytes", self.data.source)
        return (
            f"Images: {self.data.source!r}, {len(train):,} to train on and {len(held_out):,} held "
            f"out, {len(train.classes)} classes, hash {train.hash[:8]}{held_out.hash[:8]}"
        )

    def batches(self, split: str, mesh: Mesh | None = None) -> Any:
        """Opens this process's rows of a split, "train" or "eval" (see `Task.batches`)."""
        rows, block, blocks = rows_to_read(self.data.batch_size, mesh, self.rows)
        return image_iterator(
            self._splits[split],
            self.data,
            train=split == "train",
            image_size=self.model.image_size,
            batch_size=rows,
            process_index=block,
            process_count=blocks,
        )

    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of a batch, without opening the images."""
        rows, size = self.data.batch_size, self.model.image_size
        names = {"labels": np.int32, "other_labels": np.int32}
        names |= {"share": np.float32, "weights": np.float32}
        example = {name: jax.ShapeDtypeStruct((rows,), dtype) for name, dtype in names.items()}
        return {"images": jax.ShapeDtypeStruct((rows, size, size, 3), np.uint8), **example}

    def loss(
        self, model: nnx.Module, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Sums the cross entropy over the images that count (see `Task.loss`).

            t = (1 − ε) (s e_label + (1 − s) e_other) + ε / K        s = share, ε = label_smoothing
            loss = −Σ_k t_k log softmax(z)_k

        The statistic is unreadable, the part of the rows whose image was damaged.
        """
        logits = model(normalise(batch["images"]), key=key)
        log_p = jax.nn.log_softmax(logits)
        own, other = pick(log_p, batch["labels"]), pick(log_p, batch["other_labels"])
        hard = batch["share"] * own + (1 - batch["share"]) * other
        smoothing = self.data.label_smoothing
        losses = -((1 - smoothing) * hard + smoothing * jnp.mean(log_p, axis=-1))
        weights = batch["weights"]
        unreadable = jnp.mean((batch["labels"] >= 0) & (weights == 0), dtype=jnp.float32)
        return jnp.sum(weights * losses), {"count": jnp.sum(weights), "unreadable": unreadable}

    def flops_per_step(self, model: nnx.Module) -> float:
        """Counts every row of a batch."""
        return self.data.batch_size * model.flops_per_image()

    def evaluate(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, mesh: Mesh, max_batches: int = 0
    ) -> Result:
        """Computes top-1, top-5 and the cross entropy over all held-out images, each once.

        Raises:
          ValueError: none of them can be read.
        """
        scores = ClassScores(self._splits["eval"].classes)
        eval_step = _eval_step(mesh)
        with jax.set_mesh(mesh):
            for number, batch in enumerate(self.batches("eval", mesh), start=1):
                out = eval_step(graphdef, params, buffers, place_whole_rows(batch, mesh, self.rows))
                scores.add(*(np.asarray(x) for x in out))
                if number == max_batches:
                    break
        return scores.result()

    def artefacts(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, workdir: pathlib.Path
    ) -> list[pathlib.Path]:
        """Draws held-out images with what the model takes them for: predictions.png."""
        if jax.process_count() > 1:  # the arrays are spread; launch/evaluate.py draws on one host
            return []
        images = self._splits["eval"]
        shown, labels = [], []
        for index in np.unique(np.linspace(0, len(images) - 1, _PICTURED).astype(int)):
            try:
                image, label = images.read(int(index))
            except UnreadableImage:
                continue
            shown.append(augment.eval_image(image, self.model.image_size, self.data.eval_crop))
            labels.append(label)
        pixels = np.stack(shown)
        logits = _logits(graphdef, params, buffers, pixels)
        path = pathlib.Path(workdir) / "predictions.png"
        names = images.classes
        draw_predictions(path, pixels, labels, np.asarray(jax.nn.softmax(logits)), names)
        return [path]


def normalise(images: jax.Array) -> jax.Array:
    """Bytes to numbers around zero: (x / 255 − mean) / deviation of ImageNet's channels.

    Args:
      images: uint8 [..., 3].

    Returns:
      float32 [..., 3].

    >>> abs(normalise(jnp.array([124, 116, 104], jnp.uint8))).max() < 0.02
    Array(True, dtype=bool)
    """
    mean, deviation = jnp.asarray(augment.MEAN), jnp.asarray(augment.DEVIATION)
    return (images.astype(jnp.float32) / 255 - mean) / deviation


def pick(values: jax.Array, labels: jax.Array) -> jax.Array:
    """values[row, labels[row]] as a masked sum, local also when the classes are cut over devices.

    Args:
      values: [rows, classes].
      labels: int [rows]; outside the classes the result is 0.

    Returns:
      [rows].

    >>> pick(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, -1])).tolist()
    [2.0, 0.0]
    """
    chosen = jnp.arange(values.shape[-1]) == labels[:, None]
    return jnp.sum(jnp.where(chosen, values, 0), axis=-1)


def label_rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """How many classes are ranked before the label: 0 is a top-1 hit, below 5 a top-5 hit.

    Of equal scores the lower class comes first; a score that is not finite is ranked last.

    Args:
      logits: [rows, classes].
      labels: int [rows].

    Returns:
      int32 [rows].

    >>> label_rank(jnp.array([[0.0, 2.0, 2.0], [jnp.nan, 1.0, 1.0]]), jnp.array([2, 0])).tolist()
    [1, 3]
    """
    classes = logits.shape[-1]
    own = pick(logits, labels)[:, None]
    first = (logits > own) | ((logits == own) & (jnp.arange(classes) < labels[:, None]))
    rank = jnp.sum(first, axis=-1, dtype=jnp.int32)
    return jnp.where(jnp.all(jnp.isfinite(logits), axis=-1), rank, classes)


@functools.cache
def _eval_step(mesh: Mesh) -> Any:
    """Compiles the scores of each row; the result is whole on every process."""

    def eval_step(graphdef, params, buffers, batch):
        logits = nnx.merge(graphdef, params, buffers)(normalise(batch["images"]))
        labels = batch["labels"]
        losses = jax.nn.logsumexp(logits, axis=-1) - pick(logits, labels)
        return losses, label_rank(logits, labels), labels, batch["weights"]

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        eval_step,
        static_argnums=0,
        out_shardings=whole,
        compiler_options=compat.program_options(),
    )


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, buffers, images):
    return nnx.merge(graphdef, params, buffers)(normalise(images))
