"""LaCT-LLM on text.

    python launch/train.py --config=configs/lact_llm.py:tiny --workdir=runs/tiny

Sizes: tiny, 125m, 760m, 3b. Variants 0 (LaCT as published) to 6 (linear attention) by
--config.model.variant=2; every other field by --config.part.field=value.

| size | what to run it on | time | perplexity to expect |
|---|---|---|---|
| tiny | two CPU cores, Python 3.11.7's own text, bytes | about 2 minutes | 13.40 (unigram 27.42) |
| 125m, 760m, 3b | GPUs or TPUs, your text and tokenizer | not run here | 16.43 (paper, 760m) |

Longer, tiny ends at 10.42 (unigram 27.01) with --config.train.steps=300 --config.data.batch_size=4
--config.data.eval_fraction=0.05. Other Pythons have other text.

The large sizes want --config.data.source=... and --config.data.tokenizer=... (32,000 ids at most);
20,000 steps of 32,768-token rows are the paper's length for 760m.
"""

from ttt_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from ttt_jax.models import lact_llm


def get_config(size: str = "tiny") -> Config:
    """Returns the configuration of one size: "tiny", "125m", "760m" or "3b"."""
    if size == "tiny":
        return Config(
            model=lact_llm.preset("tiny"),
            data=DataConfig(sequence_length=512, batch_size=2, eval_fraction=0.03),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
            train=TrainConfig(steps=240, log_every=20, save_every=80),
        )
    return Config(
        model=lact_llm.preset(size, dtype="bfloat16", remat="full"),
        data=DataConfig(sequence_length=32768, batch_size=32, num_workers=4),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1024),
        train=TrainConfig(steps=20000, eval_every=1000, eval_batches=16, loss_chunk=2048),
    )
