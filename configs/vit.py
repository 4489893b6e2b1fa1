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

from ttt_jax import recipes
from ttt_jax.config import Config
from ttt_jax.models import vit

_EPOCHS = {"t_imagenet": 300, "s_imagenet": 300, "b_imagenet": 60, "b_imagenet_300": 300}


def get_config(name: str = "tiny") -> Config:
    """Returns a configuration by its name: "tiny" or one of `_EPOCHS`."""
    if name == "tiny":
        return recipes.digits(vit.preset("tiny", scan_layers=False))
    if name not in _EPOCHS:
        raise ValueError(f"{name=} must be one of {('tiny', *_EPOCHS)}")
    model = vit.preset(name[0], dtype="bfloat16", scan_layers=False)  # as configs/vittt.py
    return recipes.imagenet(model, _EPOCHS[name])
