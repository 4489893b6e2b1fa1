"""Sums of a classifier's scores over a held-out split, in float64 on the host."""

import numpy as np

from ttt_jax.tasks.base import Result

_LISTED = 20  # classes of which each has a line


class ClassScores:
    """Top-1, top-5 and loss, over all images and by class.

    >>> scores = ClassScores(("cat", "dog"))
    >>> scores.add(np.array([0.5, 1.5, 9.0]), np.array([0, 1, 0]), np.array([0, 1, -1]),
    ...            np.array([1.0, 1.0, 0.0]))
    >>> scores.result().summary
    'top-1 50.00 %, top-5 100.00 %, of 2 images; most frequent class 50.00 %'
    """

    def __init__(self, classes: tuple[str, ...]):
        """Starts with no image.

        Args:
          classes: names of the classes.
        """
        self._classes = classes
        self._images = np.zeros(len(classes), np.int64)
        self._hits = np.zeros((2, len(classes)), np.int64)  # top-1 and top-5
        self._loss, self._unreadable = 0.0, 0

    def add(
        self, losses: np.ndarray, ranks: np.ndarray, labels: np.ndarray, weights: np.ndarray
    ) -> None:
        """Adds a batch; each array is [rows].

        Args:
          losses: cross entropy, in nats.
          ranks: of the label among the classes, 0 is a hit.
          labels: -1 for a row that only fills the batch.
          weights: 0 for such a row and for a damaged image.
        """
        real = weights > 0
        self._unreadable += int(np.sum(~real & (labels >= 0)))
        labels, ranks, count = labels[real], ranks[real], len(self._classes)
        self._loss += float(np.sum(losses[real], dtype=np.float64))
        self._images += np.bincount(labels, minlength=count)
        for hits, limit in zip(self._hits, (1, 5), strict=True):
            hits += np.bincount(labels[ranks < limit], minlength=count)

    def result(self) -> Result:
        """Returns the scores beside that of always answering the most frequent class.

        Raises:
          ValueError: no image was added.
        """
        total = int(self._images.sum())
        if total == 0:
            raise ValueError("the held-out split has no image that can be read")
        top1, top5 = self._hits.sum(axis=1) / total
        majority = self._images.max() / total
        metrics = {
            "top1": float(top1),
            "top5": float(top5),
            "loss": self._loss / total,
            "majority_top1": float(majority),
            "images": float(total),
            "unreadable": float(self._unreadable),
        }
        missing = f", {self._unreadable} unreadable left out" if self._unreadable else ""
        return Result(
            metrics=metrics,
            summary=f"top-1 {top1:.2%}, top-5 {top5:.2%}, of {total:,} images{missing}; most "
            f"frequent class {majority:.2%}".replace("%", " %"),
            table=self._table(),
            details={"top1_by_class": [float(x) for x in self._by_class()]},
        )

    def _by_class(self) -> np.ndarray:
        """Top-1 of each class; 0 where it has no image."""
        return self._hits[0] / np.maximum(self._images, 1)

    def _table(self) -> str:
        """One line a class; of many classes those with the worst top-1."""
        top1, seen = self._by_class(), np.flatnonzero(self._images)
        order = seen
        if len(seen) > _LISTED:
            order = seen[np.argsort(top1[seen], kind="stable")[:_LISTED]]
        width = max(len("class"), *(len(self._classes[index]) for index in order))
        lines = [f"{'class':>{width}}  images   top-1"]
        for index in order:
            name, images = self._classes[index], self._images[index]
            lines.append(f"{name:>{width}}  {images:>6,}  {100 * top1[index]:>5.1f} %")
        return "\n".join(lines)
