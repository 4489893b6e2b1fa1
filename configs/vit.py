"""The softmax vision transformer, ViTTT's baseline of the same size and from the same parts.

    python launch/train.py --config=configs/vit.py:tiny --workdir=runs/vit

Data, optimizer and length are those of configs/vittt.py.

| name | model, data, length | what to run it on | time | top-1 |
|---|---|---|---|---|
| tiny | 0.15M, scikit-learn's digits, 600 steps | two CPU cores | not timed | not measured |
| t_imagenet, s_imagenet | 5.7M, 22.0M, ImageNet-1K, 300 epochs | GPUs or TPUs | not run here | - |
| b_imagenet, b_imagenet_300 | 86.5M, ImageNet-1K | GPUs or TPUs | not run here | - |

Always answering the most frequent class is right for 11.70 % of the held-out digits.
"""

from ttt_jax.config import Config, OptimizerConfig, TrainConfig
from ttt_jax.config_images import ImageConfig, deit
from ttt_jax.models import vit

_STEPS_PER_EPOCH = 1251  # of 1,024 images of ImageNet-1K
_EPOCHS = {"t_imagenet": 300, "s_imagenet": 300, "b_imagenet": 60, "b_imagenet_300": 300}


def get_config(name: str = "tiny") -> Config:
    """Returns a configuration by its name: "tiny" or one of `_EPOCHS`."""
    if name == "tiny":
        return Config(
            model=vit.preset("tiny", scan_layers=False),
            data=ImageConfig(batch_size=64, crop_min_area=0.6, label_smoothing=0.1),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, weight_decay=0.05),
            train=TrainConfig(steps=600, log_every=40, save_every=300),
        )
    if name not in _EPOCHS:
        raise ValueError(f"{name=} must be one of {('tiny', *_EPOCHS)}")
    return Config(
        model=vit.preset(name[0], dtype="bfloat16"),
        data=deit(),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            end_fraction=0.01,
            warmup_steps=_STEPS_PER_EPOCH * _EPOCHS[name] // 15,
            b2=0.999,
            weight_decay=0.05,
            clip_norm=5.0,
        ),
        train=TrainConfig(
            steps=_STEPS_PER_EPOCH * _EPOCHS[name],
            ema_decay=0.9999,
            log_every=50,
            eval_every=_STEPS_PER_EPOCH * 5,
            save_every=_STEPS_PER_EPOCH,
        ),
    )
