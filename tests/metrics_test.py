"""Metrics: what is written, kept on resume, drawn."""

import json
import math
import sys
import types

import jax.numpy as jnp
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


def reporter(tmp_path, monkeypatch, seconds, every=2):
    """A reporter whose clock moves by `seconds` each time it is read."""
    now = iter(seconds * n for n in range(1000))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(metrics, "peak_flops", lambda: (1e6, "a test"))
    log = metrics.MetricsLog(tmp_path, 0)
    return metrics.Reporter(log, 6, every, "tokens", flops=1e5), log


def values(skipped=0, in_a_row=0):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "count": 80.0}
    numbers |= {"skipped": skipped, "skipped_in_a_row": in_a_row}
    return {name: jnp.asarray(value) for name, value in numbers.items()}


def test_rates_leave_out_the_first_step(tmp_path, monkeypatch):
    report, log = reporter(tmp_path, monkeypatch, seconds=0.5)
    for step in range(1, 7):
        report.add(step, values())
    report.flush()
    records = metrics.read_metrics(log.path)
    assert [r["step"] for r in records] == [2, 4, 6]
    # Step 1 starts the clock; step 2 alone is counted, then two steps a line.
    assert [r["tokens_per_second"] for r in records] == [80 / 0.5, 160 / 0.5, 160 / 0.5]
    assert records[1]["mfu"] == pytest.approx(200 * 1e3 / 0.5 / 1e6)


def test_a_line_for_the_first_step_has_no_rate(tmp_path, monkeypatch, capsys):
    report, log = reporter(tmp_path, monkeypatch, seconds=0.5, every=1)
    report.add(1, values())
    report.flush()
    assert metrics.read_metrics(log.path)[0]["tokens_per_second"] is None
    assert "tokens/s" not in capsys.readouterr().out


def test_a_step_is_reported_when_the_next_has_begun(tmp_path, monkeypatch, capsys):
    report, _ = reporter(tmp_path, monkeypatch, seconds=0.5)
    report.add(1, values(skipped=1, in_a_row=1))
    assert report.skipped_in_a_row == 0
    report.add(2, values(skipped=1))
    assert report.skipped_in_a_row == 1
    assert "step 1: loss or gradient is not finite" in capsys.readouterr().out
    report.flush()
    assert report.skipped_in_a_row == 0


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


def test_progress_line_counts_hours():
    numbers = {"loss": 1.0, "tokens_per_second": 10.0, "mfu": 0.1, "grad_norm": 1.0}
    numbers |= {"learning_rate": 0.1, "skipped": 2}
    line = metrics.progress_line(1, 9, numbers, "tokens", 3661.0)
    assert line.endswith("skipped 2  ETA 1:01:01")
