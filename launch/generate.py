"""Continues text with a trained model; see `ttt_jax.generate`.

    python launch/generate.py --workdir=runs/tiny --prompt="The " --max_new_tokens=200

Several --prompt flags go through the model as one batch.
"""

from absl import flags

from ttt_jax import programs
from ttt_jax.checkpoint import load_model
from ttt_jax.data.tokenizers import load_tokenizer
from ttt_jax.generate import Sampling, check_text_run, generate_text

_WORKDIR = flags.DEFINE_string("workdir", None, "folder of the training run", required=True)
_STEP = flags.DEFINE_integer("step", None, "step of the checkpoint; the newest by default")
_PROMPT = flags.DEFINE_multi_string("prompt", [""], "text to continue; may be given repeatedly")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "most tokens to add to a prompt")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "divides the logits; 0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw among the k most likely tokens; 0 for all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw among the fewest tokens of probability p")
_SEED = flags.DEFINE_integer("seed", 0, "seed of the random numbers")


def main() -> None:
    """Prints each prompt with its continuation, then the throughput."""
    sampling = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
    check_text_run(_WORKDIR.value)
    config, model, step = load_model(_WORKDIR.value, _STEP.value)
    texts, result = generate_text(
        model,
        load_tokenizer(config.data.tokenizer),
        _PROMPT.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        sampling=sampling,
        seed=_SEED.value,
    )
    for prompt, text in zip(_PROMPT.value, texts, strict=True):
        print(f"{prompt}{text}\n")
    print(f"step {step}; {result.summary()}")


if __name__ == "__main__":
    programs.run(main)
