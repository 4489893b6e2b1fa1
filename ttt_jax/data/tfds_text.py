"""Text of TensorFlow Datasets, without TensorFlow: data prepared as ArrayRecord files."""

from collections.abc import Iterator
from typing import Any

from ttt_jax.data import tfds_builders


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
    builder = tfds_builders.prepared(source, name)
    feature = _text_feature(builder, source)
    records = tfds_builders.data_source(source, builder, split)
    for number in range(len(records)):
        place = f"{source}, record {number}"
        try:
            yield place, records[number][feature].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8 (byte {error.start}); mend it") from error


def _text_feature(builder: Any, source: str) -> str:
    tfds = tfds_builders.import_tfds(source)
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
