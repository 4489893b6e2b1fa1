"""A run that trains in a second: a few words as text, a model of a thousand values."""

import json
import os
import pathlib

import jax
import numpy as np

from ttt_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from ttt_jax.models import lact_llm


def write_text(path: pathlib.Path) -> pathlib.Path:
    """Writes forty short documents of random words as a .jsonl file."""
    random = np.random.default_rng(0)
    words = ["state", "weight", "chunk", "key", "value", "query", "learn", "a", "the", "of"]
    lines = [" ".join(random.choice(words, random.integers(5, 60))) for _ in range(40)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def tiny_config(text: pathlib.Path, **train) -> Config:
    """Returns a configuration on that text; `train` changes fields of TrainConfig."""
    return Config(
        model=lact_llm.preset(
            "tiny",
            hidden_size=16,
            num_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            chunk_size=16,
            window_size=16,
            low_rank=4,
            variant=6,
            scan_layers=False,
            vocab_size=258,
        ),
        data=DataConfig(source=str(text), eval_fraction=0.2, sequence_length=32, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        train=TrainConfig(**{"steps": 6, "save_every": 2, "log_every": 1, **train}),
    )


def program_environment(**more: str) -> dict[str, str]:
    """Returns the environment for a process that imports this source tree."""
    root = pathlib.Path(__file__).parent.parent
    path = os.pathsep.join([str(root), str(root / "kernels")])
    return os.environ | {"PYTHONPATH": path} | more


def assert_equal_states(a, b) -> None:
    """Fails unless two pytrees agree in structure and in every bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    leaves = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert x.tobytes() == y.tobytes(), f"{jax.tree_util.keystr(path)} differs"
