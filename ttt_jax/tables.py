"""Tables: aligned text, CSV and Markdown."""

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


def write_csv(rows: Sequence[Row], path: str | pathlib.Path) -> None:
    """Writes the rows, at least one, as a CSV file with a line of names.

    Raises:
      OSError: the file cannot be written.
    """
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def save(rows: Sequence[Row], folder: str | pathlib.Path, name: str, title: str) -> None:
    """Writes `name.csv` and `name.md` into `folder`.

    Args:
      rows: the table, at least one row.
      folder: where to write; made where it is missing.
      name: of the files.
      title: the first line of the Markdown.

    Raises:
      OSError: the folder cannot be made or written.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows, folder / f"{name}.csv")
    (folder / f"{name}.md").write_text(f"{title}\n\n{markdown(rows)}\n")
