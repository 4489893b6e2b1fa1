"""The six-step reduction on three tasks: quality over seeds, and speed in every mode.

Each variant and the softmax baseline is trained alike (same data in the same order, same steps)
from several seeds, evaluated over the whole held-out split, and the first seed is timed in
inference. Compare with Table 1 of arXiv 2602.21204.
"""

import dataclasses
import logging
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from ttt_jax import metrics, sharding
from ttt_jax.checkpoint import LoadedModel, load_arrays
from ttt_jax.experiments import paper
from ttt_jax.experiments.cells import Cell, Values, training_cell
from ttt_jax.experiments.report import Report, compare_order, new_figure, plus_minus, style
from ttt_jax.experiments.systems import TASKS, TaskModels, make_config, variant_name
from ttt_jax.tasks import make_task
from ttt_jax.tasks.base import place_whole_rows
from ttt_jax.train_step import abstract_params

logger = logging.getLogger(__name__)

MODES = ("recurrent", "parallel", "kernel")
SOFTMAX = "softmax"


def cells(
    scale: str,
    seeds: int,
    tasks: Sequence[str] = tuple(TASKS),
    models: Sequence[str] = (),
    fields: Values | None = None,
) -> list[Cell]:
    """Lists the cells: task x (variants and baseline) x seeds, the first seed of all first.

    Args:
      scale: one of `systems.SCALES`.
      seeds: seeds of each model.
      tasks: keys of `TASKS`.
      models: titles to run, for example ("V0", "softmax"); none given: all.
      fields: dotted configuration fields to change in every cell.

    Returns:
      Cells named "task-model-seed".

    Raises:
      ValueError: a model that no task has.

    >>> [cell.name for cell in cells("tiny", 1, ["images"])]
    ['images-V0-0', 'images-V1-0', 'images-V3-0', 'images-V6-0', 'images-softmax-0']
    """
    known = {title for task in tasks for title in titles(TASKS[task])}
    unknown = [title for title in models if title not in known]
    if unknown:
        raise ValueError(f"models={unknown[0]!r} must be one of {sorted(known)}")
    return [
        model_cell(task, title, scale, seed, fields or {})
        for seed in range(seeds)
        for task in tasks
        for title in titles(TASKS[task])
        if title in (models or known)
    ]


def titles(models: TaskModels) -> list[str]:
    """Returns the titles of a task's models, the baseline last."""
    return [*map(variant_name, models.variants), *([SOFTMAX] if models.baseline else [])]


def model_cell(task: str, title: str, scale: str, seed: int, fields: Values) -> Cell:
    """Makes the cell of one model.

    Args:
      task: a key of `TASKS`.
      title: one of `titles`.
      scale, seed: as in `make_config`.
      fields: dotted configuration fields to change.
    """
    baseline = title == SOFTMAX
    own = {} if baseline else {"model.variant": int(title[1:])}
    config = make_config(task, scale, seed, {**own, **fields}, baseline)

    def measure(workdir: pathlib.Path) -> Values:
        loaded = load_arrays(workdir)
        count = sum(x.size for x in jax.tree.leaves(loaded.params))
        # Seeds differ in nothing that costs time, and each mode has to be compiled.
        return {"parameters": count} | (measure_speed(loaded) if seed == 0 else {})

    return training_cell(f"{task}-{title}-{seed}", config, measure)


def measure_speed(loaded: LoadedModel) -> Values:
    """Times inference of a trained model in each mode that it has.

    Args:
      loaded: the model.

    Returns:
      {"<mode>_rate": what the task counts a second}, or {"rate": the same} for a model with one
      form.
    """
    found: Values = {}
    if not hasattr(loaded.config.model, "mode"):
        return {"rate": forward_rate(loaded)}
    for mode in MODES:
        model = dataclasses.replace(loaded.config.model, mode=mode)
        config = dataclasses.replace(loaded.config, model=model)
        try:
            config.validate()
            found[f"{mode}_rate"] = forward_rate(loaded, config)
        except (ValueError, NotImplementedError) as error:
            logger.info("%s: %s", mode, error)
        except jax.errors.JaxRuntimeError as error:  # must not cost the trained model
            logger.warning("%s mode failed: %s", mode, error)
    return found


def forward_rate(
    loaded: LoadedModel, config: Any = None, repeats: int = 5, seconds: float = 0.3
) -> float:
    """Times the forward pass of the task's loss on one batch.

    Args:
      loaded: a trained model.
      config: its configuration with another mode; None keeps its own.
      repeats: timed passes after one that compiles, at least.
      seconds: that the passes take together, at least.

    Returns:
      What the task counts a second, of the median pass.

    Raises:
      ValueError: the model cannot run in this mode; the message says why.
    """
    config = config or loaded.config
    task, mesh = make_task(config), sharding.make_mesh()
    graphdef, *_ = abstract_params(config.model, mesh)

    @jax.jit
    def forward(params: Any, buffers: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, params, buffers)
        total, stats = task.loss(model, batch, jax.random.key(0))
        return total, stats["count"]

    batch = place_whole_rows(next(iter(task.batches("train"))), mesh)
    with jax.set_mesh(mesh):
        _, count = jax.block_until_ready(forward(loaded.params, loaded.buffers, batch))
        passes: list[float] = []
        while len(passes) < repeats or sum(passes) < seconds:
            start = time.perf_counter()
            jax.block_until_ready(forward(loaded.params, loaded.buffers, batch))
            passes.append(time.perf_counter() - start)
    return float(count) / statistics.median(passes)


def by_title(
    task: str, results: dict[str, Values], names: Sequence[str]
) -> dict[str, list[Values]]:
    """Groups the finished cells of a task by the title of their model, all seeds of each."""
    groups: dict[str, list[Values]] = {}
    for title in names:
        done = [v for name, v in results.items() if name.startswith(f"{task}-{title}-")]
        groups[title] = [values for values in done if "failed" not in values]
    return groups


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes the tables and pictures of all tasks that have results.

    Args:
      results: of `run_cells`.
      out: the report.
      root: folder of the experiments, for the loss curves.
    """
    for task, models in TASKS.items():
        names = [t for t in titles(models) if any(r.startswith(f"{task}-{t}-") for r in results)]
        groups = by_title(task, results, names)
        if not groups:
            continue
        out.heading(f"The reduction: {task}")
        rows = [_row(models, title, groups[title], results) for title in names]
        unit = " in per cent" if models.scale_of_paper == 100.0 else ""
        caption = (
            f"{models.metric}{unit} (mean ± standard deviation over seeds, {models.better} is "
            f"better), the paper's value at its own scale, and {_counted(task)} a second: training "
            "(median of the seeds), and inference of seed 0 in each mode."
        )
        out.table(f"ablation_{task}", rows, caption)
        ours = {t: [v[models.metric] for v in group] for t, group in groups.items() if group}
        out.text(compare_order(ours, paper.ABLATION[task], models.better))
        _draw(models, groups, out, root)


def _row(
    models: TaskModels, title: str, group: list[Values], results: dict[str, Values]
) -> dict[str, Any]:
    """One line of a task's table."""
    row: dict[str, Any] = {"model": title, "parameters": None, models.metric: None}
    row["paper"] = paper.ABLATION[models.task].get(title)
    rates = ("train_rate", "rate", *(f"{mode}_rate" for mode in MODES))
    if group:
        row["parameters"] = f"{group[0]['parameters']:,}"
        scaled = [models.scale_of_paper * v[models.metric] for v in group]
        row[models.metric] = plus_minus(scaled)
    for name in rates:
        found = [v[name] for v in group if v.get(name)]
        row[name.replace("_", " ")] = f"{statistics.median(found):,.0f}" if found else None
    failed = [v["failed"] for n, v in results.items()
              if n.startswith(f"{models.task}-{title}-") and "failed" in v]  # fmt: skip
    row["note"] = f"FAILED: {failed[0]}" if failed else ""
    return row


def _counted(task: str) -> str:
    return {"language": "tokens", "views": "views", "images": "images"}[task]


def _draw(
    models: TaskModels, groups: dict[str, list[Values]], out: Report, root: pathlib.Path
) -> None:
    """Draws loss curves of the first seed, the metric of all seeds, and the rates."""
    task = models.task
    figure, (curves, points, bars) = new_figure(3)
    for index, title in enumerate(groups):
        if not groups[title]:
            continue
        path = root / "cells" / groups[title][0]["folder"] / "metrics.jsonl"
        lines = metrics.read_metrics(path)
        losses = [(r["step"], r["loss"]) for r in lines if r["kind"] == "train" and r["loss"]]
        look = style(index)
        if losses:
            curves.plot(*zip(*losses, strict=True), label=title, **{**look, "marker": ""})
        values = [v[models.metric] for v in groups[title]]
        points.plot([title] * len(values), values, linestyle="", **_marker(look))
    curves.set(xlabel="step", ylabel="training loss", title=f"{task}: training")
    if curves.lines:
        curves.legend(fontsize="small")
    title = f"{models.metric}, each seed ({models.better} is better)"
    points.set(ylabel=models.metric, title=title)
    shown = [m for m in ("rate", *(f"{m}_rate" for m in MODES))
             if any(v.get(m) for group in groups.values() for v in group)]  # fmt: skip
    width = 0.8 / max(1, len(shown))
    for place, name in enumerate(shown):
        heights = [
            statistics.median([v[name] for v in group if v.get(name)] or [0.0])
            for group in groups.values()
        ]
        shift = (place - (len(shown) - 1) / 2) * width
        label = name.removesuffix("_rate").replace("rate", "only form")
        color = style(place)["color"]
        bars.bar(np.arange(len(groups)) + shift, heights, width, label=label, color=color)
    bars.set_xticks(np.arange(len(groups)), list(groups))
    bars.set(ylabel=f"{_counted(task)} a second", title="inference")
    if shown:
        bars.legend(fontsize="small")
    caption = f"{task}: loss of the first seed, {models.metric} of each seed, inference rates."
    out.figure(f"ablation_{task}", figure, caption)


def _marker(look: dict[str, Any]) -> dict[str, Any]:
    return {name: look[name] for name in ("color", "marker")}
