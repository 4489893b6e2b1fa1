"""LaCT-NVS on posed views.

    python launch/train.py --config=configs/lact_nvs.py:tiny --workdir=runs/nvs
"""

from ttt_jax.config import Config, OptimizerConfig, TrainConfig
from ttt_jax.config_views import ViewsConfig
from ttt_jax.models import lact_nvs

_VIEWS = dict(height=256, width=256, input_views=8, target_views=8, num_workers=8)


def get_config(size: str = "tiny") -> Config:
    """Returns the configuration of one size: "tiny", "114m", "14" or "24"."""
    if size == "tiny":
        return Config(
            model=lact_nvs.preset("tiny"),
            data=ViewsConfig(),
            optimizer=OptimizerConfig(
                name="muon", learning_rate=2e-3, warmup_steps=20, weight_decay=0.05
            ),
            train=TrainConfig(steps=400, log_every=20, save_every=200),
        )
    if size == "114m":
        data = ViewsConfig(
            source="realestate10k/train",
            frames="realestate10k/frames",
            sampling="nearest",
            centre_cameras=True,
            batch_size=32,
            **_VIEWS,
        )
        train = TrainConfig(steps=20000, eval_every=1000, eval_batches=16, save_every=1000)
        optimizer = OptimizerConfig(learning_rate=4e-4, warmup_steps=1000, weight_decay=0.05)
    else:
        data = ViewsConfig(source="objaverse/scenes.json", batch_size=64, **_VIEWS)
        train = TrainConfig(steps=80000, eval_every=5000, eval_batches=16, save_every=1000)
        optimizer = OptimizerConfig(learning_rate=1e-4, warmup_steps=4000, weight_decay=0.05)
    optimizer.end_fraction = 0.0
    model = lact_nvs.preset(size, dtype="bfloat16", newton_schulz_dtype="bfloat16", remat="full")
    return Config(model=model, data=data, optimizer=optimizer, train=train)
