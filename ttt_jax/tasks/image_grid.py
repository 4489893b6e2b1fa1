"""A picture of images and of what a classifier takes them for."""

import pathlib
from collections.abc import Sequence

import numpy as np

_COLUMNS = 8


def draw_predictions(
    path: pathlib.Path,
    images: np.ndarray,
    labels: Sequence[int],
    probabilities: np.ndarray,
    classes: Sequence[str],
) -> None:
    """Writes a grid of images, each under its predicted class; wrong ones are red and say which.

    Args:
      path: of a PNG file.
      images: uint8 [n, height, width, 3].
      labels: the true classes.
      probabilities: [n, at least the number of classes].
      classes: their names.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    rows = -(-len(images) // _COLUMNS)
    height = 1.5 * images.shape[1] / images.shape[2] + 0.5  # inches, two lines of title included
    figure = Figure(figsize=(1.5 * _COLUMNS, height * rows), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    predicted = np.argmax(probabilities, axis=1)
    for axis, image, label, guess, p in zip(
        axes, images, labels, predicted, probabilities, strict=False
    ):
        name = classes[guess] if guess < len(classes) else f"output {guess}"
        right = guess == label
        title = f"{_short(name)} {100 * p[guess]:.0f} %"
        axis.imshow(image, interpolation="nearest")
        axis.set_title(
            title if right else f"{title}\nis {_short(classes[label])}",
            fontsize=8,
            color="black" if right else "red",
            parse_math=False,  # a class may be named by dollars
        )
    figure.savefig(path, dpi=100)


def _short(name: str) -> str:
    """A name of at most 17 letters, of which both ends are left.

    >>> _short("black-footed albatross"), _short("ant")
    ('black-foo…batross', 'ant')
    """
    return name if len(name) <= 17 else f"{name[:9]}…{name[-7:]}"
