"""Killed, told to end, moved to other devices, out of disk: the run goes on as if nothing was."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.corpora import digest
from tests.tiny_run import assert_equal_states, program_environment, tiny_config, write_text
from tests.tolerances import assert_close, tolerance
from tests.train_test import read_state
from ttt_jax import checkpoint, evaluate, metrics, train
from ttt_jax.data import text as text_lib
from ttt_jax.tasks import make_task


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


def start(text, workdir, fields, mesh=None, devices=1, *more):
    """Starts the trainer in a process of its own; its output is a pipe."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [str(text), str(workdir), json.dumps(fields), json.dumps(mesh or {}), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kill_program", *arguments],
        env=program_environment(XLA_FLAGS=flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def stop_once(process, signum, steps, seconds):
    """Sends a signal so many steps and seconds on; returns the exit code and the rest written."""
    for line in process.stdout:
        steps -= line.startswith("step ")
        if steps <= 0:
            break
    time.sleep(seconds)
    process.send_signal(signum)
    rest = process.communicate()[0]
    return process.returncode, rest


def batches_of(config, count):
    """The first batches of training, as the data's own definition gives them."""
    batches = make_task(config).batches("train")
    return [next(batches) for _ in range(count)]


def assert_every_document_once_an_epoch(config, batches):
    """Fails unless the targets of each whole epoch are all targets of the training split."""
    task = make_task(config)
    expected = np.sort(text_lib.split_ids(config.data, task.tokenizer, "train"))
    rows = -(-expected.size // config.data.sequence_length)
    stacked = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    epochs = len(stacked["targets"]) // rows
    assert epochs >= 1
    for epoch in range(epochs):
        mine = slice(epoch * rows, (epoch + 1) * rows)
        found = stacked["targets"][mine][stacked["weights"][mine] > 0]
        np.testing.assert_array_equal(np.sort(found), expected)


def assert_batches(workdir, config, steps):
    """Fails unless every step of every process had the step's own batch, and none is missing."""
    lines = [line.split() for line in (workdir / "batches.txt").read_text().splitlines()]
    expected = batches_of(config, steps)
    assert {int(step) for step, _ in lines} >= set(range(1, steps + 1))
    for step, found in lines:
        if int(step) <= steps:
            assert found == digest(expected[int(step) - 1]), step
    assert_every_document_once_an_epoch(config, expected)


def losses(workdir):
    """The training loss of each step."""
    lines = metrics.read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def gut_newest(workdir):
    """Empties the newest checkpoint, as a disk that loses files does."""
    newest = workdir / "checkpoints" / str(checkpoint.Checkpoints(workdir).steps()[-1])
    for path in newest.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def assert_equal_runs(killed, straight, config):
    """Fails unless two runs ended in the same state, position, losses and evaluation."""
    (state, position), expected = (read_state(run, config) for run in (killed, straight))
    assert_equal_states(state, expected[0])
    assert position == expected[1]
    assert losses(killed) == losses(straight)
    assert evaluate.read_report(killed) == evaluate.read_report(straight)


def test_killed_and_resumed_equals_uninterrupted(text, tmp_path):
    fields = {"steps": 12, "save_every": 1}
    config = tiny_config(text, **fields)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    code, _ = stop_once(start(text, killed, fields), signal.SIGKILL, 4, 0.02)
    assert code == -signal.SIGKILL and not (killed / "evaluation.json").exists()
    for workdir in (killed, straight):
        assert train.main(config, workdir) == 0
    assert_equal_runs(killed, straight, config)


def test_a_second_process_is_refused_and_the_first_goes_on(text, tmp_path):
    fields = {"steps": 40, "save_every": 100}
    process = start(text, tmp_path, fields)
    for line in process.stdout:
        if line.startswith("step "):
            break
    with pytest.raises(checkpoint.CheckpointError, match=f"pid {process.pid}, since .* trains in"):
        train.main(tiny_config(text, **fields), tmp_path)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert list(losses(tmp_path)) == list(range(1, 41))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_twenty_kills_ten_terminations_and_a_gutted_checkpoint(text, tmp_path):
    """A signal at a random moment of each process: starting, compiling, stepping, saving."""
    fields = {"steps": 200, "save_every": 1}
    config = tiny_config(text, **fields | {"save_every": 100})
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    assert train.main(config, straight) == 0
    generator = random.Random(0)
    signals = [signal.SIGKILL] * 20 + [signal.SIGTERM] * 10
    generator.shuffle(signals)
    codes = []
    for signum in signals:
        steps = generator.randint(0, 3)  # 0: while it starts
        seconds = generator.uniform(0.0, 0.2) if steps else generator.uniform(2.0, 8.0)
        process = start(text, killed, fields)
        code, _ = stop_once(process, signum, steps, seconds)
        codes.append(code)
        assert code in {signal.SIGKILL: (-9,), signal.SIGTERM: (143, -15)}[signum], codes
        assert not (killed / "evaluation.json").exists()
    assert codes.count(143) >= 3  # saved before they ended
    gut_newest(killed)
    last = start(text, killed, fields | {"save_every": 100})
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert len(list((killed / "broken").iterdir())) == 1
    assert_equal_runs(killed, straight, config)
    assert_batches(killed, config, 200)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_run_moves_from_eight_devices_to_four_two_one_and_another_mesh(text, tmp_path):
    fields = {"steps": 40, "save_every": 3}
    config = tiny_config(text, **fields)
    config.data.batch_size = 8
    places = [(8, {"fsdp": 8, "data": 1}), (4, {"data": 4}), (2, {"data": 1, "model": 2}), (1, {})]
    moved, straight = tmp_path / "moved", tmp_path / "straight"
    assert train.main(config, straight) == 0
    for devices, mesh in places:
        process = start(text, moved, fields | {"rows": 8}, mesh, devices)
        code, rest = stop_once(process, signal.SIGTERM, 4, 0.0)
        assert code == 143, rest
    last = start(text, moved, fields | {"rows": 8}, {"data": 1, "fsdp": 2, "seq": 2, "model": 2}, 8)
    rest = last.communicate()[0]
    assert last.returncode == 0, rest
    found, expected = losses(moved), losses(straight)
    assert list(found) == list(expected)
    limit = tolerance(jnp.float32, 16 * 32)
    assert_close(list(found.values()), list(expected.values()), limit, "loss")
    assert_batches(moved, config, 40)


@pytest.mark.exhaustive
def test_a_disk_that_fills_ends_the_run_with_a_message_and_a_code(text, tmp_path):
    """In mid-run by a limit on the size of files; and on a small file system of its own."""
    fields = {"steps": 12, "save_every": 2}
    run = tmp_path / "run"
    process = start(text, run, fields, {}, 1, "20000")
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert re.search(r"CheckpointError: .*checkpoint", output)
    assert checkpoint.Checkpoints(run).steps() in ([2], [2, 4])  # 4 was under way
    assert train.main(tiny_config(text, **fields), run) == 0  # where there is room again
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=768k", "none", str(small)]
    if shutil.which("mount") is None or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        process = start(text, small / "run", fields | {"keep": 100, "steps": 60})
        output = process.communicate()[0]
        assert process.returncode == 1, output
        assert "No space left" in output or "RESOURCE_EXHAUSTED" in output, output
        steps = checkpoint.Checkpoints(small / "run").steps()
        assert steps, output
        whole = tmp_path / "copied"
        shutil.copytree(small / "run", whole)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert train.main(tiny_config(text, **fields), whole) == 0


@pytest.mark.exhaustive
def test_a_second_process_compiles_nothing_anew(text, tmp_path, monkeypatch):
    cache, entries = tmp_path / "cache", []
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    for name in ("first", "second"):
        process = start(text, tmp_path / name, {"steps": 3})
        output = process.communicate()[0]
        assert process.returncode == 0, output
        entries.append({path.name for path in cache.iterdir() if path.name.endswith("-cache")})
    assert any("train_step" in name for name in entries[0])
    assert entries[0] == entries[1]
