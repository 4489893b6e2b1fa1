"""Metrics: what is written, kept on resume, drawn."""

import json
import math
import sys
import types

import pytest

from ttt_jax import metrics


def test_lines_after_the_restored_step_are_dropped_and_a_cut_line_is_ignored(tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": float(step)})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 4, "ki')
    resumed = metrics.MetricsLog(tmp_path, 2)
    resumed.write(3, "train", {"loss": 30.0})
    resumed.close()
    records = metrics.read_metrics(log.path)
    assert [(r["step"], r["loss"]) for r in records] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_become_null(value, tmp_path):
    log = metrics.MetricsLog(tmp_path, 0)
    log.write(1, "train", {"loss": value})
    log.close()
    record = json.loads(log.path.read_text(), parse_constant=pytest.fail)
    assert record["loss"] is None


def test_tensorboard_gets_every_number_where_it_is_installed(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            calls.append("closed")

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = Writer
    module.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    log = metrics.MetricsLog(tmp_path, 0)
    log.write(5, "eval", {"loss": 2.0})
    log.close()
    assert calls == [str(tmp_path / "tensorboard"), ("eval/loss", 2.0, 5), "closed"]


def test_the_plot_shows_both_losses_and_needs_a_metric(tmp_path):
    assert metrics.plot_loss(tmp_path, "nothing yet", "loss") is None
    log = metrics.MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": 3.0 / step})
    log.write(3, "eval", {"loss": 1.1})
    log.close()
    path = metrics.plot_loss(tmp_path, "a run", "loss (nats)")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 5000
