"""The softmax transformer, LaCT-LLM's baseline of the same size and from the same parts.

    python launch/train.py --config=configs/transformer.py:tiny --workdir=runs/tiny_softmax

Sizes: tiny, 125m, 760m, 3b; data, optimizer and length are those of configs/lact_llm.py.

| size | what to run it on | time | perplexity to expect |
|---|---|---|---|
| tiny | two CPU cores, Python 3.11.7's own text, bytes | about 1 minute | 13.19 (unigram 27.42) |
| 125m, 760m, 3b | GPUs or TPUs, your text and tokenizer | not run here | - |
"""

from ttt_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from ttt_jax.models import transformer


def get_config(size: str = "tiny") -> Config:
    """Returns the configuration of one size: "tiny", "125m", "760m" or "3b"."""
    if size == "tiny":
        return Config(
            model=transformer.preset("tiny"),
            data=DataConfig(sequence_length=512, batch_size=2, eval_fraction=0.03),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
            train=TrainConfig(steps=240, log_every=20, save_every=80),
        )
    return Config(
        model=transformer.preset(size, dtype="bfloat16", remat="full"),
        data=DataConfig(sequence_length=32768, batch_size=32, num_workers=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1024),
        train=TrainConfig(steps=20000, eval_every=1000, eval_batches=16, loss_chunk=2048),
    )
