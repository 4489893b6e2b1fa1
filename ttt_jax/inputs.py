"""The text of a run: its tokenizer, its two splits as batches, and the unigram baseline."""

import dataclasses
from typing import Any

import jax

from ttt_jax.data import text
from ttt_jax.data.tokenizers import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The text that a configuration names, opened by `open_inputs`.

    Attributes:
      data: a `ttt_jax.config.DataConfig`.
      tokenizer: of `load_tokenizer`.
    """

    data: Any
    tokenizer: Any

    def batches(self, split: str) -> Any:
        """Opens this process's share of a split, from its beginning.

        Args:
          split: "train" (endless, shuffled) or "eval" (every token once).

        Returns:
          A checkpointable iterator of dicts of tokens, targets, segment_ids int32 and weights
          float32, each [rows, T]; the rows of all processes together are `data.batch_size`.

        Raises:
          ValueError: the batch does not divide by the number of processes.
        """
        processes = jax.process_count()
        if self.data.batch_size % processes:
            raise ValueError(
                f"config.data.batch_size={self.data.batch_size} must be a multiple of the "
                f"{processes} processes"
            )
        return text.text_iterator(
            self.data,
            self.tokenizer,
            split=split,
            sequence_length=self.data.sequence_length,
            batch_size=self.data.batch_size // processes,
            seed=self.data.shuffle_seed,
            process_index=jax.process_index(),
            process_count=processes,
        )

    def unigram_perplexity(self) -> float:
        """Returns the held-out perplexity of token frequencies counted on the training split."""
        return text.unigram_baseline(self.data, self.tokenizer)

    def corpus_hash(self) -> str:
        """Returns a hash of the tokens; perplexities compare only where it is the same."""
        return text.corpus_hash(self.data, self.tokenizer)


def open_inputs(config: Any) -> Inputs:
    """Loads the tokenizer and checks it against the model.

    Args:
      config: a `ttt_jax.config.Config`.

    Returns:
      The run's inputs.

    Raises:
      ValueError: the tokenizer cannot be loaded, or has more ids than the model has embeddings.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"config.model.vocab_size={config.model.vocab_size} is too small for the tokenizer "
            f"{config.data.tokenizer!r}, which has {tokenizer.vocab_size} ids"
        )
    return Inputs(config.data, tokenizer)
