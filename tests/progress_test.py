"""Progress lines: rates, the split of time, the estimate of the end."""

import jax.numpy as jnp
import pytest

from ttt_jax import metrics, progress


def reporter(tmp_path, monkeypatch, seconds, every=2):
    """A reporter whose clock moves by `seconds` each time it is read."""
    now = iter(seconds * n for n in range(1000))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(progress, "peak_flops", lambda: (1e6, "a test"))
    log = metrics.MetricsLog(tmp_path, 0)
    return progress.Reporter(log, 6, every, "tokens", flops=1e5), log


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


def test_time_is_split_and_layers_are_kept_apart(tmp_path, monkeypatch):
    """Each reading of the clock is half a second: so is what is waited for."""
    report, log = reporter(tmp_path, monkeypatch, seconds=0.5)
    for step in range(1, 5):
        with report.timing("data"):
            pass
        report.add(step, values() | {"state_norm": jnp.array([1.0, 3.0])})
    with report.timing("checkpoint"):
        pass
    report.flush()
    second, fourth = metrics.read_metrics(log.path)
    assert second["state_norm"] == 2.0 and second["state_norm_by_layer"] == [1.0, 3.0]
    # Step 2 is reported when the data of step 3 is there: what is left is that of step 4.
    seconds = fourth["tokens"] * 2 / fourth["tokens_per_second"]
    assert fourth["data_fraction"] * seconds == pytest.approx(0.5)
    assert fourth["checkpoint_fraction"] * seconds == pytest.approx(0.5)
    assert fourth["step_seconds"] == pytest.approx((seconds - 1.0) / 2)
    summary = report.summary()
    assert "tokens/s, MFU" in summary and "checkpoint" in summary and "0 steps skipped" in summary


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


def test_progress_line_says_when_data_is_late():
    numbers = {"loss": 1.0, "images_per_second": 10.0, "mfu": 0.1, "grad_norm": 1.0}
    numbers |= {"learning_rate": 0.1, "data_fraction": 0.25}
    line = progress.progress_line(1, 9, numbers, "images", 1.0)
    assert "10.0 images/s  MFU 10.0%  waiting for data 25%" in line


def test_progress_line_counts_hours():
    numbers = {"loss": 1.0, "tokens_per_second": 10.0, "mfu": 0.1, "grad_norm": 1.0}
    numbers |= {"learning_rate": 0.1, "skipped": 2}
    line = progress.progress_line(1, 9, numbers, "tokens", 3661.0)
    assert line.endswith("skipped 2  ETA 1:01:01")
