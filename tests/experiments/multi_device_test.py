"""The comparison of several devices, at its smallest size, on the one that is there."""

import json

import pytest

from tests.tiny_run import program_environment
from ttt_jax.experiments import multi_device

_SMALL = ["--devices=1", "--size=tiny", "--variant=6", "--length=64", "--rows=1", "--steps=1",
          "--dtype=float32", "--remat=none", "--layer-lengths=128"]  # fmt: skip


def test_training_and_a_layer_are_measured():
    row = multi_device.measure_training(multi_device.parse(_SMALL), "one device")
    assert row["mesh"] == "one device" and row["tokens/s"] > 0
    assert len(row["losses"]) == 2 and 0 < row["losses"][0] < 10
    row = multi_device.measure_layer(multi_device.parse(_SMALL), "128:1")
    assert row["tokens"] == 128 and row["MB received (stated)"] == 0
    json.dumps(row)


def test_a_case_that_fails_is_a_row(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", program_environment()["PYTHONPATH"])
    row = multi_device.run_in_process("training", "seq 9", _SMALL)
    assert row["failed"].startswith("KeyError")


def test_an_unknown_measurement_is_refused(capsys):
    with pytest.raises(SystemExit):
        multi_device.parse(["--only=speed"])
    assert "'speed' is not one of" in capsys.readouterr().err
