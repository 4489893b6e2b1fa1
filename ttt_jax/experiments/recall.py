"""What the state really holds: recall of pairs over state size and number of pairs.

Every system is the same small model with another mixer. It is trained on rows with several numbers
of pairs, and asked for all of them; a needle is a pair among random tokens. The paper has no such
experiment: it tells memory from mixing.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from flax import nnx

from ttt_jax.experiments import recall_model
from ttt_jax.experiments.cells import Cell, Values
from ttt_jax.experiments.recall_model import SYSTEMS, RecallConfig, RecallModel, Training
from ttt_jax.experiments.recall_tasks import RecallTask, accuracy, accuracy_by_distance
from ttt_jax.experiments.report import Report, mean_and_spread, new_figure, plus_minus, style

_TEST_SEED = 2**32 - 1  # of no training: every model answers the same rows
_DISTANCES = 4  # parts of the context by which needles are counted
_PANELS = {
    "The reduction": [name for name in SYSTEMS if name.startswith("V")],
    "Linear attention, delta rules, softmax": ["V6"]
    + [name for name in SYSTEMS if not name.startswith("V")],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of the experiment.

    Attributes:
      tasks: "pairs", associative recall, and "needle".
      head_dims: of each task: the state of a head is head_dim × head_dim a matrix.
      hidden_size, layers, heads: of the model; its feed-forward layers are twice as wide.
      chunk_size: tokens of an update of V0 to V6; divides the contexts, so that every pair is
        learned before the first query.
      mode: how inner loops are evaluated; a scan over a few tokens compiles soonest.
      training: of each model.
      test_rows: rows that are asked after training.
      max_seeds: seeds that the scale has time for.
    """

    tasks: dict[str, RecallTask]
    head_dims: dict[str, tuple[int, ...]]
    hidden_size: int
    layers: int
    heads: int
    chunk_size: int
    mode: str
    training: Training
    test_rows: int
    max_seeds: int


SETTINGS = {
    "tiny": Setting(
        tasks={
            "pairs": RecallTask(pairs=(1, 2, 4, 8), slots=8, keys=16, values=16),
            "needle": RecallTask(pairs=(1, 2), slots=24, keys=16, values=16, hay=16),
        },
        head_dims={"pairs": (4, 16), "needle": (16,)},
        hidden_size=32,
        layers=1,
        heads=2,
        chunk_size=4,
        mode="recurrent",
        training=Training(steps=400, rows=32, learning_rate=1e-2),
        test_rows=256,
        max_seeds=1,
    ),
    # Sizes as in Arora et al., for one GPU: minutes a model.
    "small": Setting(
        tasks={
            "pairs": RecallTask(
                pairs=(4, 8, 16, 32, 64, 128), slots=128, keys=1024, values=1024
            ),
            "needle": RecallTask(pairs=(1, 4), slots=512, keys=1024, values=1024, hay=1024),
        },
        head_dims={"pairs": (16, 32, 64), "needle": (16, 64)},
        hidden_size=128,
        layers=2,
        heads=2,
        chunk_size=32,
        mode="auto",
        training=Training(steps=5000, rows=256, learning_rate=3e-3),
        test_rows=1536,
        max_seeds=3,
    ),
    "paper": Setting(
        tasks={
            "pairs": RecallTask(
                pairs=(4, 8, 16, 32, 64, 128, 256), slots=256, keys=4096, values=4096
            ),
            "needle": RecallTask(pairs=(1, 4), slots=2048, keys=4096, values=4096, hay=4096),
        },
        head_dims={"pairs": (16, 32, 64, 128), "needle": (16, 128)},
        hidden_size=256,
        layers=2,
        heads=2,
        chunk_size=64,
        mode="auto",
        training=Training(steps=20000, rows=256, learning_rate=1e-3),
        test_rows=1792,
        max_seeds=5,
    ),
}  # fmt: skip


def cells(scale: str, seeds: int) -> list[Cell]:
    """Makes a cell for each task, head dimension, system and seed.

    Args:
      scale: a key of `SETTINGS`.
      seeds: number of seeds, of parameters and of the training's rows; no more than the scale's
        `max_seeds` are run.

    Returns:
      The cells; a result holds what `run_cell` returns.

    >>> len(cells("tiny", 1))
    36
    """
    setting = SETTINGS[scale]
    return [
        make_cell(setting, task, system, head_dim, seed)
        for task in setting.tasks
        for head_dim in setting.head_dims[task]
        for system in SYSTEMS
        for seed in range(min(seeds, setting.max_seeds))
    ]


def make_cell(setting: Setting, task: str, system: str, head_dim: int, seed: int) -> Cell:
    """Makes one cell.

    Args:
      setting: sizes.
      task: a key of `setting.tasks`.
      system: a key of `SYSTEMS`.
      head_dim: width of a key and of a value.
      seed: of parameters and data.

    Returns:
      The cell.
    """
    config = RecallConfig(
        vocab_size=setting.tasks[task].vocab_size,
        hidden_size=setting.hidden_size,
        num_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=2 * setting.hidden_size,
        initializer_range=setting.hidden_size**-0.5,
        system=system,
        head_dim=head_dim,
        chunk_size=setting.chunk_size,
        mode=setting.mode,
    )
    config.validate()
    parts = {
        "model": dataclasses.asdict(config),
        "task": dataclasses.asdict(setting.tasks[task]),
        "training": dataclasses.asdict(setting.training),
    }
    key = {"experiment": "recall", **parts, "test_rows": setting.test_rows, "seed": seed}

    def run(folder: pathlib.Path) -> Values:
        title = {"task": task, "system": system, "head_dim": head_dim, "seed": seed}
        return title | run_cell(config, setting.tasks[task], setting, seed)

    name = f"recall-{task}-{system.replace(' ', '_')}-d{head_dim}-seed{seed}"
    return Cell(name=name, key=key, run=run)


def run_cell(config: RecallConfig, task: RecallTask, setting: Setting, seed: int) -> Values:
    """Trains one model and asks it.

    Args:
      config: the model.
      task: what it learns.
      setting: training and test.
      seed: of parameters and data.

    Returns:
      loss (nats a query, mean of the last steps), accuracy (number of pairs, as text -> share of
      right answers), by_distance ([largest distance of a part in tokens, its accuracy]), chance
      (accuracy of a guess), state_size (numbers carried a sequence), parameters.

    Raises:
      FloatingPointError: the training diverged.
    """
    model, losses = recall_model.train(config, task, setting.training, seed)
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"the loss is {losses[-1]} after {setting.training.steps} steps")
    batch = task.batch(_TEST_SEED, 0, setting.test_rows)
    answers = recall_model.answer(model, batch)
    mixer = RecallModel.make_mixer(config, nnx.Rngs(0))
    return {
        "loss": losses[-1],
        "accuracy": {str(pairs): value for pairs, value in accuracy(batch, answers).items()},
        "by_distance": [list(x) for x in accuracy_by_distance(batch, answers, _DISTANCES)],
        "chance": 1 / task.values,
        "state_size": config.num_layers * mixer.state_size(task.time),
        "parameters": model.num_params(),
    }


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes tables, figures and what is seen in them.

    Args:
      results: of `run_cells`; cells that failed are left out.
      out: the report.
      root: unused: all is in the results.
    """
    done = [
        values
        for name, values in results.items()
        if name.startswith("recall-") and "failed" not in values
    ]
    for task, title in (("pairs", "Associative recall"), ("needle", "Needles in random tokens")):
        mine = [values for values in done if values["task"] == task]
        if not mine:
            continue
        out.heading(title)
        out.text(_findings(mine))
        out.table(f"recall_{task}", _rows(mine), _caption(mine))
        for head_dim in sorted({values["head_dim"] for values in mine}):
            _draw(out, task, [v for v in mine if v["head_dim"] == head_dim], head_dim)


def _caption(results: Sequence[Values]) -> str:
    return (
        "Share of queries answered right (mean ± standard deviation over seeds), by number of "
        "pairs and by the distance from value to query in tokens. State: float32 numbers that a "
        "sequence carries, momentum included, the unfinished chunk not; for softmax the keys and "
        f"values of a whole row. A guess among all values is right in {results[0]['chance']:.3f}, "
        "one among the n values of the row in about 1/n."
    )


def _rows(results: Sequence[Values]) -> list[dict[str, object]]:
    """One row for each head dimension and system."""
    rows = []
    for (head_dim, system), group in _groups(results).items():
        row: dict[str, object] = {"head dim": head_dim, "system": system}
        row |= {"state": group[0]["state_size"], "parameters": group[0]["parameters"]}
        for pairs in group[0]["accuracy"]:
            row[f"{pairs} pairs"] = plus_minus([v["accuracy"][pairs] for v in group], 2)
        for index, (distance, _) in enumerate(group[0]["by_distance"]):
            values = [v["by_distance"][index][1] for v in group]
            row[f"to {distance} tokens"] = plus_minus(values, 2)
        row["loss"] = plus_minus([v["loss"] for v in group], 2)
        row["seeds"] = len(group)
        rows.append(row)
    return rows


def _groups(results: Sequence[Values]) -> dict[tuple[int, str], list[Values]]:
    """Results of all seeds by head dimension and system, in the order of `SYSTEMS`."""
    groups: dict[tuple[int, str], list[Values]] = {}
    order = {system: index for index, system in enumerate(SYSTEMS)}
    for values in sorted(results, key=lambda v: (v["head_dim"], order[v["system"]])):
        groups.setdefault((values["head_dim"], values["system"]), []).append(values)
    return groups


def _findings(results: Sequence[Values]) -> str:
    """Says for each head dimension who recalls most pairs, and who hardly matches keys."""
    sentences = []
    groups = _groups(results)
    most = max(map(int, results[0]["accuracy"]))
    # Reading the row's values without its keys gives 1/most; a quarter of the way from there to 1.
    matching = 0.25 + 0.75 / most
    for head_dim in sorted({head_dim for head_dim, _ in groups}):
        means = {
            system: mean_and_spread([values["accuracy"][str(most)] for values in group])[0]
            for (dim, system), group in groups.items()
            if dim == head_dim
        }
        ranked = sorted(means, key=lambda system: -means[system])
        order = ", ".join(f"{system} {means[system]:.2f}" for system in ranked)
        sentences.append(f"Head dimension {head_dim}, {most} pairs, from best to worst: {order}.")
        weak = [system for system in ranked if means[system] < matching]
        if weak:
            sentences.append(
                f"Below {matching:.2f}, little better than a guess among the row's own values "
                f"(1/{most}), whether for want of state or of training: {', '.join(weak)}."
            )
    return " ".join(sentences)


def _draw(out: Report, task: str, results: Sequence[Values], head_dim: int) -> None:
    """Draws accuracy against number of pairs; for needles, against the distance."""
    by_distance = task == "needle"
    figure, axes = new_figure(len(_PANELS), width=5.5)
    groups = _groups(results)
    for panel, (title, systems) in zip(axes, _PANELS.items(), strict=True):
        for index, system in enumerate(systems):
            group = groups.get((head_dim, system))
            if group is None:
                continue
            curves = [_curve(values, by_distance) for values in group]
            points = zip(*(curve[1] for curve in curves), strict=True)
            mean, spread = zip(*map(mean_and_spread, points), strict=True)
            panel.errorbar(
                curves[0][0], mean, spread, label=system, capsize=2, alpha=0.85, **style(index)
            )
        panel.axhline(results[0]["chance"], color="#7F7F7F", linewidth=0.8, label="a guess")
        panel.set(title=title, ylim=(-0.03, 1.03), ylabel="share of right answers")
        panel.set_xlabel("distance from value to query, up to (tokens)" if by_distance else "pairs")
        if not by_distance:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
        if panel.containers:
            panel.legend(fontsize=8)
    what = "distance" if by_distance else "number of pairs"
    out.figure(
        f"recall_{task}_d{head_dim}",
        figure,
        f"Accuracy against {what}, head dimension {head_dim}; bars: standard deviation over "
        "seeds.",
    )


def _curve(values: Values, by_distance: bool) -> tuple[list[int], list[float]]:
    pairs = values["by_distance"] if by_distance else list(values["accuracy"].items())
    return [int(x) for x, _ in pairs], [y for _, y in pairs]
