"""Experiments: every cell, done cells, failed cells, interrupted cells, reports; measurements."""

import csv
import dataclasses
import fcntl
import json

import jax
import numpy as np
import pytest

from tests.tiny_run import tiny_config, write_text
from tests.tolerances import assert_close, tolerance
from ttt_jax import train
from ttt_jax.checkpoint import load_arrays
from ttt_jax.experiments import (
    ablation,
    distributions,
    length,
    paradoxes,
    report,
    reproduce,
    systems,
)
from ttt_jax.experiments.cells import Cell, run_cells, training_cell
from ttt_jax.experiments.systems import set_fields
from ttt_jax.models import transformer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


def small_config(text, fields=(), baseline=False, seed=0):
    config = tiny_config(text, steps=3, seed=seed)
    if baseline:
        config.model = transformer.TransformerConfig(
            vocab_size=258, hidden_size=16, num_layers=1, num_attention_heads=2,
            intermediate_size=16, scan_layers=False, max_decode_length=64,
        )  # fmt: skip
    return set_fields(config, dict(fields))


@pytest.fixture(autouse=True)
def labelled(monkeypatch):
    """No picture has an axis without a label; several series have a legend."""
    figure = report.Report.figure

    def check(self, name, drawn, caption):
        for axis in drawn.axes:
            assert axis.get_ylabel() and (axis.get_xlabel() or axis.get_title()), name
            series = len(axis.get_legend_handles_labels()[1])
            assert series < 2 or axis.get_legend() or drawn.legends, name
        figure(self, name, drawn, caption)

    monkeypatch.setattr(report.Report, "figure", check)


@pytest.fixture
def small(text, monkeypatch):
    """Replaces the models by ones that train in a second."""

    def make_config(task, scale, seed, fields, baseline=False):
        return small_config(text, fields, baseline, seed)

    for module in (ablation, paradoxes):
        monkeypatch.setattr(module, "make_config", make_config)


def options(*models, **changes):
    return reproduce.Options(tasks=("language",), models=models, **{"seeds": 1, **changes})


def read(path):
    return list(csv.DictReader(path.open()))


def test_the_report_is_whole_and_done_cells_are_not_run_again(small, tmp_path, monkeypatch, capsys):
    assert reproduce.main(options("V6", "softmax"), tmp_path) == 0
    rows = read(tmp_path / "ablation" / "ablation_language.csv")
    assert [row["model"] for row in rows] == ["V6", "softmax"]
    for row, rates in zip(rows, (("recurrent rate", "parallel rate"), ("rate",)), strict=True):
        assert 1.0 < float(row["perplexity"]) < 258.0
        assert all(float(row[name].replace(",", "")) > 0 for name in (*rates, "train rate"))
    written = (tmp_path / "ablation" / "report.md").read_text()
    assert "| V6 |" in written and "ablation_language.png" in written and "jax" in written
    picture = (tmp_path / "ablation" / "ablation_language.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "softmax" in capsys.readouterr().out
    assert "Steps left out" not in written
    monkeypatch.setattr(train, "main", lambda *_: pytest.fail("a done cell was run again"))
    (done,) = tmp_path.glob("cells/language-V6-0-*/result.json")
    done.write_text(json.dumps(json.loads(done.read_text()) | {"skipped": 2}))
    assert reproduce.main(options("V6", "softmax"), tmp_path) == 0
    assert read(tmp_path / "ablation" / "ablation_language.csv") == rows
    written = (tmp_path / "ablation" / "report.md").read_text()
    assert "not finite: language-V6-0 2." in written


def test_a_workdir_that_cannot_be_written_to_is_refused(small, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="workdir='.*file' cannot be written to"):
        reproduce.main(options("V6"), tmp_path / "file")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("data.source", "no/such", "no such file.*give the path or glob"),
        ("data.source", "builtin;no/such", "source='no/such': no such file"),
        ("data.tokenizer", "no/such.json", "cannot be read.*check the path"),
        ("train.init_from", "no/such", "there is no run .*give WORKDIR"),
    ],
)
def test_what_no_cell_could_read_is_named_before_the_first(small, tmp_path, field, value, words):
    with pytest.raises(ValueError, match=f"^--set={field}={value}: .*{words}"):
        reproduce.main(options("V0", "V6", fields={field: value}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model_are_left_to_the_cells_that_they_do_not_fit(
    small, text, tmp_path, monkeypatch
):
    assert train.main(small_config(text, {"model.variant": 6}), tmp_path / "run") == 0
    monkeypatch.setattr(train, "main", lambda *_: train.EXIT_NOT_FINITE)
    start = {"fields": {"train.init_from": str(tmp_path / "run")}}
    with pytest.raises(ValueError, match="^--set=train.init_from=.*needs a model of the same"):
        reproduce.main(options("softmax", **start), tmp_path / "other")
    assert reproduce.main(options("V6", "softmax", **start), tmp_path / "other") == 1


@pytest.mark.parametrize("empty", ["experiments", "tasks"])
def test_an_empty_list_is_refused(empty):
    with pytest.raises(ValueError, match="='' is empty .an unset shell variable"):
        dataclasses.replace(options(), **{empty: ()}).names()


def test_a_failed_cell_is_named_and_the_others_go_on(small, tmp_path, monkeypatch):
    real = train.main

    def main(config, workdir):
        if "V0" in workdir.name:
            raise MemoryError("not enough")
        return real(config, workdir)

    monkeypatch.setattr(train, "main", main)
    assert reproduce.main(options("V0", "V6"), tmp_path) == 1
    rows = read(tmp_path / "ablation" / "ablation_language.csv")
    assert rows[0]["note"] == "FAILED: MemoryError: not enough" and rows[0]["perplexity"] == ""
    assert float(rows[1]["perplexity"]) > 1.0
    written = (tmp_path / "ablation" / "report.md").read_text()
    assert "FAILED: language-V0-0: MemoryError: not enough" in written
    monkeypatch.setattr(train, "main", lambda *_: train.EXIT_NOT_FINITE)
    assert reproduce.main(options("V0", "V6"), tmp_path) == 1
    assert "exit code 3" in (tmp_path / "ablation" / "report.md").read_text()


def test_a_signal_ends_the_experiment(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "main", lambda *_: 143)
    assert reproduce.main(options("V6", "softmax"), tmp_path) == 143
    assert not (tmp_path / "ablation").exists()


def test_cells_of_another_key_are_other_cells_and_processes_share_the_work(tmp_path):
    calls = []

    def cell(name, value):
        return Cell(name=name, key={"value": value}, run=lambda _: calls.append(value) or {"v": 1})

    run_cells([cell("a", 1)], tmp_path)
    run_cells([cell("a", 2)], tmp_path)
    run_cells([cell("a", 1)], tmp_path)
    assert calls == [1, 2]
    cells = [cell(str(i), i) for i in range(3)]
    folder = cells[1].folder(tmp_path)
    folder.mkdir()
    with open(folder / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert list(run_cells(cells, tmp_path)) == ["0", "2"]
    assert list(run_cells(cells, tmp_path)) == ["0", "1", "2"]
    assert calls[2:] == [0, 2, 1]
    record = json.loads((cells[0].folder(tmp_path) / "result.json").read_text())
    assert record["folder"] == cells[0].folder(tmp_path).name


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"experiments": ("memory",)}, "experiment='memory'"),
        ({"scale": "huge"}, "scale='huge'"),
        ({"models": ("V9",)}, "models='V9'"),
        ({"fields": {"train.stepz": 3}}, "config.train.stepz"),
    ],
)
def test_unknown_names_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reproduce.main(reproduce.Options(**changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("scale", systems.SCALES)
def test_every_experiment_has_cells_whose_configurations_are_valid(scale):
    plan = reproduce.Options(experiments=("all",), scale=scale)
    for name in plan.names():
        found = reproduce.EXPERIMENTS[name].cells(plan)
        assert found and len({cell.name for cell in found}) == len(found)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The folder of a finished V0 with two inner layers' worth of everything."""
    fields = {"model.variant": 0, "model.chunk_size": 8, "model.use_newton_schulz": False}
    cell = training_cell("V0", small_config(text, fields), lambda _: {})
    root = tmp_path_factory.mktemp("trained")
    assert "failed" not in run_cells([cell], root)["V0"]
    return cell.folder(root)


def test_inner_steps_lower_the_inner_loss_of_their_chunk(trained):
    """Ascent of <f(k), v> on the chunk itself: each step helps, from the loss before any."""
    losses = paradoxes.inner_losses(trained, (0, 1, 4))
    assert losses[4] < losses[1] < losses[0]


def test_the_probe_sees_what_the_inner_loop_reads(trained):
    (layer,) = paradoxes.probe(trained, rows=2)
    assert layer["q"].shape == layer["k"].shape == (2, 32, 2, 8)
    norms = np.linalg.norm(layer["k"], axis=-1)
    assert np.all((norms < 1.0) & (norms > 0.99))  # x / (‖x‖ + 1e-5)
    assert set(layer) == {"q", "k", "v", "lr", "momentum", "weights"}


def test_another_inner_loop_changes_the_perplexity_and_the_same_one_does_not(trained):
    plain = json.loads((trained / "evaluation.json").read_text())["perplexity"]
    assert_close(paradoxes.evaluate_with(trained), plain, tolerance("float32", 64))
    assert paradoxes.evaluate_with(trained, query="key") != plain


def test_queries_that_are_the_keys_cannot_be_told_apart(tmp_path):
    x = jax.random.normal(jax.random.key(0), (1, 80, 1, 4))
    same = distributions.measure([{"q": x, "k": x}], tmp_path)
    moved = distributions.measure([{"q": x, "k": x + 4}], tmp_path)
    assert same["distance"] == [0.0] and same["mmd"][0] < 0.05 and same["accuracy"][0] < 0.6
    assert moved["accuracy"][0] > 0.95 and moved["mmd"][0] > 0.5
    assert np.load(tmp_path / "points.npz")["layer_0"].shape == (160, 2)


def test_length_goes_past_the_training_and_the_state_stays(trained, text):
    loaded = load_arrays(trained)
    assert length.perplexity_by_position(loaded, 64)[-1][1] >= 32
    costs = [length.decoding_cost(loaded, n, repeats=1) for n in (32, 128)]
    assert costs[0]["kibibytes"] == costs[1]["kibibytes"] and costs[0]["milliseconds"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["paradoxes", "length"])
def test_the_other_reports_are_whole(name, small, tmp_path):
    assert reproduce.main(options(experiments=(name,)), tmp_path) == 0
    written = (tmp_path / name / "report.md").read_text()
    assert "FAILED" not in written and written.count("![") >= {"paradoxes": 3, "length": 1}[name]


def test_one_seed_resolves_nothing():
    ours, paper = {"a": [1.0], "b": [2.0]}, {"a": 1.0, "b": 2.0}
    assert "one value of each resolves none" in report.compare_order(ours, paper, "lower")
    several = {name: [v[0], v[0] + 0.1] for name, v in ours.items()}
    assert "resolve 1, and in 1 of these the paper's order holds" in report.compare_order(
        several, paper, "lower"
    )
