"""Two and four processes as one run: data, losses, checkpoints, signals, refusals."""

import json
import shutil
import signal

import jax.numpy as jnp
import pytest

from tests.hosts import TRAIN, finish, start_hosts, write_config
from tests.tiny_run import tiny_config, write_text
from tests.tolerances import assert_close, tolerance
from ttt_jax import checkpoint, metrics, train, workdirs

_DEVICES = 4
_MESHES = {
    "data 4": {"data": 4},
    "fsdp 2, model 2": {"data": 1, "fsdp": 2, "model": 2},
    "seq 4": {"data": 1, "seq": 4},  # every host reads every row
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


def losses(workdir):
    """The training loss of each step that the log of a run holds."""
    lines = metrics.read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def assert_equal_curves(found, expected):
    """Fails unless the same steps have the same losses, within float32's rounding."""
    assert list(found) == list(expected)
    limit = tolerance(jnp.float32, 16 * 32)
    assert_close(list(found.values()), list(expected.values()), limit, "loss")


def training(config, workdir):
    """The command that trains."""
    return (*TRAIN, f"--config={config}", f"--workdir={workdir}")


def start_training(config, workdir, count, devices):
    return start_hosts([training(config, workdir)] * count, devices)


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """The uninterrupted run of one process on one device."""
    workdir = tmp_path_factory.mktemp("straight")
    assert train.main(tiny_config(text), workdir) == 0
    return workdir


def test_a_signal_to_one_of_two_hosts_saves_and_one_process_goes_on(text, tmp_path):
    fields = {"steps": 40, "save_every": 100}
    config = write_config(tmp_path / "config.py", text, json.dumps(fields), '{"data": 2}')
    run, straight = tmp_path / "run", tmp_path / "straight"
    hosts = start_training(config, run, 2, 1)
    for line in hosts[0].stdout:
        if line.startswith("step"):
            hosts[1].send_signal(signal.SIGTERM)
            break
    codes, outputs = finish(hosts)
    assert codes == [143, 143], outputs
    assert "SIGTERM" not in outputs[0]  # it was told by the other
    (stopped,) = checkpoint.Checkpoints(run).steps()
    assert list(losses(run)) == list(range(1, stopped + 1)) and stopped < 40
    for workdir in (run, straight):
        assert train.main(tiny_config(text, **fields), workdir) == 0  # on this process's one device
    assert_equal_curves(losses(run), losses(straight))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", list(_MESHES))
def test_the_batches_are_the_same_on_one_two_and_four_hosts(mesh, text, tmp_path):
    config = write_config(tmp_path / "config.py", text, "{}", json.dumps(_MESHES[mesh]))
    found = {}
    for count in (1, 2, 4):
        command = ("-m", "tests.hosts_program", "stream", str(config), "20")
        codes, outputs = finish(start_hosts([command] * count, _DEVICES // count))
        assert codes == [0] * count, outputs
        found[count] = [json.loads(output.splitlines()[-1]) for output in outputs]
        assert all(digests == found[1][0] for digests in found[count])
    assert len(set(found[1][0])) == 20


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", ["fsdp 2, model 2", "seq 4"])
def test_the_losses_are_the_same_and_checkpoints_go_both_ways(mesh, text, straight, tmp_path):
    mesh = json.dumps(_MESHES[mesh])
    config = write_config(tmp_path / "config.py", text, '{"steps": 6}', mesh)
    runs, states = {}, {}
    for count in (1, 2, 4):
        runs[count] = tmp_path / f"run {count}"
        codes, outputs = finish(start_training(config, runs[count], count, _DEVICES // count))
        assert codes == [0] * count, outputs
        assert_equal_curves(losses(runs[count]), losses(straight))
        assert checkpoint.Checkpoints(runs[count]).steps() == [2, 4, 6]
    for writer, reader in ((2, 1), (2, 4), (1, 1), (1, 2)):
        command = ("-m", "tests.hosts_program", "state", str(config), str(runs[writer]))
        codes, outputs = finish(start_hosts([command] * reader, _DEVICES // reader))
        assert codes == [0] * reader, outputs
        found = {tuple(json.loads(output.splitlines()[-1])[:2]) for output in outputs}
        assert len(found) == 1
        assert states.setdefault(writer, found) == found
        assert {step for _, step in found} == {6}
    longer = write_config(tmp_path / "longer.py", text, '{"steps": 8}', mesh)
    for writer, reader in ((2, 1), (1, 4)):
        codes, outputs = finish(start_training(longer, runs[writer], reader, _DEVICES // reader))
        assert codes == [0] * reader, outputs
    assert_equal_curves(losses(runs[2]), losses(runs[1]))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_two_hosts_pass_over_a_gutted_checkpoint(text, straight, tmp_path):
    config = write_config(tmp_path / "config.py", text, '{"steps": 6}', '{"data": 2}')
    run = tmp_path / "run"
    assert finish(start_training(config, run, 2, 1))[0] == [0, 0]
    (run / "evaluation.json").unlink()
    for path in (run / "checkpoints" / "6").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cut = max((run / "checkpoints" / "4" / "params").rglob("d/*"), key=lambda p: p.stat().st_size)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    codes, outputs = finish(start_training(config, run, 2, 1))
    assert codes == [0, 0], outputs
    assert "Resuming at step 2 of 6" in outputs[0]
    assert len(list((run / "broken").iterdir())) == 2
    assert_equal_curves(losses(run), losses(straight))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_hosts_that_differ_are_refused(text, tmp_path):
    """Other flags on one host, and folders that are not shared: an error, not a wait for ever."""
    configs = [
        write_config(tmp_path / f"{steps}.py", text, f'{{"steps": {steps}}}', '{"data": 2}')
        for steps in (6, 7)
    ]
    a, b = tmp_path / "a", tmp_path / "b"
    other_flags = [training(config, a) for config in configs]
    other_folders = [training(configs[0], folder) for folder in (a, b)]
    for commands, wanted in ((other_flags, "different flags"), (other_folders, "share")):
        codes, outputs = finish(start_hosts(commands, 1))
        assert codes == [1, 1], outputs
        assert all(wanted in output for output in outputs), outputs


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_all_hosts_are_refused_where_another_run_trains(text, tmp_path):
    config = write_config(tmp_path / "config.py", text, '{"steps": 6}', '{"data": 2}')
    with workdirs.alone_in(tmp_path / "run"):
        codes, outputs = finish(start_training(config, tmp_path / "run", 2, 1))
        assert codes == [1, 1], outputs
        assert "another process (host" in outputs[0] and "another process trains" in outputs[1]
    assert finish(start_training(config, tmp_path / "run", 2, 1))[0] == [0, 0]
