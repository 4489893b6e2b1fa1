"""Bars of benchmark rows."""

import pathlib
from collections.abc import Sequence

from ttt_jax.tables import Row


def plot(rows: Sequence[Row], path: pathlib.Path, title: str) -> None:
    """Draws tokens a second, or milliseconds where a suite has no tokens, if matplotlib is there.

    Args:
      rows: rows of a suite.
      path: the PNG to write.
      title: of the plot.
    """
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    value = "Mtok/s" if "Mtok/s" in rows[0] else "ms"
    rows = [row for row in rows if row[value] is not None]
    if not rows:
        return
    labels = [" ".join(str(row[c]) for c in ("case", "implementation", "pass")) for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.25 * len(rows)))
    axes.barh(labels, [row[value] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(value)
    axes.set_title(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
