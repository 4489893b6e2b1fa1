"""Encodes text into ArrayRecord shards that training reads without loading them.

    python launch/tokenize_text.py --source='books/*.txt' --tokenizer=a.model --output=shards
    python launch/train.py ... --config.data.source=shards --config.data.tokenizer=a.model

The folder appears under its name once it is complete. metadata.json in it holds the tokenizer's
hash: training with another tokenizer is an error.
"""

from absl import flags

from ttt_jax import programs
from ttt_jax.data.tokenize import leftovers, write_shards
from ttt_jax.data.tokenizers import load_tokenizer

_SOURCE = flags.DEFINE_string(
    "source",
    None,
    'path or glob of .txt, .jsonl or .parquet files, "builtin", "wiki" or "tfds:NAME"',
    required=True,
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "bytes", '"bytes", a SentencePiece .model or a Hugging Face tokenizer .json'
)
_OUTPUT = flags.DEFINE_string("output", None, "folder to make", required=True)
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 100_000_000, "tokens of one file")
_SKIP_EMPTY = flags.DEFINE_bool(
    "skip_empty", False, "count and leave out documents without text instead of stopping"
)


def main() -> None:
    """Writes the shards and says what is in them."""
    for path in leftovers(_OUTPUT.value):
        print(f"{path} was left behind by a run that was killed, or belongs to one that is "
              "at work; delete it in the first case")  # fmt: skip
    metadata = write_shards(
        _SOURCE.value,
        load_tokenizer(_TOKENIZER.value),
        _OUTPUT.value,
        shard_tokens=_SHARD_TOKENS.value,
        skip_empty=_SKIP_EMPTY.value,
    )
    skipped = f", {metadata['skipped']:,} empty documents left out" if metadata["skipped"] else ""
    print(
        f"{_OUTPUT.value}: {metadata['documents']:,} documents, {metadata['tokens']:,} tokens in "
        f"{len(metadata['shards'])} shards{skipped}; corpus {metadata['hash'][:16]}"
    )


if __name__ == "__main__":
    programs.run(main)
