"""SIGKILL at random moments: whatever was being computed or written, the run goes on the same."""

import random
import subprocess
import sys
import time

import pytest

from tests.tiny_run import assert_equal_states, program_environment, tiny_config, write_text
from tests.train_test import read_state
from ttt_jax import evaluate

_STEPS = 24
_PROGRAM = """
import pathlib, sys
from tests.tiny_run import tiny_config
from ttt_jax import train
config = tiny_config(pathlib.Path(sys.argv[1]), steps={steps}, save_every=1)
sys.exit(train.main(config, sys.argv[2]))
"""


def start(text, workdir, cache):
    """Starts the trainer in a process of its own."""
    environment = program_environment(
        JAX_COMPILATION_CACHE_DIR=str(cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
    )
    command = [sys.executable, "-c", _PROGRAM.format(steps=_STEPS), str(text), str(workdir)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def kill_once(process, generator, most_steps):
    """Kills the trainer some steps and some milliseconds on; False if it ended before that."""
    lines = generator.randint(1, most_steps)
    for line in process.stdout:
        lines -= line.startswith("step ")
        if lines == 0:
            time.sleep(generator.uniform(0.0, 0.2))
            break
    process.kill()
    return process.wait() < 0


@pytest.mark.parametrize(
    "kills", [2, pytest.param(10, marks=pytest.mark.exhaustive, id="10 kills")]
)
def test_killed_and_resumed_equals_uninterrupted(kills, tmp_path):
    text = write_text(tmp_path / "words.jsonl")
    straight, killed, cache = tmp_path / "straight", tmp_path / "killed", tmp_path / "cache"
    assert start(text, straight, cache).wait() == 0
    generator = random.Random(kills)
    for _ in range(kills):
        assert kill_once(start(text, killed, cache), generator, _STEPS // kills)
        assert not (killed / "evaluation.json").exists()
    assert start(text, killed, cache).wait() == 0
    config = tiny_config(text, steps=_STEPS, save_every=1)
    state, position = read_state(killed, config)
    expected_state, expected_position = read_state(straight, config)
    assert_equal_states(state, expected_state)
    assert position == expected_position
    assert evaluate.read_report(killed) == evaluate.read_report(straight)
    assert not (killed / "broken").exists()
