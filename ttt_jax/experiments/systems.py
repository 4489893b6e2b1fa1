"""The models of the experiments at each scale: three tasks, their variants and their baselines."""

import dataclasses
from typing import Any

from ttt_jax import config_files
from ttt_jax.config import Config

SCALES = ("tiny", "small", "paper")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskModels:
    """The models of one task.

    Attributes:
      task: its name.
      config: configuration file of the model under study.
      baseline: configuration file of the softmax model of the same size; None where there is none.
      variants: the steps of the reduction that differ in this task.
      metric: name of the headline metric.
      better: "higher" or "lower".
      scale_of_paper: factor from our metric's unit to the paper's.
    """

    task: str
    config: str
    baseline: str | None
    variants: tuple[int, ...]
    metric: str
    better: str
    scale_of_paper: float = 1.0


TASKS = {
    "language": TaskModels(
        task="language",
        config="lact_llm",
        baseline="transformer",
        variants=(0, 1, 2, 3, 4, 5, 6),
        metric="perplexity",
        better="lower",
    ),
    # No momentum here: variant 5 is variant 4.
    "views": TaskModels(
        task="views",
        config="lact_nvs",
        baseline=None,
        variants=(0, 1, 2, 3, 4, 6),
        metric="psnr",
        better="higher",
    ),
    # No weight norm, rates or momentum: variants 2, 4 and 5 are those before them.
    "images": TaskModels(
        task="images",
        config="vittt",
        baseline="vit",
        variants=(0, 1, 3, 6),
        metric="top1",
        better="higher",
        scale_of_paper=100.0,
    ),
}

# Task and scale -> (size in the configuration file, fields to change). "small" is for one GPU and
# about a minute a model: 31M parameters, 52M tokens; it wants its own text and a tokenizer of at
# most 8,192 ids (data.source, data.tokenizer). "paper" is the paper's own setting.
_SIZES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("language", "tiny"): (
        "tiny",
        {
            "data.sequence_length": 256, "data.batch_size": 4, "data.eval_fraction": 0.01,
            "train.steps": 100, "train.save_every": 100,
        },
    ),
    ("language", "small"): (
        "125m",
        {
            "model.vocab_size": 8192, "model.hidden_size": 640, "model.num_layers": 4,
            "model.num_attention_heads": 10, "model.remat": "none",
            "data.sequence_length": 4096, "data.batch_size": 16, "data.num_workers": 0,
            "data.reset_documents": False, "train.steps": 800, "train.save_every": 800,
            "train.eval_every": 0, "optimizer.learning_rate": 2e-3, "optimizer.warmup_steps": 80,
        },
    ),
    ("language", "paper"): ("760m", {}),
    ("views", "tiny"): (
        "tiny",
        {
            "model.num_layers": 2, "data.batch_size": 4,
            "train.steps": 100, "train.save_every": 100,
        },
    ),
    ("views", "small"): ("114m", {"train.steps": 5000}),
    ("views", "paper"): ("114m", {"train.steps": 20000}),
    ("images", "tiny"): (
        "tiny",
        {
            "model.num_layers": 2, "data.batch_size": 32,
            "train.steps": 100, "train.save_every": 100,
        },
    ),
    ("images", "small"): ("s_imagenet", {}),
    ("images", "paper"): ("b_imagenet", {}),
}  # fmt: skip
# Fields of the model under study that its baseline does not have, or has otherwise.
_OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("language", "small"): {
        "model.num_fast_heads": 5, "model.chunk_size": 512, "model.window_size": 512
    },
}  # fmt: skip


def set_fields(config: Any, fields: dict[str, Any]) -> Any:
    """Sets dotted fields of a configuration; returns it.

    Raises:
      ValueError: a field does not exist.

    >>> set_fields(config_files.load("lact_llm:tiny"), {"train.steps": 7}).train.steps
    7
    """
    for name, value in fields.items():
        *path, last = name.split(".")
        part = config
        for step in path:
            part = getattr(part, step, None)
        if not hasattr(part, last):
            raise ValueError(f"config.{name}: there is no such field")
        setattr(part, last, value)
    return config


def make_config(
    task: str, scale: str, seed: int, fields: dict[str, Any], baseline: bool = False
) -> Config:
    """Builds the configuration of a model of an experiment.

    Args:
      task: a key of `TASKS`.
      scale: one of `SCALES`.
      seed: of the initial parameters; the data's order is the same for all seeds and models.
      fields: dotted fields to change, after those of the scale.
      baseline: the softmax model instead.

    Returns:
      The configuration.

    >>> make_config("language", "tiny", 1, {"model.variant": 2}).model.variant
    2
    """
    models = TASKS[task]
    size, changes = _SIZES[task, scale]
    config = config_files.load(f"{models.baseline if baseline else models.config}:{size}")
    own = {} if baseline else _OWN.get((task, scale), {})
    set_fields(config, {**changes, **own, "train.seed": seed})
    return set_fields(config, fields)


def variant_name(variant: int) -> str:
    """Returns the title of a variant.

    >>> variant_name(3)
    'V3'
    """
    return f"V{variant}"
