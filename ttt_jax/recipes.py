"""Data, optimizer and length of training that several models share; used by configs/."""

from collections.abc import Callable
from typing import Any

from ttt_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from ttt_jax.config_images import ImageConfig, deit

IMAGENET_STEPS = 1251
"""Steps of one epoch of ImageNet-1K with 1,024 images each."""


def text(preset: Callable[..., Any], size: str) -> Config:
    """A language model on text: LaCT-LLM and its baseline.

    Args:
      preset: makes the model's configuration from its size and fields, as `lact_llm.preset`.
      size: "tiny": the built-in text, rows of 512 bytes, minutes on two CPU cores. Else rows of
        32,768 tokens, 32 a step, 20,000 steps: the paper's length for 760m.

    Returns:
      The configuration.

    Raises:
      ValueError: the model has no such size.

    >>> from ttt_jax.models import transformer
    >>> text(transformer.preset, "tiny").data.sequence_length
    512
    """
    if size == "tiny":
        return Config(
            model=preset("tiny"),
            data=DataConfig(sequence_length=512, batch_size=2, eval_fraction=0.03),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
            train=TrainConfig(steps=240, log_every=20, save_every=80),
        )
    return Config(
        model=preset(size, dtype="bfloat16", remat="full"),
        data=DataConfig(sequence_length=32768, batch_size=32, num_workers=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1024),
        train=TrainConfig(steps=20000, eval_every=1000, eval_batches=16, loss_chunk=2048),
    )


def digits(model: Any) -> Config:
    """A small classifier on the handwritten digits that scikit-learn brings: minutes on a CPU.

    Args:
      model: its configuration.

    >>> from ttt_jax.models import vit
    >>> digits(vit.preset("tiny")).train.steps
    600
    """
    return Config(
        model=model,
        data=ImageConfig(batch_size=64, crop_min_area=0.6, label_smoothing=0.1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, weight_decay=0.05),
        train=TrainConfig(steps=600, log_every=40, save_every=300),
    )


def imagenet(model: Any, epochs: int) -> Config:
    """A classifier on ImageNet-1K by the recipe of DeiT, as ViTTT's official code has it.

    1,024 images a step, AdamW at 1e-3 with a cosine to 1e-5, a fifteenth of the epochs of warm-up
    (20 of 300), decay 0.05, gradients clipped at 5, an average of the parameters.

    Args:
      model: its configuration.
      epochs: passes over the 1,281,167 images.

    Source: github.com/LeapLabTHU/ViTTT; augmentation in `config_images.deit`.

    >>> from ttt_jax.models import vit
    >>> imagenet(vit.preset("b"), epochs=60).optimizer.warmup_steps
    5004
    """
    return Config(
        model=model,
        data=deit(),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            end_fraction=0.01,
            warmup_steps=IMAGENET_STEPS * epochs // 15,
            b2=0.999,
            weight_decay=0.05,
            clip_norm=5.0,
        ),
        train=TrainConfig(
            steps=IMAGENET_STEPS * epochs,
            ema_decay=0.9999,
            log_every=50,
            eval_every=IMAGENET_STEPS * 5,
            save_every=IMAGENET_STEPS,
        ),
    )
