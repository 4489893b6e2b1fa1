"""Tables of benchmark rows: aligned text, CSV, Markdown and a plot."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Sequence

Row = dict[str, object]
"""Column name -> value; all rows of a table have the same columns."""


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def text(rows: Sequence[Row]) -> str:
    """The rows as aligned columns.

    >>> print(text([{"case": "a", "ms": 1.5}, {"case": "long", "ms": None}]))
    case  ms
    a     1.5
    long  -
    """
    if not rows:
        return "(no rows)"
    cells = [list(rows[0])] + [[_cell(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table.

    >>> print(markdown([{"case": "a", "ms": 1.5}]))
    | case | ms |
    | --- | --- |
    | a | 1.5 |
    """
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_cell(v) for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(rows: Sequence[Row], folder: str | pathlib.Path, name: str, title: str) -> None:
    """Writes `name.csv`, `name.md` and, where matplotlib is installed, `name.png` into `folder`.

    Raises:
      OSError: the folder cannot be made or written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.md").write_text(f"{title}\n\n{markdown(rows)}\n")
    _plot(rows, folder / f"{name}.png", title)


def _plot(rows: Sequence[Row], path: pathlib.Path, title: str) -> None:
    """Bars of tokens a second, or of milliseconds where a suite has no tokens."""
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
