"""LaCT-LLM on text.

    python launch/train.py --config=configs/lact_llm.py:tiny --workdir=runs/tiny

Sizes: tiny, 125m, 760m, 3b. Variants 0 (LaCT as published) to 6 (linear attention) by
--config.model.variant=2; every other field by --config.part.field=value.

| size | what to run it on | time | perplexity to expect |
|---|---|---|---|
| tiny | two CPU cores, Python 3.11.7's own text, bytes | about 2 minutes | 13.61 (unigram 27.42) |
| 125m, 760m, 3b | GPUs or TPUs, your text and tokenizer | not run here | 16.43 (paper, 760m) |

Longer, tiny ends at 10.42 (unigram 27.01) with --config.train.steps=300 --config.data.batch_size=4
--config.data.eval_fraction=0.05. Other Pythons have other text.

The large sizes want --config.data.source=... and --config.data.tokenizer=... (32,000 ids at most);
20,000 steps of 32,768-token rows are the paper's length for 760m.
"""

from ttt_jax import recipes
from ttt_jax.config import Config
from ttt_jax.models import lact_llm


def get_config(size: str = "tiny") -> Config:
    """Returns the configuration of one size: "tiny", "125m", "760m" or "3b"."""
    return recipes.text(lact_llm.preset, size)
