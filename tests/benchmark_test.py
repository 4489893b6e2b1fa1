"""The benchmark program on shapes that run in seconds: what it prints and saves, not how fast."""

import csv
import dataclasses
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from ttt_jax import tables
from ttt_jax.benchmark import common, decode, peers, suites, timing

SIZE = common.Size(96, 1, 8, 16, ((1, 8),), ((2, 16, 16),), "float32")
OPTIONS = common.Options(size=SIZE, seconds=1e-3, batches=2, variants=(0, 6))


def test_measure_counts_calls_and_refuses_no_arguments():
    calls = []

    def function(x):
        calls.append(x)
        return x

    result = timing.measure(function, [(jnp.ones(2),), (jnp.zeros(2),)], seconds=0.01,
                            batches=3, max_calls=4)
    assert result.calls == 4 and result.milliseconds > 0
    # Warm-up of both sets, one call to find the number of calls, three batches of four.
    assert len(calls) == 2 + 1 + 12
    assert float(calls[-1][0]) != float(calls[-2][0])  # inputs are rotated
    with pytest.raises(ValueError, match="argument_sets"):
        timing.measure(function, [])


def test_gradient_pass_returns_all_gradients():
    out, gradients = timing.with_gradient(lambda x, y: x * y)(
        jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0)
    )
    assert (float(out), [float(g) for g in gradients]) == (15.0, [10.0, 6.0])


def test_throughput_table_has_a_row_for_each_mode_that_runs(capsys):
    rows = suites.throughput_table(OPTIONS)
    made = [(row["case"], row["implementation"], row["pass"]) for row in rows]
    both = ("fwd", "fwd+bwd")
    modes = [("V0", "recurrent"), ("V0", "kernel")]
    modes += [("V6", m) for m in ("recurrent", "parallel", "kernel")]
    assert made == [(*mode, name) for mode in modes for name in both]
    assert all(row["Mtok/s"] > 0 for row in rows)
    assert rows[0]["vs recurrent"] == 1.0
    printed = capsys.readouterr().out
    assert "V0 parallel: " in printed and "V6, T = 96: parallel / recurrent = " in printed


def test_linear_attention_suite_names_what_cannot_run():
    rows = suites.SUITES["linear_attention"](OPTIONS)
    ran = [(r["case"], r["implementation"], r["pass"]) for r in rows if r["ms"] is not None]
    assert ran == [(case, "xla", p) for case in ("1x8", "1x8 decays") for p in ("fwd", "fwd+bwd")]
    refused = {row["implementation"] for row in rows if row["ms"] is None}
    names = ("mosaic_gpu", "mosaic_tpu", *peers.PEERS)
    assert refused == {f"{name} (cannot run here)" for name in names}


def test_peers_are_named_and_explained(monkeypatch):
    with pytest.raises(ValueError, match="peer='flash' must be one of"):
        peers.missing("flash")
    assert peers.missing("fla") == "needs an NVIDIA GPU"
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setitem(sys.modules, "jla.ops", None)
    assert peers.missing("jla").startswith("not installed")


@pytest.mark.parametrize("names", [
    ("V6",), pytest.param(("V0", "V2", "V6", "transformer"), marks=pytest.mark.exhaustive),
], ids=len)
def test_decode_suite_times_every_model(names, monkeypatch):
    work = decode.Workload("tiny", ((2, 3),), 2)
    models = [m for m in decode._models(work) if m[0] in names]
    monkeypatch.setattr(decode, "_models", lambda work: models)
    rows = decode.decode_rows(work, dataclasses.replace(OPTIONS, batches=1))
    assert [row["implementation"] for row in rows] == list(names)
    for row in rows:
        assert row["case"] == "tiny after 3 tokens x 2"
        assert row["tokens/s"] == pytest.approx(2e3 / row["ms"])


def test_newton_schulz_suite_saves_its_rows_and_reports_them(tmp_path):
    name, heard = "newton_schulz", []
    options = dataclasses.replace(OPTIONS, report=lambda row, timing: heard.append((row, timing)))
    rows = suites.SUITES[name](options)
    assert [row["pass"] for row in rows] == ["fwd", "fwd+bwd"]
    assert [row for row, _ in heard] == rows
    slow = dataclasses.replace(heard[0][1], kernels=(("b", 1.0), ("a", 2.0), ("b", 3.0)))
    grouped = common.profile(rows[0], slow)
    assert [(line["kernel"], line["launches"], line["ms"]) for line in grouped] == [
        ("b", 2, 4.0), ("a", 1, 2.0)]
    assert all(line["case"] == rows[0]["case"] for line in grouped)
    tables.save(rows, tmp_path, name, "title")
    with open(tmp_path / f"{name}.csv") as file:
        saved = list(csv.DictReader(file))
    assert [row["case"] for row in saved] == [row["case"] for row in rows]
    assert (tmp_path / f"{name}.md").read_text().startswith("title\n\n| case |")


def test_layer_inputs_follow_the_specification():
    for variant, names in ((0, {"lr", "momentum"}), (4, {"momentum"}), (6, set())):
        spec, arrays = suites._layer(variant, SIZE, 0)
        assert set(arrays) == {"weights", "q", "k", "v"} | names
        if "lr" in names:
            assert arrays["lr"].shape == (1, 96, 1, len(spec.trained))
    assert jax.devices()[0].device_kind in common.describe_device()


def test_program_runs_and_refuses_an_unknown_suite(tmp_path):
    command = [sys.executable, "launch/benchmark.py", "--seconds=0.001", "--batches=1"]
    done = subprocess.run([*command, "--suite=newton_schulz", f"--out={tmp_path}"],
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8x32x32" in done.stdout and (tmp_path / "newton_schulz.csv").exists()
    for flag, message in (("--suite=nothing", "--suite=['nothing'] must be among"),
                          ("--out=/proc/none", "out='/proc/none' cannot be written to")):
        done = subprocess.run([*command, flag], capture_output=True, text=True, timeout=240)
        assert done.returncode == 1 and message in done.stderr
