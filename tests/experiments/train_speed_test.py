"""The training-speed run at its smallest size."""

import json
import subprocess
import sys

import pytest

from tests.tiny_run import program_environment
from ttt_jax.experiments import train_speed


def test_one_model_is_timed():
    options = train_speed.parse(
        ["--size=tiny", "--length=64", "--steps=2", "--dtype=float32", "--remat=none"]
    )
    row = train_speed.measure("V6 parallel", options)
    assert row.parameters > 500_000
    low, high = row.step_seconds[1:]
    assert 0 < low <= row.step_seconds[0] <= high
    assert row.tokens_per_second == pytest.approx(64 / row.step_seconds[0])
    assert 0 < row.mfu
    assert 0 < row.loss < 10
    assert "V6 parallel" in train_speed.format_table([row])


def test_a_model_that_fails_costs_its_row_alone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", program_environment()["PYTHONPATH"])
    row = train_speed.run_in_process("softmax", ["--size=tiny", "--dtype=float16"])
    assert row.note.startswith("FAILED: ValueError: dtype='float16'")
    assert "float16" in train_speed.format_table([row])


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_speed.parse(["--cases=V7"])
    assert "'V7' is not one of" in capsys.readouterr().err


def test_only_jax_flax_optax_and_numpy_are_needed():
    code = """
import json, sys
for name in ("grain", "ml_collections", "matplotlib", "tensorboardX", "array_record"):
    sys.modules[name] = None
from ttt_jax.experiments import train_speed
print(json.dumps(list(train_speed.CASES)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=program_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(train_speed.CASES)
