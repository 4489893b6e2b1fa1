"""ViTTT on images.

    python launch/train.py --config=configs/vittt.py:tiny --workdir=runs/vittt

Variants 0 (as published) to 6 (linear attention) by --config.model.variant=1; the softmax baseline
is configs/vit.py; every other field by --config.part.field=value.

| name | model, data, length | what to run it on | time | top-1 |
|---|---|---|---|---|
| tiny | 0.17M, scikit-learn's digits, 600 steps | two CPU cores | 3 minutes | 98.6 % |
| t_imagenet | 6.1M, ImageNet-1K, 300 epochs | GPUs or TPUs | not run here | 76.5 % (official) |
| s_imagenet | 23.8M, ImageNet-1K, 300 epochs | GPUs or TPUs | not run here | 81.6 % (official) |
| b_imagenet | 90.1M, ImageNet-1K, 60 epochs | GPUs or TPUs | not run here | 79.34 % (paper) |
| b_imagenet_300 | 90.1M, ImageNet-1K, 300 epochs | GPUs, TPUs | not run here | 82.6 % (official) |
| h_t_imagenet | H-ViTTT, 28.7M, 300 epochs | GPUs or TPUs | not run here | 84.0 % (with MESA) |

Always answering the most frequent class is right for 11.70 % of the held-out digits. B trains 3,984
made-up images/s on one H200, 256 a step, without an average of the parameters.

ImageNet is --config.data.source="tfds:imagenet2012", prepared once as ArrayRecord (TFDS_DATA_DIR
names its folder), or a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG.

The recipe of 300 epochs is that of the official code: 1,024 images a step, AdamW at 1e-3 (5e-4 for
512), 20 epochs of warm-up, cosine to 1e-5, decay 0.05, gradients clipped at 5, RandAugment 9, mixup
0.8, cutmix 1.0, erasing 0.25, label smoothing 0.1, stochastic depth 0 (T), 0.1 (S), 0.4 (B). Of its
60 epochs the paper states no more than the number; here they are the same recipe with 4 epochs of
warm-up. An average of the parameters (decay 0.9996 for 4,096 images, so 0.9999) is evaluated, as
the official code does for the hierarchical models; --config.train.ema_decay=0 evaluates the last
ones, as it does for the others. MESA, the self-distillation that its published H-ViTTT was trained
with, is not here.
"""

from ttt_jax import recipes
from ttt_jax.config import Config
from ttt_jax.models import h_vittt, vittt

_EPOCHS = {
    "t_imagenet": 300,
    "s_imagenet": 300,
    "b_imagenet": 60,
    "b_imagenet_300": 300,
    "h_t_imagenet": 300,
}


def get_config(name: str = "tiny") -> Config:
    """Returns a configuration by a name of the table above."""
    if name == "tiny":
        return recipes.digits(vittt.preset("tiny", scan_layers=False))
    if name not in _EPOCHS:
        raise ValueError(f"{name=} must be one of {('tiny', *_EPOCHS)}")
    module, size = (h_vittt, "t") if name == "h_t_imagenet" else (vittt, name[0])
    # In a scan an H200 copies what the backward pass needs: 103 against 87 ms a step of 256 images
    # (B, as it was then); the list compiles in 33 s.
    model = module.preset(size, dtype="bfloat16", scan_layers=module is h_vittt)
    return recipes.imagenet(model, _EPOCHS[name])
