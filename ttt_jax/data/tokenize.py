"""Turns a source of text into a folder of shards, complete or not there at all."""

import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import tqdm

from ttt_jax.data import corpus, shards, sources
from ttt_jax.data.tokenizers import Tokenizer


def write_shards(
    source: str,
    tokenizer: Tokenizer,
    output: str | os.PathLike[str],
    *,
    shard_tokens: int = 100_000_000,
    skip_empty: bool = False,
) -> dict[str, Any]:
    """Encodes every document of a source into ArrayRecord shards.

    The source is read twice: the first time to check every document, so that a fault in the last
    file shows before the work and not after it. The shards are written to a folder beside
    `output` that takes its name once all is there; a run that fails or is killed leaves no
    `output`.

    Args:
      source: see `ttt_jax.data.sources.find_files`.
      tokenizer: what turns text into ids.
      output: the folder to make; it must not exist, or be empty.
      shard_tokens: tokens of one file, at least 1.
      skip_empty: leave out documents without text and count them; else they are an error.

    Returns:
      The metadata, with "skipped", the number of documents left out; also in metadata.json.

    Raises:
      ValueError: `output` holds files or cannot be made, a file of the source cannot be used, or
        the vocabulary is too small for the text.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be at least 1")
    target = pathlib.Path(output).expanduser().absolute()
    _check_output(output, target)
    draft = target.with_name(f".{target.name}.incomplete-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"output={str(output)!r} cannot be made ({error.strerror}); give another folder"
        ) from error
    writer = shards.ShardWriter(draft, tokenizer, shard_tokens)
    unknown = corpus.UnknownCounter(tokenizer)
    try:
        total, skipped = _check_documents(source, skip_empty)
        for name, text in _progress(_with_text(source, skip_empty), "encoding", total):
            ids = corpus.encode(tokenizer, name, text)
            unknown.add(name, ids)
            writer.add(ids)
        unknown.report()
        metadata = writer.close(source, skipped)
        draft.rename(target)
    except BaseException:  # Ctrl-C too
        writer.abort()
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return metadata


def leftovers(output: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Lists the unfinished folders that killed runs left beside `output`; they may be deleted."""
    target = pathlib.Path(output).expanduser().absolute()
    return sorted(target.parent.glob(f".{target.name}.incomplete-*"))


def _check_output(output: str | os.PathLike[str], target: pathlib.Path) -> None:
    """Raises ValueError if `output` has no name, is a file or holds anything."""
    if not str(output).strip():
        raise ValueError("output='' has no name (an unset shell variable?); give --output")
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        kind = "is a folder that is not empty" if target.is_dir() else "is a file"
        raise ValueError(
            f"output={str(target)!r} {kind}; give a new folder (nothing is overwritten)"
        )


def _check_documents(source: str, skip_empty: bool) -> tuple[int, int]:
    """Reads all documents; returns how many have text and how many have none."""
    total = skipped = 0
    for name, text in _progress(sources.read_documents(source), "checking", None):
        if not sources.is_empty(text):
            total += 1
        elif skip_empty:
            skipped += 1
        else:
            raise ValueError(
                f"{name} is an empty document; remove it, or count and leave out such documents "
                "with --skip_empty"
            )
    if total == 0:
        raise ValueError(f"source={source!r} has no document with text; give another source")
    return total, skipped


def _with_text(source: str, skip_empty: bool) -> Iterator[sources.Document]:
    for name, text in sources.read_documents(source):
        if not (skip_empty and sources.is_empty(text)):
            yield name, text


def _progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    return tqdm.tqdm(items, desc=what, total=total, unit=" documents", mininterval=1.0)
