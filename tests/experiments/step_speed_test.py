"""step_speed on a small model: both rows, and what they count."""

import math

from ttt_jax.config import Config, TrainConfig
from ttt_jax.config_images import ImageConfig
from ttt_jax.experiments.step_speed import measure
from ttt_jax.models import vit


def test_forward_and_train_are_timed():
    model = vit.ViTConfig(
        num_classes=5, image_size=8, patch_size=4, hidden_size=16, num_layers=1, num_heads=2
    )
    config = Config(
        model=model, data=ImageConfig(batch_size=6), train=TrainConfig(ema_decay=0.9)
    )
    forward, train = measure(config, steps=2)
    assert (forward.what, train.what) == ("forward", "train")
    for row in (forward, train):
        images = row.per_second * row.milliseconds / 1e3
        assert math.isclose(images, 6, rel_tol=1e-6)
        assert row.compile_seconds > 0 and row.spread >= 0
