"""LaCT-NVS on posed views.

    python launch/train.py --config=configs/lact_nvs.py:tiny --workdir=runs/nvs

Sizes: tiny, 114m (the paper's on RealEstate10K), 14 and 24 (layers; the official code's). Variants
0 (LaCT as published) to 6 (linear attention) by --config.model.variant=2.

| size | what to run it on | time | held-out PSNR to expect |
|---|---|---|---|
| tiny | two CPU cores, scenes rendered here | 3 minutes | 19.4 dB, SSIM 0.39 |
| 114m | GPUs or TPUs, RealEstate10K | not run here | 25.94 dB (paper) |
| 14, 24 | GPUs or TPUs, your views | not run here | - |

Beside tiny's 19.4 dB, over 32 scenes: the inputs' mean colour 14.4, the nearest input view 16.0.
The rendered scenes depend on NumPy's generator.

114m: the paper gives its length, data and number of parameters; shape, batch and rate are ours.
14 and 24: batch, rates and length are the official code's, whose perceptual loss is left out.
14 on made-up views, 2 scenes of 8 + 8 a step, --config.model.remat=none and scan_layers=False:
118 ms a step and 38.5 ms forward on one H200 (the official PyTorch code: 261 and 79).
--config.data.source=... names your scenes: a folder, or a JSON list of camera files.
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
            train=TrainConfig(steps=300, log_every=20, save_every=100),
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
