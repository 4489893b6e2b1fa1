"""The trainer: resume, stop, skip, refuse; all on a run that takes a second."""

import errno
import fcntl
import json
import logging
import os
import pathlib
import runpy
import shutil
import signal
import threading
import warnings

import jax
import numpy as np
import pytest

from tests.tiny_run import assert_equal_states, tiny_config, write_text
from ttt_jax import checkpoint, evaluate, metrics, sharding, train, workdirs
from ttt_jax.tasks import make_task
from ttt_jax.train_step import make_train_step, make_trainee


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run of six steps."""
    workdir = tmp_path_factory.mktemp("finished")
    assert train.main(tiny_config(text), workdir) == 0
    return workdir


def read_state(workdir, config, step=None):
    """The state of a checkpoint, the newest by default, and the position of the data."""
    trainee = make_trainee(config.model, config.optimizer, config.train.steps, sharding.make_mesh())
    checkpoints = checkpoint.Checkpoints(workdir)
    batches = make_task(config).batches("train")
    assert step is None or step in checkpoints.steps()
    state = checkpoints.restore(trainee.abstract, batches)
    checkpoints.close()
    return state, batches.get_state()


def stop_at(monkeypatch, step, signum=signal.SIGTERM):
    """Sends this process a signal while step `step` is running."""
    steps = iter(range(1, 1000))
    place = sharding.place_batch

    def place_and_signal(*args):
        if threading.current_thread() is threading.main_thread() and next(steps) == step:
            os.kill(os.getpid(), signum)
        return place(*args)

    monkeypatch.setattr(sharding, "place_batch", place_and_signal)


def test_a_run_leaves_what_it_promises(finished, text):
    names = {path.name for path in finished.iterdir()}
    assert names >= {"checkpoints", "config.json", "metrics.jsonl", "evaluation.json", "loss.png"}
    assert checkpoint.Checkpoints(finished).steps() == [2, 4, 6]
    lines = metrics.read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "grad_norm", "state_norm", "learning_rate", "tokens", "mfu"} <= set(lines[0])
    report = evaluate.read_report(finished)
    assert report["step"] == 6
    assert 1.0 < report["perplexity"] < 258.0
    assert sum(count for _, _, count, _ in report["by_position"]) == report["tokens"]
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_resumed_run_is_the_same_bit_for_bit(
    signum, code, finished, text, tmp_path, monkeypatch
):
    config = tiny_config(text)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signum)
        assert train.main(config, tmp_path) == code
    assert checkpoint.Checkpoints(tmp_path).steps() == [2, 3]
    assert train.main(config, tmp_path) == 0
    resumed, position = read_state(tmp_path, config)
    straight, expected_position = read_state(finished, config)
    assert_equal_states(resumed, straight)
    assert position == expected_position
    losses = [[line["loss"] for line in metrics.read_metrics(d / "metrics.jsonl")]
              for d in (tmp_path, finished)]  # fmt: skip
    assert losses[0] == losses[1]
    assert evaluate.read_report(tmp_path) == evaluate.read_report(finished)


def test_a_finished_workdir_is_left_alone(finished, text, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    assert train.main(tiny_config(text), finished) == 0
    assert "is finished" in capsys.readouterr().out
    assert train.main(tiny_config(text, steps=4), finished) == 0
    assert "past the 4 asked for" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}


def test_a_longer_run_goes_on_from_a_finished_one(finished, text, tmp_path, caplog):
    shutil.copytree(finished, tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        assert train.main(tiny_config(text, steps=7), tmp_path / "run") == 0
    assert "the learning-rate schedule" in caplog.text
    assert checkpoint.Checkpoints(tmp_path / "run").steps()[-1] == 7


def test_no_steps_at_all(text, tmp_path):
    assert train.main(tiny_config(text, steps=0), tmp_path) == 0
    assert checkpoint.Checkpoints(tmp_path).steps() == [0]
    assert evaluate.read_report(tmp_path)["step"] == 0


def test_the_last_step_is_saved_off_the_interval(text, tmp_path):
    assert train.main(tiny_config(text, steps=3), tmp_path) == 0
    assert checkpoint.Checkpoints(tmp_path).steps() == [2, 3]


@pytest.mark.parametrize("damage", ["gutted", "cut", "flipped", "no metadata"])
def test_a_corrupt_newest_checkpoint_falls_back(damage, finished, text, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "evaluation.json").unlink()
    newest = run / "checkpoints" / "6"
    if damage == "gutted":
        for path in newest.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif damage == "no metadata":
        (newest / "_CHECKPOINT_METADATA").unlink()
    else:
        files = [p for p in (newest / "params").rglob("d/*") if p.is_file()]
        largest = max(files, key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        half = len(content) // 2
        content[half:] = b"" if damage == "cut" else bytes(255 - byte for byte in content[half:])
        largest.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert train.main(tiny_config(text), run) == 0
    assert "6 is not whole and is passed over" in caplog.text
    assert checkpoint.Checkpoints(run).steps()[-1] == 6
    assert len(list((run / "broken").iterdir())) == 1
    config = tiny_config(text)
    assert_equal_states(read_state(run, config)[0], read_state(finished, config)[0])


def test_nothing_readable_is_an_error_and_nothing_is_deleted(finished, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "evaluation.json").unlink()
    whole = {path: path.read_bytes() for path in run.rglob("_CHECKPOINT_METADATA")}
    before = (run / "metrics.jsonl").read_bytes()
    for path in whole:
        path.write_text("{")
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError, match="can be read, and all were left"):
            train.main(tiny_config(text), run)
    assert checkpoint.Checkpoints(run).steps() == [2, 4, 6] and not (run / "broken").exists()
    assert (run / "metrics.jsonl").read_bytes() == before
    for path, content in whole.items():  # the fault has passed
        path.write_bytes(content)
    assert train.main(tiny_config(text), run) == 0
    assert evaluate.read_report(run) == evaluate.read_report(finished)


def test_a_run_whose_checkpoints_are_all_broken_does_not_begin_anew(finished, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "evaluation.json").unlink()
    (run / "checkpoints").rename(run / "broken")
    before = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError, match="broken holds .* and .* none; move"):
            train.main(tiny_config(text), run)
    assert (run / "metrics.jsonl").read_bytes() == before
    (run / "broken" / "6").rename(run / "checkpoints" / "6")
    assert train.main(tiny_config(text), run) == 0
    assert evaluate.read_report(run) == evaluate.read_report(finished)


def test_a_restored_state_gives_its_memory_away(finished, text):
    """Else the first step after a resume needs room for two states."""
    config, task = tiny_config(text), make_task(tiny_config(text))
    trainee = make_trainee(config.model, config.optimizer, config.train.steps, sharding.make_mesh())
    state, _ = read_state(finished, config)
    batch = sharding.place_batch(
        next(task.batches("train")), sharding.batch_sharding(trainee.mesh, 4)
    )
    with jax.set_mesh(trainee.mesh), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated buffers were not usable")
        make_train_step(trainee, task.loss)(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_another_configuration_is_refused_before_work_starts(finished, text, monkeypatch):
    monkeypatch.setattr(train, "make_task", lambda _: pytest.fail("work has started"))
    config = tiny_config(text)
    config.optimizer.learning_rate = 0.5
    with pytest.raises(checkpoint.CheckpointError, match="optimizer.learning_rate is 0.01 there"):
        train.main(config, finished)


def test_checkpoints_without_their_configuration_are_refused(finished, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "config.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="holds checkpoints and no config.json"):
        train.main(tiny_config(text), run)


def test_fields_that_change_no_update_may_differ(finished, text, capsys):
    config = tiny_config(text, log_every=5, keep=7)
    config.mesh.fsdp, config.mesh.data = 1, 1
    assert train.main(config, finished) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["file", "under a file", "/proc/none"])
def test_an_unwritable_folder_is_refused(place, text, tmp_path):
    (tmp_path / "file").write_text("")
    workdir = {"file": tmp_path / "file", "under a file": tmp_path / "file" / "x"}.get(place, place)
    with pytest.raises(checkpoint.CheckpointError, match="cannot be written to"):
        train.main(tiny_config(text), workdir)
    with pytest.raises(ValueError, match="cannot be written to .*; give another --pictures"):
        evaluate.evaluate_workdir(tmp_path, pictures=workdir)


@pytest.mark.parametrize(
    "workdir, message", [("gs://bucket/run", "mount the bucket"), ("", "has no name")]
)
def test_an_address_or_nothing_is_no_workdir(workdir, message, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        train.main(tiny_config(text), workdir)
    assert not list(tmp_path.iterdir())


def test_one_run_at_a_time_in_a_workdir_and_an_error_frees_it(text, tmp_path, monkeypatch):
    config = tiny_config(text)
    signed = rf"process \(host .+, pid {os.getpid()}, since 20.* UTC\) trains in workdir="

    def start_another(*_):
        patch.undo()
        with pytest.raises(checkpoint.CheckpointError, match=signed):
            train.main(config, tmp_path)
        raise ValueError("the first run fails")

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "place_batch", start_another)
        with pytest.raises(ValueError, match="the first run fails"):
            train.main(config, tmp_path)
    assert train.main(config, tmp_path) == 0


def test_a_file_system_without_locks_is_a_warning(text, tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        assert train.main(tiny_config(text, steps=1), tmp_path) == 0
    assert "train.lock cannot be locked" in caplog.text


def test_an_evaluation_on_other_data_is_asked_for_on_purpose(finished, text, tmp_path):
    run, words = tmp_path / "run", tmp_path / "words.jsonl"
    shutil.copytree(finished, run)
    shutil.copy(text, words)
    config = tiny_config(words)
    workdirs.write_config(run, config)
    report = evaluate.read_report(finished)
    assert evaluate.evaluate_workdir(run)[1].metrics["perplexity"] == report["perplexity"]
    _, position = read_state(run, config)
    words.write_text(json.dumps({"text": "one more"}) + "\n" + words.read_text())
    changed = make_task(config).batches("train").get_state()["corpus"]
    wanted = f"corpus='{changed}' now, .* 6 was trained on corpus='{position['corpus']}'.*--source="
    with pytest.raises(ValueError, match=wanted):
        evaluate.evaluate_workdir(run)
    with pytest.raises(checkpoint.CheckpointError, match="^--step=9: /.*give one of these, or"):
        evaluate.evaluate_workdir(run, step=9)
    with pytest.raises(checkpoint.CheckpointError, match="workdir='' has no name .an unset shell"):
        evaluate.evaluate_workdir("")
    other = evaluate.evaluate_workdir(run, source=str(words))[1]
    assert other.metrics["perplexity"] != report["perplexity"]


@pytest.mark.parametrize("name", ["lact_llm", "vittt", "lact_nvs"])
def test_the_saved_position_of_every_task_names_its_data(name):
    path = pathlib.Path(__file__).parent.parent / "configs" / f"{name}.py"
    task = make_task(runpy.run_path(str(path))["get_config"]("tiny"))
    position = task.batches("train").get_state()
    (found,) = set(evaluate.HASHES) & set(position)
    assert position[found][:8] in task.describe()


def put_in_the_way(folder, spare):
    """Moves a folder to `spare` and puts a file in its place, while a writer may make it anew."""
    for attempt in range(100):
        try:
            if folder.exists():
                folder.rename(spare / f"moved-{attempt}")
            folder.write_text("a file in the way")
            return
        except OSError:
            continue
    pytest.fail(f"{folder} could not be replaced")


def test_a_workdir_that_fails_in_mid_run_is_an_error(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    place, calls = sharding.place_batch, iter(range(100))

    def place_and_break(*args):
        if next(calls) == 2:  # after the checkpoint of step 2 was begun
            put_in_the_way(run / "checkpoints", tmp_path)
        return place(*args)

    monkeypatch.setattr(sharding, "place_batch", place_and_break)
    with pytest.raises(checkpoint.CheckpointError):
        train.main(tiny_config(text), run)


def poison(monkeypatch, steps):
    """Makes the loss of some steps infinite, through the weights of their batches."""
    place, count = sharding.place_batch, iter(range(1, 1000))

    def place_poisoned(batch, placement):
        if next(count) in steps:
            batch = {**batch, "weights": np.full_like(batch["weights"], np.inf)}
        return place(batch, placement)

    monkeypatch.setattr(sharding, "place_batch", place_poisoned)


def test_a_non_finite_step_is_skipped_and_counted(text, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {3})
    assert train.main(tiny_config(text), tmp_path) == 0
    assert "step 3: loss or gradient is not finite; the step is skipped" in capsys.readouterr().out
    lines = [r for r in metrics.read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "train"]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert lines[2]["loss"] is None
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[2], parse_constant=pytest.fail)


def test_too_many_non_finite_steps_end_the_run(text, tmp_path, monkeypatch, capsys):
    config = tiny_config(text, max_nonfinite_steps=1, steps=9)
    with monkeypatch.context() as patch:
        poison(patch, set(range(3, 100)))
        assert train.main(config, tmp_path) == train.EXIT_NOT_FINITE
    output = capsys.readouterr().out
    assert "max_nonfinite_steps=1 are borne" in output and "in another --workdir" in output
    stopped = checkpoint.Checkpoints(tmp_path).steps()[-1]
    assert 4 <= stopped < 9
    assert not (tmp_path / "evaluation.json").exists()
    # What the message names can be done: the same command, and with a larger limit.
    with monkeypatch.context() as patch:
        poison(patch, {1})  # the next one, again
        assert train.main(config, tmp_path) == train.EXIT_NOT_FINITE
    config.train.max_nonfinite_steps = 9
    with monkeypatch.context() as patch:
        poison(patch, {1})
        assert train.main(config, tmp_path) == 0
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 10))


@pytest.mark.parametrize(
    "part, field, value, message",
    [
        ("model", "vocab_size", 200, "vocab_size=200 is too small"),
        ("data", "source", "/no/such/text", "source='/no/such/text': no such file"),
        ("mesh", "model", 1000, "model=1000"),
    ],
)
def test_what_fails_before_the_first_step_leaves_no_folder(
    part, field, value, message, text, tmp_path
):
    config = tiny_config(text)
    setattr(getattr(config, part), field, value)
    with pytest.raises(ValueError, match=message):
        train.main(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        train.main(config, tmp_path)
    assert tmp_path.is_dir()  # it was there before


def test_evaluation_in_between_does_not_move_the_training(finished, text, tmp_path):
    config = tiny_config(text, eval_every=2, eval_batches=1)
    assert train.main(config, tmp_path) == 0
    lines = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6]
    assert_equal_states(read_state(tmp_path, config)[0], read_state(finished, config)[0])


def test_one_compilation_of_the_step_and_one_of_the_evaluation(text, tmp_path, caplog):
    jax.clear_caches()
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        assert train.main(tiny_config(text, eval_every=2), tmp_path) == 0
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
    assert sum("train_step" in message for message in compiled) == 1
    assert sum("eval_step" in message for message in compiled) == 1
