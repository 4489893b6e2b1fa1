"""Text of TensorFlow Datasets, without TensorFlow: data prepared as ArrayRecord files."""

from collections.abc import Iterator
from typing import Any


def read(source: str) -> Iterator[tuple[str, str]]:
    """Reads the documents of a prepared data set through `tfds.data_source`.

    Args:
      source: "tfds:NAME" or "tfds:NAME[SPLIT]", for example "tfds:c4/en" (its split "train") or
        "tfds:ag_news_subset[train[:10%]]". TFDS_DATA_DIR names the folder, as everywhere in TFDS.

    Yields:
      (name, text) of each record: its feature "text", or its only text feature.

    Raises:
      ValueError: TFDS is not installed, the data set is not prepared as ArrayRecord, or it has no
        (or more than one) text feature; the message says in one line what to do.
    """
    name, _, split = source.removeprefix("tfds:").partition("[")
    split = split.removesuffix("]") if split else "train"
    tfds = _import_tfds(source)
    builder = _builder(tfds, source, name)
    feature = _text_feature(tfds, builder, source)
    try:
        records = builder.as_data_source(split=split)
    except Exception as error:  # an unknown split, a slice that is none, a missing file: many kinds
        raise ValueError(
            f"source={source!r}: the split {split!r} cannot be read ({_first_line(error)}); there "
            f"are {sorted(builder.info.splits)} in {builder.data_path}"
        ) from error
    for number in range(len(records)):
        place = f"{source}, record {number}"
        try:
            yield place, records[number][feature].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8 (byte {error.start}); mend it") from error


def _import_tfds(source: str) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"source={source!r} needs TFDS: pip install tensorflow-datasets importlib_resources "
            "pillow"
        ) from error
    return tfds


def _builder(tfds: Any, source: str, name: str) -> Any:
    """Finds the prepared data set, without a download. Raises ValueError where there is none."""
    try:
        builder = tfds.builder(name, try_gcs=False)
    except Exception as error:  # unknown names, missing code, missing config: many kinds
        raise ValueError(
            f"source={source!r}: TFDS knows no data set {name!r} ({_first_line(error)}); check the "
            "name and TFDS_DATA_DIR"
        ) from error
    if not builder.is_prepared():
        raise ValueError(
            f"source={source!r} is not prepared in {builder.data_path}: run once, with network, "
            f"tfds.builder({name!r}, file_format='array_record').download_and_prepare(), or set "
            "TFDS_DATA_DIR to the folder that holds it"
        )
    if builder.info.file_format.value != "array_record":
        raise ValueError(
            f"source={source!r} is prepared as {builder.info.file_format.value} in "
            f"{builder.data_path}, which has no random access without TensorFlow; prepare it with "
            f"tfds.builder({name!r}, file_format='array_record').download_and_prepare()"
        )
    return builder


def _text_feature(tfds: Any, builder: Any, source: str) -> str:
    features = builder.info.features
    texts = [key for key, value in features.items() if isinstance(value, tfds.features.Text)]
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise ValueError(
            f'source={source!r} has the text features {texts}, none named "text"; write the one '
            "you want to a .jsonl file"
        )
    return texts[0]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
