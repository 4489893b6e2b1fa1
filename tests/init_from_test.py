"""A new run that begins with another run's parameters: which, that they fit, and nothing else."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from tests.tiny_run import assert_equal_states, tiny_config, write_text
from ttt_jax import checkpoint, convert, metrics, sharding, train
from ttt_jax.config import TrainConfig
from ttt_jax.convert import files
from ttt_jax.tasks import make_task
from ttt_jax.train_step import init_state, make_trainee


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


@pytest.fixture(scope="module")
def pretrained(text, tmp_path_factory):
    """A run of four steps that keeps an average, with checkpoints at 2 and 4."""
    workdir = tmp_path_factory.mktemp("pretrained")
    assert train.main(tiny_config(text, steps=4, ema_decay=0.5), workdir) == 0
    return workdir


def read(workdir, config, step):
    trainee = make_trainee(
        config.model, config.optimizer, config.train.steps, sharding.make_mesh(),
        averaged=config.train.ema_decay > 0,
    )  # fmt: skip
    checkpoints, batches = checkpoint.Checkpoints(workdir), make_task(config).batches("train")
    assert checkpoints.steps()[-1] == step
    state = checkpoints.restore(trainee.abstract, batches)
    checkpoints.close()
    return state, batches.get_state(), init_state(trainee, config.train.seed)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("place, step", [("", 4), ("/2", 2), ("/checkpoints/2", 2)])
def test_parameters_alone_come_from_the_other_run(
    place, step, averaged, pretrained, text, tmp_path, capsys
):
    """Those that it evaluates, which are its average; all else is a new run's, from step 0."""
    given = f"{pretrained}{place}"
    config = tiny_config(text, steps=0, init_from=given, ema_decay=0.9 if averaged else 0.0)
    assert train.main(config, tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"from the average of {pretrained}, step {step}" in printed
    state, position, fresh = read(tmp_path, config, 0)
    taken = checkpoint.load_arrays(pretrained, step).params
    assert_equal_states(state.params, taken)
    assert_equal_states(state.average, taken if averaged else {})
    state, fresh = (x._replace(params={}, average={}) for x in (state, fresh))
    assert_equal_states(state, fresh)
    assert position == make_task(config).batches("train").get_state()
    assert json.loads((tmp_path / "config.json").read_text())["train"]["init_from"] == given


def test_the_new_run_goes_on_without_the_old_one(pretrained, text, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(pretrained, old)
    config = tiny_config(text, steps=2, init_from=str(old))
    assert train.main(config, new) == 0
    first = metrics.read_metrics(new / "metrics.jsonl")[0]["loss"]
    assert first < 0.99 * np.log(258)  # where a run with drawn parameters begins
    shutil.rmtree(old)
    config.train.steps, config.train.init_from = 3, os.path.relpath(old)  # the same one
    assert train.main(config, new) == 0
    assert checkpoint.Checkpoints(new).steps()[-1] == 3
    with pytest.raises(checkpoint.CheckpointError, match="init_from is '.*old' there, '' here"):
        train.main(tiny_config(text, steps=3), new)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 32}, r"average/.* is \[\[.*16.*\], 'float32'\] there and \[\[.*32.*\].*"
         r"model.hidden_size is 16 there, 32 here"),
        ({"tie_embeddings": True}, r"average/head/kernel is .* there and missing in this run"),
        ({"scan_layers": True}, r"average/layers/.* is missing there and .*scan_layers is False"),
        ({"num_layers": 2}, r"average/layers/1/.* is missing there and .*num_layers is 1 there"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_named_and_nothing_is_written(
    change, words, pretrained, text, tmp_path
):
    config = tiny_config(text, init_from=str(pretrained))
    for name, value in change.items():
        setattr(config.model, name, value)
    with pytest.raises(ValueError, match=rf"checkpoint .*4: {words}"):
        train.main(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_another_inner_loop_of_the_same_shapes_is_taken_and_said(
    pretrained, text, tmp_path, capsys
):
    config = tiny_config(text, steps=0, init_from=str(pretrained))
    config.model.window_size = 8
    assert train.main(config, tmp_path) == 0
    assert "(model.window_size is 16 there, 8 here)" in capsys.readouterr().out


def test_another_tokenizer_is_a_warning(pretrained, text, tmp_path, caplog):
    theirs = tmp_path / "theirs"
    shutil.copytree(pretrained, theirs)
    stored = (theirs / "config.json").read_text()
    (theirs / "config.json").write_text(stored.replace('"bytes"', '"other.model"'))
    for init_from, warned in ((pretrained, False), (theirs, True)):
        caplog.clear()
        config = tiny_config(text, steps=0, init_from=str(init_from))
        trainee = make_trainee(config.model, config.optimizer, 0, sharding.make_mesh())
        checkpoint.find_initial(config, trainee)
        assert ("tokenizer is 'other.model' in" in caplog.text) == warned
        assert ("every embedding means another token" in caplog.text) == warned


def test_what_cannot_be_read_is_refused_and_nothing_is_written(pretrained, text, tmp_path, caplog):
    (tmp_path / "none").mkdir()
    shutil.copytree(pretrained, tmp_path / "young")
    shutil.rmtree(tmp_path / "young" / "checkpoints")
    shutil.copytree(pretrained, tmp_path / "broken")
    (tmp_path / "broken" / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text("{")
    shutil.copytree(pretrained, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "4" / "average" / "d")
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / "2")
    for path, words in (
        (tmp_path / "none", "there is no run .* or of launch/convert.py"),
        (tmp_path / "nowhere" / "7", "there is no run"),
        (tmp_path / "young", "a run without a checkpoint; wait for its first one, or name another"),
        (pretrained / "9", r"step=9: .* holds the steps \[2, 4\]"),
        (tmp_path / "broken", r"4 cannot be read .*; name another step, of \[2\] .*broken/2\)"),
        (tmp_path / "cut", r"4 cannot be read .*; name .* \(config.train.init_from=.*cut/2\)"),
        (tmp_path / "alone", "4 cannot be read .*; there is no other step$"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=f"init_from='.*': .*{words}"):
            train.main(tiny_config(text, init_from=str(path)), tmp_path / "new")
    assert not (tmp_path / "new").exists() and not (tmp_path / "young" / "checkpoints").exists()
    assert "passed over" not in caplog.text
    with pytest.raises(ValueError, match="config.train.init_from=3: must be a path"):
        TrainConfig(init_from=3).validate()


def test_from_converted_weights(text, tmp_path):
    config = tiny_config(text, steps=0)
    config.model.variant = 0
    trainee = make_trainee(config.model, config.optimizer, 0, sharding.make_mesh())
    params = jax.tree.map(np.asarray, init_state(trainee, 5).params)
    files.write_tensors(tmp_path / "w.pt", convert.save(config.model, params, {}), None)
    convert.import_weights(config, tmp_path / "w.pt", tmp_path / "official")
    config.train.init_from = str(tmp_path / "official")
    assert train.main(config, tmp_path / "new") == 0
    assert_equal_states(checkpoint.load_arrays(tmp_path / "new").params, params)
