"""The softmax transformer, LaCT-LLM's baseline of the same size and from the same parts.

    python launch/train.py --config=configs/transformer.py:tiny --workdir=runs/tiny_softmax

Sizes: tiny, 125m, 760m, 3b; data, optimizer and length are those of configs/lact_llm.py.

| size | what to run it on | time | perplexity to expect |
|---|---|---|---|
| tiny | two CPU cores, Python 3.11.7's own text, bytes | about 1 minute | 13.19 (unigram 27.42) |
| 125m, 760m, 3b | GPUs or TPUs, your text and tokenizer | not run here | - |
"""

from ttt_jax import recipes
from ttt_jax.config import Config
from ttt_jax.models import transformer


def get_config(size: str = "tiny") -> Config:
    """Returns the configuration of one size: "tiny", "125m", "760m" or "3b"."""
    return recipes.text(transformer.preset, size)
