"""The whole check: on host devices in a process of its own, and with libtpu where it is there."""

import csv
import importlib.util
import json
import subprocess
import sys
import types

import jax
import pytest
from jax.experimental import topologies

from tests.tiny_run import program_environment
from ttt_jax import config as config_lib
from ttt_jax.compile_check import check, child, topology
from ttt_jax.config import Config, DataConfig, TrainConfig
from ttt_jax.models import lact_llm

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu is missing: pip install "jax[tpu]"'
)


def tiny(batch_size=8, length=64, **model) -> Config:
    sizes = dict(
        vocab_size=512,
        hidden_size=32,
        num_layers=3,
        num_attention_heads=2,
        num_fast_heads=2,
        intermediate_size=32,
        window_size=32,
        chunk_size=32,
        low_rank=4,
        variant=6,
    )
    return Config(
        model=lact_llm.preset("tiny", **(sizes | model)),
        data=DataConfig(sequence_length=length, batch_size=batch_size),
        train=TrainConfig(loss_chunk=length),
    )


@pytest.fixture
def tpu_environment(monkeypatch):
    """What libtpu reads when it is loaded; the tests compile in this process, to save time."""
    for name, value in topology.parse("v5e:2x2").environment().items():
        if name.startswith(("TPU", "ALLOW")):
            monkeypatch.setenv(name, value)
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # libtpu cannot read what it writes
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def test_eight_host_devices_sum_every_gradient_once(tmp_path, capsys):
    """Copies of the model exchange their gradients and little else: 4 bytes a parameter."""
    code = check.main(tiny(), "cpu:8", mesh="data:8", output=tmp_path)
    printed = capsys.readouterr().out
    assert code == 0 and printed.splitlines()[-1].startswith("Compiles; ")
    with open(tmp_path / "summary.csv") as file:
        summary = {row["quantity"]: row["value"] for row in csv.DictReader(file)}
    assert summary["devices"] == "8 x cpu" and summary["mesh"].startswith("data 8, fsdp 1, ")
    parameters = int(summary["parameters"].replace(",", ""))
    with open(tmp_path / "collectives.csv") as file:
        moved = {row["kind"]: 1e6 * float(row["result MB a step"]) for row in csv.DictReader(file)}
    assert 1.0 <= moved.pop("all-reduce") / (4 * parameters) < 1.05
    assert sum(moved.values()) < 4 * 8 * 64 * 4  # places of tokens, nothing as wide as the model
    assert "## Collectives one by one" in (tmp_path / "compile_check.md").read_text()


@needs_libtpu
def test_a_tpu_runs_the_attention_kernels_and_gathers_nothing_around_them(tpu_environment):
    config = tiny(batch_size=2, length=256, num_layers=2, dtype="bfloat16", remat="full")
    config.mesh = check.parse_mesh("data:2,model:2")
    request = child.Request(config=config_lib.to_json(config), topology="v5e:2x2", step="train")
    report = child.compile_request(request)
    assert report["fits"] and report["device_kind"] == "TPU v5 lite"
    assert 0 < report["memory"]["peak"] < report["hbm_bytes"] == 15.75 * 2**30
    kernels = {kernel["name"]: kernel["runs"] for kernel in report["kernels"]}
    names = [f"splash_mha_{name}_segmented_" for name in ("fwd", "dq", "dkv")]
    runs = [sum(n for name, n in kernels.items() if name.startswith(start)) for start in names]
    assert runs[1:] == [2, 2] and runs[0] in (2, 4)  # forward, and again in the backward pass
    assert not [c for c in report["collectives"] if check._gathers_rows(c, 256)]


@needs_libtpu
def test_what_does_not_fit_is_said_with_the_largest_buffers(tpu_environment, monkeypatch, capsys):
    config = tiny(batch_size=2**15, length=256, num_layers=2, attention_implementation="xla")

    def here(request, environment):
        return child.compile_request(request) | {"rematerializations": []}

    monkeypatch.setattr(check, "run_child", here)
    assert check.main(config, "v5e:1x1") == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT: RESOURCE_EXHAUSTED" in printed
    first = printed.partition("Largest buffers\n")[2].splitlines()[1]
    assert "GiB" in first and f"[{2**15}," in printed


@needs_libtpu
def test_a_decoding_step_compiles(tpu_environment):
    config = tiny(batch_size=4)
    config.mesh = check.parse_mesh("data:2,model:2")
    request = child.Request(config=config_lib.to_json(config), topology="v6e:2x2", step="decode")
    report = child.compile_request(request)
    assert report["fits"] and "decoding step" in report["describe"]
    assert report["memory"]["alias"] > 0  # the cache is updated in place


_AWKWARD = """
import jax, numpy as np
from ttt_jax.compile_check import topology
devices = topology.parse("v5p:2x2x4").devices()
mesh = jax.sharding.Mesh(np.reshape(devices, (2, 2, 4)), ("a", "b", "c"))
first, second = (
    jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("a", None, ("b", "c")), ("c", ("b", "a")))
)
def step(x):
    y = jax.lax.with_sharding_constraint(jax.numpy.sin(x), first)
    y = jax.numpy.cos(2 * y.reshape(64, 16, 1536)).transpose(1, 0, 2)
    return jax.lax.with_sharding_constraint(y, second).sum()
x = jax.ShapeDtypeStruct((64, 16, 1536), np.float32, sharding=first)
jax.jit(step).lower(x).compile()
"""


@needs_libtpu
def test_arrays_that_the_partitioner_makes_whole_are_found_in_its_log():
    environment = program_environment(**topology.parse("v5p:2x2x4").environment())
    command = [sys.executable, "-c", _AWKWARD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = check.rematerializations(done.stderr)
    assert line.startswith("The compiler cannot go from sharding")


def test_gathered_rows_are_told_from_gathered_weights_and_token_ids():
    shapes = {"f32[8,4096]": True, "bf16[2,4096,64]": True, "s32[8,4096]": False}
    shapes |= {"bf16[64,40960]": False, "f32[64], bf16[4096]": True}
    for shape, expected in shapes.items():
        collective = {"kind": "all-gather", "shape": shape}
        assert check._gathers_rows(collective, 4096) is expected
        assert not check._gathers_rows(collective | {"kind": "all-reduce"}, 4096)


def test_a_missing_libtpu_is_named_with_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ValueError, match=r'needs libtpu to compile: pip install "jax\[tpu\]==\d'):
        topology.parse("v5e:4x4").devices()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(topology_name="v5e-16"), "write CHIP:AxB"),
        (dict(topology_name="h100:8x8"), "must be cpu or one of"),
        (dict(topology_name="cpu:2x4"), "cpu has a number"),
        (dict(topology_name="cpu:8", step="sing"), "must be one of"),
        (dict(topology_name="cpu:8", mesh="data:2,rows:4"), "'rows:4' must be AXIS:SIZE"),
        (dict(topology_name="cpu:8", mesh="data:2,data:4"), "each axis once"),
        (dict(topology_name="cpu:8", output="/proc/none"), "output='/proc/none' cannot be written"),
    ],
)
def test_refusals_come_before_the_process(arguments, message, monkeypatch):
    monkeypatch.setattr(check, "run_child", None)
    with pytest.raises(ValueError, match=message):
        check.main(tiny(), **arguments)


def test_an_error_of_the_child_is_one_message(monkeypatch, tmp_path):
    """What the child writes for a mesh that does not fit the devices, and for a crash."""
    request = child.Request(config=config_lib.to_json(tiny()), topology="cpu:1", step="train")
    request_file, report_file = tmp_path / "request", tmp_path / "report"
    config = config_lib.to_json(config_lib.from_json(request.config)).replace(
        '"data": -1', '"data": 3'
    )
    request_file.write_text(json.dumps(dict(config=config, topology="cpu:1", step="train")))
    assert child.main(request_file, report_file) == 0
    assert "data=3, fsdp=1, seq=1" in json.loads(report_file.read_text())["error"]
    crash = types.SimpleNamespace(returncode=-9, stderr="a\nb\n")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: crash)
    with pytest.raises(ValueError, match="ended with code -9"):
        check.run_child(request, {})
