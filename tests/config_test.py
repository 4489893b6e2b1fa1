"""The configuration: rules, JSON, flags."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_run import program_environment
from ttt_jax import config as config_lib
from ttt_jax import config_files
from ttt_jax.config import Config, DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from ttt_jax.models import lact_llm, transformer


@pytest.mark.parametrize(
    "part, field, value",
    [
        (DataConfig, "source", ""),
        (DataConfig, "eval_fraction", 0.0),
        (DataConfig, "eval_fraction", 1.0),
        (DataConfig, "sequence_length", 0),
        (DataConfig, "batch_size", 1.5),
        (DataConfig, "num_workers", -1),
        (OptimizerConfig, "name", "sgd"),
        (OptimizerConfig, "learning_rate", float("nan")),
        (OptimizerConfig, "b2", 1.0),
        (OptimizerConfig, "eps", 0.0),
        (OptimizerConfig, "clip_norm", -1.0),
        (OptimizerConfig, "warmup_steps", -1),
        (TrainConfig, "steps", -1),
        (TrainConfig, "steps", True),
        (TrainConfig, "accumulation_steps", 0),
        (TrainConfig, "keep", 1),
        (TrainConfig, "log_every", 0),
        (MeshConfig, "data", 0),
        (MeshConfig, "fsdp", -1),
    ],
)
def test_a_value_out_of_range_is_named(part, field, value):
    with pytest.raises(ValueError, match=r"config\.") as error:
        part(**{field: value}).validate()
    assert field in str(error.value) or part is MeshConfig


def test_parts_must_agree():
    config = Config(model=lact_llm.preset("tiny"))
    config.data.batch_size, config.train.accumulation_steps = 6, 4
    with pytest.raises(ValueError, match=r"data.batch_size=6.*accumulation_steps=4"):
        config.validate()


@pytest.mark.parametrize(
    "name",
    [f"{model}:{size}" for model in ("lact_llm", "transformer")
     for size in ("tiny", "125m", "760m", "3b")]
    + [f"lact_nvs:{size}" for size in ("tiny", "114m", "14", "24")],
)  # fmt: skip
def test_json_gives_back_every_shipped_configuration(name):
    config = config_files.load(name)
    config.validate()
    text = config_lib.to_json(config)
    back = config_lib.from_json(text)
    assert back == config and type(back.model) is type(config.model)
    assert f'"class": "{type(config.model).__module__}.{type(config.model).__name__}"' in text


@given(rate=st.floats(0.0, 1.0), steps=st.integers(0, 10**9), source=st.text(min_size=1), pack=...)
def test_json_gives_back_any_value(rate: float, steps: int, source: str, pack: bool):
    config = Config(
        model=transformer.preset("tiny"),
        data=DataConfig(source=source, pack=pack),
        optimizer=OptimizerConfig(learning_rate=rate),
        train=TrainConfig(steps=steps),
    )
    assert config_lib.from_json(config_lib.to_json(config)) == config


def test_json_of_another_class_or_field_is_refused():
    with pytest.raises(ValueError, match="must name a class of ttt_jax"):
        config_lib.from_dict({"class": "subprocess.Popen"})
    with pytest.raises(ValueError, match="no such configuration dataclass"):
        config_lib.from_dict({"class": "ttt_jax.config.to_json"})
    with pytest.raises(ValueError, match="no field 'stepz'"):
        config_lib.from_dict({"class": "ttt_jax.config.TrainConfig", "stepz": 1})


def test_a_field_that_json_cannot_hold_is_refused():
    config = Config(model=lact_llm.preset("tiny"))
    config.data.source = object()
    with pytest.raises(ValueError, match="DataConfig.source"):
        config_lib.to_dict(config)


def test_differences_are_listed_by_their_dotted_names():
    ours, theirs = Config(model=lact_llm.preset("tiny")), Config(model=lact_llm.preset("tiny"))
    assert config_lib.differences(ours, theirs) == []
    theirs.train.seed, theirs.model.variant = 5, 2
    assert config_lib.differences(ours, theirs) == [("model.variant", 0, 2), ("train.seed", 0, 5)]
    theirs = dataclasses.replace(theirs, model=transformer.preset("tiny"))
    found = config_lib.differences(ours, theirs)
    assert found[0] == ("model", "LactLLMConfig", "TransformerConfig")


_FLAGS = """
import sys
from absl import app
from ml_collections import config_flags
from ttt_jax import config_files
CONFIG = config_flags.DEFINE_config_file("config")
def main(argv):
    c = CONFIG.value
    print(c.train.steps, c.model.variant, c.model.implementation, c.data.pack, c.optimizer.b1)
app.run(main, flags_parser=config_files.parse_flags)
"""


def parse(*flags):
    command = [sys.executable, "-c", _FLAGS, *flags]
    return subprocess.run(command, env=program_environment(), capture_output=True, text=True)


@pytest.mark.parametrize(
    "program, message",
    [
        ("def get_config(", "SyntaxError: .*line 1"),
        ("import missing_module", "ModuleNotFoundError: .*missing_module"),
        ("x = 3", "it defines no function get_config"),
        ("def get_config(): return 3", "must return a ttt_jax.config.Config, not 3"),
        ("def get_config(size): raise ValueError(f'no {size}')", "test.py:a: no a"),
    ],
)
def test_a_broken_configuration_file_is_named(program, message, tmp_path):
    path = tmp_path / "test.py"
    path.write_text(program)
    size = ":a" if "size" in program else ""
    with pytest.raises(ValueError, match=f"--config=.*{message}"):
        config_files.resolve_flags(["program", f"--config={path}{size}"])


def test_flags_override_any_field():
    done = parse(
        "--config=configs/lact_llm.py:tiny", "--config.train.steps=7", "--config.model.variant=6",
        "--config.model.implementation=xla", "--config.data.pack=false", "--config.optimizer.b1=0",
    )  # fmt: skip
    assert done.stdout.split() == ["7", "6", "xla", "False", "0.0"]


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.train.stepz=7", "config.train.stepz does not exist: config.train has steps, "),
        ("--noconfig.nothing.steps", "config.nothing does not exist: config has model, data, "),
        ("--config.data.pack.x=7", "config.data.pack.x does not exist: config.data.pack is True"),
        ("--config.train.steps=many", "config.train.steps=many"),
    ],
)
def test_a_flag_that_does_not_exist_or_fit_fails(flag, message):
    done = parse("--config=lact_llm:tiny", flag)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_or_size_that_does_not_exist_fails():
    assert "the project's own are ['lact_llm', 'lact_nvs', " in parse("--config=lackt:tiny").stderr
    assert "huge" in parse("--config=lact_llm:huge").stderr
