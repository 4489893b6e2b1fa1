"""What a training run asks of its text: batches, the ids of a split, a baseline, a hash."""

import bisect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ttt_jax.data import mixture, pipeline, shards, sources
from ttt_jax.data import rows as rows_lib
from ttt_jax.data.tokenizers import Tokenizer

_SPLITS = ("train", "eval")


def text_iterator(
    data_config: Any,
    tokenizer: Tokenizer,
    *,
    split: str,
    sequence_length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> pipeline.BatchIterator:
    """Opens a split as a stream of batches.

    "train" repeats forever, shuffled anew each epoch; batch s is a function of (text, tokenizer,
    T, rows of all processes, seed, s). Several sources ("a.txt=3;b.txt=1") share the rows by their
    weights, and what is held out of each is evaluated as one. "eval" is one pass in a fixed order:
    every token but the first of each document is a target exactly once, every process gets the
    same number of batches, and the last ones are filled up with weight 0.

    With `data_config.pack`, training rows are filled without padding: the documents of an epoch
    follow each other and are cut every T targets. Evaluation rows never cut a document of at most
    T targets, so a perplexity does not depend on how documents meet. Without `pack` a row is one
    piece of one document. Longer documents are cut; two pieces share one token.

    Args:
      data_config: a `ttt_jax.config.DataConfig`, of which source, eval_fraction, num_workers and
        pack are read; num_workers is for "train" alone.
      tokenizer: of `ttt_jax.data.tokenizers.load_tokenizer`.
      split: "train" or "eval".
      sequence_length: T.
      batch_size: rows of one process, B.
      seed: seed of the order, at least 0.
      process_index, process_count: which rows of each global batch of B · process_count this
        process reads.

    Returns:
      An iterator with get_state and set_state over dicts of numpy arrays [B, T]: tokens int32;
      targets int32, the next token of the same document; segment_ids int32, 0, 1, ... along a row
      and -1 on padding; weights float32, 1 where there is a target and 0 on padding.

    Raises:
      ValueError: an argument is out of range; the text cannot be used (see
        `ttt_jax.data.corpus.load`); or the training split has fewer than T targets.

    >>> from ttt_jax.config import DataConfig
    >>> from ttt_jax.data.tokenizers import ByteTokenizer
    >>> batches = text_iterator(DataConfig(), ByteTokenizer(), split="train", sequence_length=64,
    ...                         batch_size=2, seed=0)
    >>> next(batches)["tokens"].shape
    (2, 64)
    >>> batches.get_state()["step"]
    1
    """
    _check(split, sequence_length, batch_size, seed, process_index, process_count)
    text = _load(data_config, tokenizer)
    options = dict(sequence_length=sequence_length, pack=data_config.pack)
    if split == "train":
        rows = _train_rows(text, data_config, seed, options)
    else:
        rows = rows_lib.EvalRows(text.offsets, text.held_out, **options)
    batches = pipeline.Batches(
        text.tokens,
        rows,
        sequence_length=sequence_length,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )
    identity = {
        "corpus": text.hash,
        "split": split,
        "eval_fraction": data_config.eval_fraction,
        "sequence_length": sequence_length,
        "rows": batch_size * process_count,
        "pack": data_config.pack,
        "seed": seed,
    }
    # An evaluation is one short pass: starting workers would cost more than reading it.
    workers = data_config.num_workers if split == "train" else 0
    return pipeline.BatchIterator(batches, identity, workers)


def split_ids(data_config: Any, tokenizer: Tokenizer, split: str) -> np.ndarray:
    """Returns the targets of a split: all tokens but the first of each document, in order.

    All of them are in memory at once; `unigram_baseline` is for corpora that are larger.

    Args:
      data_config: see `text_iterator`.
      tokenizer: see `text_iterator`.
      split: "train" or "eval".

    Returns:
      int32 [number of targets].

    Raises:
      ValueError: see `text_iterator`.
    """
    _check(split, 1, 1, 0, 0, 1)
    text = _load(data_config, tokenizer)
    documents = np.concatenate(text.train) if split == "train" else text.held_out
    return np.concatenate(list(_targets(text, documents))).astype(np.int32)


def unigram_baseline(data_config: Any, tokenizer: Tokenizer) -> float:
    """Returns `unigram_perplexity` of the held-out targets, counted over the training targets.

    Reads the corpus once, block by block, so it takes no memory for a corpus in shards.

    Raises:
      ValueError: see `text_iterator`.
    """
    text = _load(data_config, tokenizer)
    train, held_out = np.zeros((2, tokenizer.vocab_size), np.int64)
    for counts, parts in ((train, text.train), (held_out, [text.held_out])):
        for documents in parts:
            for block in _targets(text, documents):
                counts += np.bincount(block, minlength=tokenizer.vocab_size)
    return _perplexity_of_counts(train, held_out)


def corpus_hash(data_config: Any, tokenizer: Tokenizer) -> str:
    """Returns the first 16 hex digits of the sha256 over the corpus's ids and bounds.

    Two perplexities are comparable only where this is equal.

    Raises:
      ValueError: see `text_iterator`.
    """
    return _load(data_config, tokenizer).hash[:16]


def shared_documents(
    data_config: Any, tokenizer: Tokenizer, most: int = 3
) -> tuple[int, list[str]]:
    """Counts the held-out documents that are in the training part, too, token for token.

    Documents of shards that were written without their hashes are passed over.

    Args:
      data_config: see `text_iterator`.
      tokenizer: see `text_iterator`.
      most: how many of them are named.

    Returns:
      (their number, the names of the first ones: file and line, or the place in the source).

    Raises:
      ValueError: see `text_iterator`.
    """
    text = _load(data_config, tokenizer)
    known = text.hashes[text.held_out]
    seen = np.isin(known, text.hashes[np.concatenate(text.train)]) & (known != 0)
    shared = np.sort(text.held_out[seen])
    names = []
    for document in shared[:most].tolist():
        number = bisect.bisect_right(text.firsts, document) - 1
        source = mixture.parse(data_config.source)[number][0]
        names.append(_document_name(source, document - text.firsts[number]))
    return len(shared), names


def _document_name(source: str, index: int) -> str:
    """The name of a document by its place in a source."""
    if not shards.is_shard_folder(source) and sources.find_files(source):
        found = itertools.islice(sources.read_documents(source), index, index + 1)
        return next(name for name, _ in found)
    return f"document {index} of {source!r}"


def unigram_perplexity(train_ids: np.ndarray, eval_ids: np.ndarray, vocab_size: int) -> float:
    """Computes the perplexity of the model that knows how often each token occurs, nothing else.

        p(t) = (count of t in train_ids + 1) / (len(train_ids) + vocab_size)
        perplexity = exp(-mean over eval_ids of log p(t))

    The added 1 (Laplace) keeps tokens that training never saw possible.

    Args:
      train_ids: int [n], ids that are counted.
      eval_ids: int [m], m >= 1, ids that are predicted.
      vocab_size: ids lie in [0, vocab_size).

    Returns:
      The perplexity, in [1, inf).

    Raises:
      ValueError: an id outside the vocabulary, or nothing to predict.

    >>> round(unigram_perplexity(np.array([0, 0]), np.array([0, 1]), 2), 4)
    2.3094
    """
    for name, ids in (("train_ids", train_ids), ("eval_ids", eval_ids)):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"{name} holds ids outside [0, vocab_size={vocab_size})")
    if not eval_ids.size:
        raise ValueError("eval_ids is empty, so there is nothing to predict; raise eval_fraction")
    return _perplexity_of_counts(
        np.bincount(train_ids, minlength=vocab_size), np.bincount(eval_ids, minlength=vocab_size)
    )


def _perplexity_of_counts(train: np.ndarray, held_out: np.ndarray) -> float:
    """`unigram_perplexity` from the number of times each id occurs, int [V] each."""
    log_p = np.log(train + 1.0) - math.log(train.sum() + len(train))
    return math.exp(-float(held_out @ log_p) / int(held_out.sum()))


def _targets(text: mixture.Text, documents: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the targets of documents (rising indices) in blocks of neighbours."""
    offsets = text.offsets
    breaks = np.flatnonzero(np.diff(documents) != 1) + 1
    for run in np.split(documents, breaks):
        for start in range(0, len(run), 1024):
            first, last = run[start], run[min(start + 1024, len(run)) - 1]
            block = text.tokens[offsets[first] : offsets[last + 1]]
            keep = np.ones(len(block), bool)
            keep[offsets[first : last + 1] - offsets[first]] = False
            yield block[keep]


def _load(data_config: Any, tokenizer: Tokenizer) -> mixture.Text:
    return mixture.load(data_config.source, tokenizer, data_config.eval_fraction)


def _train_rows(text: mixture.Text, data_config: Any, seed: int, options: dict[str, Any]) -> Any:
    """The rows of one source, or of several by their weights."""
    names = [name for name, _ in mixture.parse(data_config.source)]
    for name, documents in zip(names, text.train, strict=True):
        _check_length(text.offsets, documents, options["sequence_length"], name)
    rows = [
        rows_lib.TrainRows(text.offsets, documents, seed=seed, **options)
        for documents in text.train
    ]
    return rows[0] if len(rows) == 1 else mixture.MixedRows(rows, text.weights, seed)


def _check(
    split: str, sequence_length: int, batch_size: int, seed: int, index: int, count: int
) -> None:
    """Raises ValueError naming the first argument that is out of range."""
    if split not in _SPLITS:
        raise ValueError(f'split={split!r} must be "train" or "eval"')
    least = {"sequence_length": (sequence_length, 1), "batch_size": (batch_size, 1),
             "seed": (seed, 0), "process_count": (count, 1)}  # fmt: skip
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}")
    if not 0 <= index < count:
        raise ValueError(f"process_index={index} must be in [0, process_count={count})")


def _check_length(
    offsets: np.ndarray, documents: np.ndarray, sequence_length: int, source: str
) -> None:
    """Raises ValueError where not even one row could be filled."""
    targets = int((offsets[documents + 1] - offsets[documents] - 1).sum())
    if targets < sequence_length:
        raise ValueError(
            f"sequence_length={sequence_length} is longer than the whole training text of "
            f"{source!r}, which has {targets} tokens to predict; shorten it or give "
            "more text"
        )
