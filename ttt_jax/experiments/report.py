"""A report that can be read and cited: Markdown with tables (CSV beside them) and pictures."""

import math
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

import jax
from matplotlib.figure import Figure

from ttt_jax import tables
from ttt_jax.metrics import note

# Okabe and Ito's colours, told apart by the colour-blind; with a line style each, also in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def style(index: int) -> dict[str, Any]:
    """Returns colour, line style and marker of the index-th series of a plot.

    >>> style(0)
    {'color': '#0072B2', 'linestyle': '-', 'marker': 'o'}
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[index // 2 % len(STYLES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def new_figure(panels: int = 1, width: float = 5.0, height: float = 4.0) -> tuple[Figure, list]:
    """Makes a figure with some panels side by side, outside of pyplot.

    Args:
      panels: number of axes.
      width, height: of a panel, in inches.

    Returns:
      (the figure, its axes as a list).
    """
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(alpha=0.3)
    return figure, list(axes)


class Report:
    """Collects paragraphs, tables and figures, and writes report.md.

    >>> import tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> report = Report("Ascent", folder, command="python launch/reproduce.py")
    >>> report.table("result", [{"model": "V0", "perplexity": 12.5}], "Perplexity.")
    <BLANKLINE>
    Perplexity.
    model  perplexity
    V0     12.5
    >>> report.write().name
    'report.md'
    >>> sorted(path.name for path in folder.iterdir())
    ['report.md', 'result.csv', 'result.md']
    """

    def __init__(self, title: str, folder: pathlib.Path, command: str):
        """Begins a report.

        Args:
          title: its heading.
          folder: where report.md, the tables and the pictures go; made where it is missing.
          command: the command line that makes it again.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = [f"# {title}", f"Command: `{command}`", describe_machine()]

    def heading(self, title: str) -> None:
        """Adds a heading of the second level."""
        self._parts.append(f"## {title}")

    def text(self, paragraph: str) -> None:
        """Adds a paragraph."""
        self._parts.append(paragraph)

    def table(self, name: str, rows: Sequence[tables.Row], caption: str) -> None:
        """Adds a table, prints it, and writes it as `name`.csv and `name`.md too."""
        if not rows:
            self.text(f"{caption} (no rows)")
            return
        note(f"\n{caption}\n{tables.text(rows)}")
        tables.save(rows, self.folder, name, caption)
        self._parts += [caption, tables.markdown(rows)]

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """Adds a picture, written as `name`.png."""
        figure.savefig(self.folder / f"{name}.png", dpi=150)
        self._parts.append(f"![{caption}]({name}.png)\n\n*{caption}*")

    def write(self) -> pathlib.Path:
        """Writes report.md; returns its path."""
        path = self.folder / "report.md"
        draft = path.with_suffix(".tmp")
        draft.write_text("\n\n".join(self._parts) + "\n")
        draft.replace(path)
        return path


def describe_machine() -> str:
    """Names devices, processor and versions in one line."""
    devices = jax.devices()
    return (
        f"Machine: {len(devices)} x {devices[0].device_kind}, {platform.machine()}; "
        f"Python {sys.version.split()[0]}, jax {jax.__version__}"
    )


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the standard deviation (n − 1; 0 for one value).

    >>> mean_and_spread([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    """Writes mean ± standard deviation.

    >>> plus_minus([1.0, 3.0], 2)
    '2.00 ± 1.41'
    """
    mean, spread = mean_and_spread(values)
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if len(values) > 1 else "")


def compare_order(ours: dict[str, Sequence[float]], paper: dict[str, float], better: str) -> str:
    """Says whether our order of the models is that of the paper.

        tau = (agreeing pairs − disagreeing pairs) / pairs          (Kendall)

    A pair counts as resolved where our means are further apart than the sum of their spreads and
    the paper's values differ; with one value of each there is no spread, and nothing is resolved.
    Of equal models this takes 21 % of the pairs for different with two seeds, 8 % with three and
    2 % with five (normal spread), as the sentence says. Resolved pairs are named, the better first.

    Args:
      ours: model -> the metric of each seed or run.
      paper: model -> the paper's value.
      better: "higher" or "lower".

    >>> compare_order({"V0": [3.0, 3.1], "V1": [1.0, 1.1]}, {"V0": 16.4, "V1": 15.9}, "lower")
    "Of 1 pairs of models 1 are in the paper's order (tau +1.00); our seeds resolve 1, and..."
    """
    names = [name for name in ours if name in paper and ours[name]]
    agreeing, disagreeing = 0, 0
    held: list[str] = []
    broken: list[str] = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            (mean_a, spread_a), (mean_b, spread_b) = map(mean_and_spread, (ours[a], ours[b]))
            sign = (mean_a - mean_b) * (paper[a] - paper[b])
            agreeing, disagreeing = agreeing + (sign > 0), disagreeing + (sign < 0)
            several = min(len(ours[a]), len(ours[b])) > 1
            if several and sign and abs(mean_a - mean_b) > spread_a + spread_b:
                first, second = (a, b) if (mean_a > mean_b) == (better == "higher") else (b, a)
                (held if sign > 0 else broken).append(f"{first} before {second}")
    pairs = len(names) * (len(names) - 1) // 2
    if not pairs:
        return "Too few models to compare their order with the paper's."
    pick = max if better == "higher" else min
    best = pick(names, key=lambda name: mean_and_spread(ours[name])[0])
    if all(len(ours[name]) == 1 for name in names):
        seeds = "one value of each resolves none of them"
    else:
        resolved = len(held) + len(broken)
        seeds = f"our seeds resolve {resolved}, and in {len(held)} of these the paper's order holds"
        if held:
            seeds += f"; resolved as in the paper: {', '.join(held)}"
        if broken:
            seeds += f"; resolved against it: {', '.join(broken)}"
        if resolved:
            seeds += " (chance alone resolves 1 in 5 pairs with two seeds, 1 in 12 with three)"
    return (
        f"Of {pairs} pairs of models {agreeing} are in the paper's order (tau "
        f"{(agreeing - disagreeing) / pairs:+.2f}); {seeds}. "
        f"Best here: {best}; best in the paper: {pick(names, key=paper.__getitem__)}."
    )
