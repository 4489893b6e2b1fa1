"""The table of variants: LaCT-LLM V0, V2, V6 and the softmax baseline, trained alike.

Each model is a cell: it is trained by `ttt_jax.train.main` in its own folder, evaluated over the
whole held-out split, and timed in inference. A cell that is done is not run again, one that was
interrupted goes on from its checkpoint, and one that fails is named in the table while the
others go on. Compare with Table 1 of arXiv 2602.21204 (760M, FineWeb-Edu): perplexity 16.43 for
V0, 16.31 for V2, 16.80 for V6.
"""

import csv
import dataclasses
import importlib.util
import json
import logging
import os
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from ttt_jax import config as config_lib
from ttt_jax import config_files, evaluate, metrics, sharding, train
from ttt_jax.checkpoint import load_model
from ttt_jax.metrics import note
from ttt_jax.train_step import abstract_params

logger = logging.getLogger(__name__)

# Title of each cell -> (configuration file, variant or None).
CELLS: dict[str, tuple[str, int | None]] = {
    "V0": ("lact_llm", 0),
    "V2": ("lact_llm", 2),
    "V6": ("lact_llm", 6),
    "softmax": ("transformer", None),
}
# Per scale: optimizer steps of a cell (None: those of the configuration), tokens of the sequence
# on which inference is timed.
SCALES: dict[str, tuple[int | None, int]] = {
    "tiny": (100, 2048),
    "125m": (None, 32768),
    "760m": (None, 32768),
    "3b": (None, 32768),
}
# Attribute of a result -> (heading, how to write it).
COLUMNS = {
    "model": ("model", "{}"),
    "parameters": ("parameters", "{:,}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "train_tokens_per_second": ("training tok/s", "{:,.0f}"),
    "recurrent_tokens_per_second": ("inference tok/s, recurrent", "{:,.0f}"),
    "parallel_tokens_per_second": ("inference tok/s, parallel", "{:,.0f}"),
    "note": ("note", "{}"),
}


@dataclasses.dataclass(kw_only=True)
class Cell:
    """One row of the table; None where there is no number.

    Attributes:
      model: title.
      parameters: number of parameter values.
      perplexity: over the whole held-out split.
      unigram_perplexity: the baseline on the same split.
      train_tokens_per_second: median over the progress lines of the training.
      recurrent_tokens_per_second, parallel_tokens_per_second: tokens of one sequence over the
        median time of a forward pass, features and the last token's logits, batch 1.
      note: why a number is missing.
    """

    model: str
    parameters: int | None = None
    perplexity: float | None = None
    unigram_perplexity: float | None = None
    train_tokens_per_second: float | None = None
    recurrent_tokens_per_second: float | None = None
    parallel_tokens_per_second: float | None = None
    note: str = ""


def cell_config(title: str, scale: str, steps: int | None, data: dict[str, Any]) -> Any:
    """Builds the configuration of one cell.

    Args:
      title: a key of `CELLS`.
      scale: a key of `SCALES`.
      steps: optimizer steps; None takes the scale's.
      data: fields of `DataConfig` to change.

    Returns:
      A `ttt_jax.config.Config`.

    >>> cell_config("V2", "tiny", 7, {}).model.variant
    2
    """
    name, variant = CELLS[title]
    config = config_files.load(f"{name}:{scale}")
    if variant is not None:
        config.model.variant = variant
    steps = SCALES[scale][0] if steps is None else steps
    if steps is not None:
        config.train.steps = steps
    config.data = dataclasses.replace(config.data, **data)
    return config


def forward_rate(model_config: Any, params: Any, length: int, repeats: int = 5) -> float:
    """Times inference over one sequence.

    Args:
      model_config: the model's configuration; its `mode` is the one that is timed.
      params: parameters, as of `nnx.to_pure_dict`.
      length: tokens of the sequence.
      repeats: timed passes after one that compiles.

    Returns:
      Tokens a second: length over the median time of a pass (features of all tokens, logits of
      the last), batch 1.

    Raises:
      ValueError: the model cannot run in this mode; the message says why.
    """
    model_config.validate()
    graphdef, *_ = abstract_params(model_config, sharding.make_mesh())

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return model.logits(model.features(tokens)[0][:, -1])

    tokens = np.random.default_rng(0).integers(0, model_config.vocab_size, (1, length))
    tokens = jax.device_put(tokens.astype(np.int32))
    forward(params, tokens).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        forward(params, tokens).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return length / statistics.median(seconds)


def measure_cell(title: str, workdir: pathlib.Path, length: int) -> Cell:
    """Collects the numbers of a trained cell.

    Args:
      title: a key of `CELLS`.
      workdir: the cell's folder, with a finished run.
      length: tokens of the sequence on which inference is timed.
    """
    config, model, _ = load_model(workdir)
    report = evaluate.read_report(workdir)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    lines = [r for r in metrics.read_metrics(workdir / "metrics.jsonl") if r["kind"] == "train"]
    rates = [r["tokens_per_second"] for r in lines if r["tokens_per_second"] is not None]
    cell = Cell(
        model=title,
        parameters=model.num_params(),
        perplexity=report["perplexity"],
        unigram_perplexity=report["unigram_perplexity"],
        train_tokens_per_second=statistics.median(rates) if rates else None,
    )
    if not hasattr(config.model, "mode"):
        cell.parallel_tokens_per_second = forward_rate(config.model, params, length)
        cell.note = "softmax attention has one form"
        return cell
    for mode in ("recurrent", "parallel"):
        try:
            rate = forward_rate(dataclasses.replace(config.model, mode=mode), params, length)
        except ValueError as error:
            logger.info("%s, %s: %s", title, mode, error)
            cell.note = f"no {mode} form: the update depends on the state"
            continue
        setattr(cell, f"{mode}_tokens_per_second", rate)
    return cell


def run_cell(title: str, config: Any, workdir: pathlib.Path, length: int) -> tuple[Cell, int]:
    """Trains and measures one cell, or reads it if it is done.

    Args:
      title: a key of `CELLS`.
      config: of `cell_config`.
      workdir: the cell's folder.
      length: tokens of the sequence on which inference is timed.

    Returns:
      (the cell, exit code of its training: 0, or 128 + n after signal n). An error inside the
      cell is reported in its note.
    """
    done = workdir / "cell.json"
    wanted = config_lib.to_dict(config)
    if done.exists():
        record = json.loads(done.read_text())
        if record["config"] == json.loads(json.dumps(wanted)):
            note(f"{title}: done before")
            return Cell(**record["cell"]), 0
    note(f"\n=== {title}")
    try:
        code = train.main(config, workdir)
        if code > 128:
            return Cell(model=title, note="interrupted"), code
        if code:
            return Cell(model=title, note=f"FAILED: training ended with exit code {code}"), 0
        cell = measure_cell(title, workdir, length)
    except Exception as error:  # one failed cell must not cost the others
        logger.exception("cell %s failed", title)
        return Cell(model=title, note=f"FAILED: {type(error).__name__}: {error}"), 0
    done.write_text(json.dumps({"config": wanted, "cell": dataclasses.asdict(cell)}, indent=2))
    return cell, 0


def main(
    scale: str,
    workdir: str | os.PathLike[str],
    *,
    cells: Sequence[str] = tuple(CELLS),
    steps: int | None = None,
    data: dict[str, Any] | None = None,
) -> int:
    """Runs the cells that are not done, and writes the table.

    Args:
      scale: a key of `SCALES`.
      workdir: folder for one folder per cell, table.md, table.csv and ablation.png.
      cells: titles to run, keys of `CELLS`.
      steps: optimizer steps of each cell; None takes the scale's.
      data: fields of `DataConfig` to change, for example {"source": "books/*.txt"}.

    Returns:
      The exit code: 0; 1 if a cell failed; 128 + n if signal n ended a training.

    Raises:
      ValueError: an unknown scale or cell.
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} must be one of {sorted(SCALES)}")
    unknown = [title for title in cells if title not in CELLS]
    if unknown:
        raise ValueError(f"cells={list(cells)}: {unknown[0]!r} is not one of {list(CELLS)}")
    folder = pathlib.Path(workdir)
    configs = {title: cell_config(title, scale, steps, data or {}) for title in cells}
    for config in configs.values():
        config.validate()
    rows: list[Cell] = []
    for title, config in configs.items():
        cell, code = run_cell(title, config, folder / title, SCALES[scale][1])
        if code:
            return code
        rows.append(cell)
        jax.clear_caches()
    write_table(rows, folder)
    note(f"\n{format_table(rows)}\n")
    plot(rows, folder)
    note(f"Table and plot: {folder}/table.md, table.csv, ablation.png")
    return int(any(row.note.startswith("FAILED") for row in rows))


def _rows_of_text(rows: Sequence[Cell]) -> list[list[str]]:
    """Writes every cell of the table, the heading first and the unigram baseline last."""
    text = [[heading for heading, _ in COLUMNS.values()]]
    for row in rows:
        values = [(getattr(row, name), form) for name, (_, form) in COLUMNS.items()]
        text.append(["–" if value is None else form.format(value) for value, form in values])
    baselines = [row.unigram_perplexity for row in rows if row.unigram_perplexity is not None]
    if baselines:
        text.append(["unigram", "–", f"{baselines[0]:.3f}", "–", "–", "–", "frequencies alone"])
    return text


def format_table(rows: Sequence[Cell]) -> str:
    """Aligns the table for a terminal; the same text is valid Markdown.

    >>> print(format_table([Cell(model="V6", parameters=1000, perplexity=5.0)]).splitlines()[2])
    | V6    |      1,000 |      5.000 |              – |                          – | ...
    """
    text = _rows_of_text(rows)
    widths = [max(len(line[i]) for line in text) for i in range(len(COLUMNS))]
    left = (0, len(COLUMNS) - 1)

    def line(words: Sequence[str]) -> str:
        padded = [
            word.ljust(width) if i in left else word.rjust(width)
            for i, (word, width) in enumerate(zip(words, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(text[0]), line(rule), *(line(words) for words in text[1:])])


def write_table(rows: Sequence[Cell], folder: pathlib.Path) -> None:
    """Writes table.md and table.csv (plain numbers, empty where there is none) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(format_table(rows) + "\n")
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Cell)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def plot(rows: Sequence[Cell], folder: pathlib.Path) -> None:
    """Draws loss curves and inference rates as ablation.png, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    for row in rows:
        records = metrics.read_metrics(folder / row.model / "metrics.jsonl")
        points = [(r["step"], r["loss"]) for r in records if r["kind"] == "train" and r["loss"]]
        if points:
            curves.plot(*zip(*points, strict=True), label=row.model)
    curves.set(xlabel="step", ylabel="training loss (nats per token)")
    if curves.lines:
        curves.legend()
    places = np.arange(len(rows))
    for shift, mode in ((-0.2, "recurrent"), (0.2, "parallel")):
        rates = [getattr(row, f"{mode}_tokens_per_second") or 0.0 for row in rows]
        bars.bar(places + shift, rates, 0.4, label=mode)
    bars.set_xticks(places, [row.model for row in rows])
    bars.set(ylabel="inference tokens a second")
    bars.legend()
    figure.savefig(folder / "ablation.png", dpi=120)
