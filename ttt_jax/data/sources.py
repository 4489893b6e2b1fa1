"""Documents of text from local files, from what is installed, and from TensorFlow Datasets."""

import glob
import json
import pathlib
from collections.abc import Iterator

from ttt_jax.data import builtin

Document = tuple[str, str]
METADATA = "metadata.json"
_SUFFIXES = (".txt", ".jsonl", ".parquet")


def find_files(source: str) -> list[pathlib.Path]:
    """Lists the files that `source` names, in the order of their names.

    Args:
      source: a path or a glob ("**" crosses folders) of .txt, .jsonl or .parquet files; or
        "builtin", "wiki", "tfds:NAME", which name no files.

    Returns:
      The paths; empty for sources without files.

    Raises:
      ValueError: no name, no such file, a folder, or a file of another kind.
    """
    if not source.strip():
        raise ValueError(
            "source='' has no name (an unset shell variable?); give the path or glob of text files"
        )
    if source in ("builtin", "wiki") or source.startswith("tfds:"):
        return []
    found = sorted(pathlib.Path(p) for p in glob.glob(str(_expand(source)), recursive=True))
    if not found and _expand(source).exists():  # a name with brackets is no pattern
        found = [_expand(source)]
    if not found:
        share = " (with one source there are no shares, SOURCE=3)" if "=" in source else ""
        raise ValueError(
            f"source={source!r}: no such file{share}; give the path or glob of .txt, .jsonl or "
            '.parquet files, a folder written by launch/tokenize_text.py, "builtin", "wiki" or '
            '"tfds:NAME"'
        )
    for path in found:
        if (path / METADATA).is_file():
            raise ValueError(
                f"source={source!r}: {path} holds shards of tokens already, and no text; train "
                f"from them with --config.data.source={path}, or give the text files themselves"
            )
        if path.is_dir():
            raise ValueError(
                f"source={source!r}: {path} is a folder without {METADATA}; for the text files "
                f"inside give a glob such as {str(path / '*.txt')!r}"
            )
        if path.suffix not in _SUFFIXES:
            raise ValueError(
                f"source={source!r}: {path} is not a .txt, .jsonl or .parquet file; rename it or "
                "narrow the glob"
            )
    return found


def read_documents(source: str) -> Iterator[Document]:
    """Reads the documents of a source one by one.

    A .txt file is one document, a line of a .jsonl file or a row of a .parquet file is one, its
    text in the field "text".

    Args:
      source: see `find_files`.

    Yields:
      (name, text): where the document comes from, for messages; and its text.

    Raises:
      ValueError: a file is unreadable, not UTF-8, or not what its ending says; names the file
        (and line or row) and the way out.

    >>> name, text = next(read_documents("builtin"))
    >>> name.split("/")[0], is_empty(text)
    ('stdlib', False)
    """
    if source == "builtin":
        yield from builtin.python_documents()
    elif source == "wiki":
        yield from builtin.wiki_documents()
    elif source.startswith("tfds:"):
        from ttt_jax.data import tfds_text  # needs a package that no other source does

        yield from tfds_text.read(source)
    else:
        yield from _read_files(find_files(source))


def is_empty(text: str) -> bool:
    r"""Says whether a document has nothing but white space.

    >>> is_empty(" \n")
    True
    """
    return not text.strip()


def _expand(source: str) -> pathlib.Path:
    return pathlib.Path(source).expanduser()


def _read_files(paths: list[pathlib.Path]) -> Iterator[Document]:
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for path in paths:
        try:
            yield from readers[path.suffix](path)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror or error}); mend its permissions or leave "
                "it out of the glob"
            ) from error


def _decode(content: bytes, name: str) -> str:
    """Decodes UTF-8, with or without a byte-order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x}); convert "
            "it, for example with iconv -f latin1 -t utf-8"
        ) from error


def _read_txt(path: pathlib.Path) -> Iterator[Document]:
    yield str(path), _decode(path.read_bytes(), str(path))


def _read_jsonl(path: pathlib.Path) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            name = f"{path}:{number}"
            if not line.strip():  # the end of the file, or a gap between two lines
                continue
            try:
                record = json.loads(_decode(line, name))
            except json.JSONDecodeError as error:
                raise ValueError(f"{name} is not JSON ({error.msg}); mend the line") from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f'{name} has no string in the field "text"; rename the field')
            yield name, _check_surrogates(record["text"], name)


def _check_surrogates(text: str, name: str) -> str:
    r"""Refuses half of a surrogate pair, which JSON can write (\ud800) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds half of a surrogate pair (character {error.start}), which is no text; "
            "mend the escape"
        ) from error
    return text


def _read_parquet(path: pathlib.Path) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise ValueError(
                f'{path} has no column "text", only {file.schema_arrow.names}; rename the column'
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=["text"]):
            for text in batch.column(0).to_pylist():
                name = f"{path}, row {row}"
                if not isinstance(text, str):
                    raise ValueError(
                        f'{name} has a {type(text).__name__} in the column "text", which must hold '
                        "strings alone; remove the row, or rename the column"
                    )
                yield name, text
                row += 1
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        message = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is not a whole parquet file of UTF-8 text ({message}); write it again, or "
            "leave it out of the glob"
        ) from error


def file_stamps(source: str) -> tuple[tuple[str, int, int], ...]:
    """Returns (path, bytes, time of change in ns) of each file of a source.

    Raises:
      ValueError: see `find_files`.
    """
    stats = [(path, path.stat()) for path in find_files(source)]
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
