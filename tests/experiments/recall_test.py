"""The recall experiment: a model learns to recall, the cells differ, the report is whole."""

import csv
import dataclasses
import json

import pytest

from ttt_jax.experiments import recall, recall_model
from ttt_jax.experiments.cells import run_cells
from ttt_jax.experiments.recall_model import SYSTEMS, Training
from ttt_jax.experiments.recall_tasks import RecallTask
from ttt_jax.experiments.report import Report

SETTING = dataclasses.replace(
    recall.SETTINGS["tiny"],
    tasks={"pairs": RecallTask(pairs=(1, 2), slots=2, keys=4, values=4)},
    head_dims={"pairs": (8,)},
    hidden_size=16,
    training=Training(steps=300, rows=16, learning_rate=1e-2),
    chunk_size=2,
    test_rows=64,
)


def test_a_delta_rule_learns_to_recall(tmp_path):
    cell = recall.make_cell(SETTING, "pairs", "DeltaNet", 8, 0)
    values = run_cells([cell], tmp_path)[cell.name]
    assert (values["system"], values["head_dim"], values["seed"]) == ("DeltaNet", 8, 0)
    assert values["chance"] == 0.25 and values["state_size"] == 2 * 8 * 8
    assert values["accuracy"]["1"] > 0.9 and values["accuracy"]["2"] > 0.75
    assert json.loads((cell.folder(tmp_path) / "result.json").read_text()) == values


def test_diverged_training_fails_the_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(recall_model, "train", lambda *_: (None, [1.0, float("nan")]))
    cell = recall.make_cell(SETTING, "pairs", "V6", 4, 0)
    assert "the loss is nan after 300 steps" in run_cells([cell], tmp_path)[cell.name]["failed"]


def test_cells_are_all_systems_tasks_and_sizes():
    cells = recall.cells("tiny", 100)
    setting = recall.SETTINGS["tiny"]
    sizes = sum(len(setting.head_dims[task]) for task in setting.tasks)
    assert len(cells) == len(SYSTEMS) * sizes * setting.max_seeds
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({json.dumps(cell.key, sort_keys=True) for cell in cells}) == len(cells)


@pytest.mark.parametrize("scale", recall.SETTINGS)
def test_every_pair_is_learned_before_the_first_query(scale):
    setting = recall.SETTINGS[scale]
    for task in setting.tasks.values():
        assert task.context % setting.chunk_size == 0
        assert setting.test_rows % len(task.pairs) == 0


def made_up(system, head_dim, seed, accuracy):
    return {
        "task": "pairs", "system": system, "head_dim": head_dim, "seed": seed, "loss": 1.0,
        "accuracy": {"4": accuracy, "8": accuracy / 2}, "by_distance": [[9, 0.5], [18, 0.25]],
        "chance": 0.1, "state_size": 7, "parameters": 11,
    }  # fmt: skip


def test_report(tmp_path):
    results = {
        "recall-a": made_up("V6", 8, 0, 0.8),
        "recall-b": made_up("V6", 8, 1, 0.6),
        "recall-c": made_up("DeltaNet", 8, 0, 1.0),
        "recall-d": made_up("V0", 16, 0, 0.2),
        "recall-e": {"failed": "ValueError: no"},
        "length-V0": {"perplexity": 3.0},
        "recall-f": {**made_up("softmax", 8, 0, 1.0), "task": "needle"},
    }
    report = Report("Recall", tmp_path, command="x")
    recall.report(results, report, tmp_path)
    text = report.write().read_text()
    rows = list(csv.DictReader((tmp_path / "recall_pairs.csv").open()))
    assert [(row["head dim"], row["system"]) for row in rows] == [
        ("8", "V6"), ("8", "DeltaNet"), ("16", "V0"),
    ]  # fmt: skip
    assert rows[0]["4 pairs"] == "0.70 ± 0.14" and rows[0]["seeds"] == "2"
    assert rows[1]["to 18 tokens"] == "0.25" and rows[1]["state"] == "7"
    assert "Head dimension 8, 8 pairs, from best to worst: DeltaNet 0.50, V6 0.35." in text
    assert "Below 0.34, little better than a guess among the row's own values (1/8)" in text
    assert "whether for want of state or of training: V0." in text
    for name in ("recall_pairs_d8", "recall_pairs_d16", "recall_needle_d8"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
