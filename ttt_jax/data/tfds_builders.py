"""Data sets that TFDS prepared as ArrayRecord files, found without TensorFlow and downloads."""

from typing import Any


def import_tfds(source: str) -> Any:
    """Imports TFDS.

    Args:
      source: what the user wrote, for the message.

    Returns:
      The module tensorflow_datasets.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"source={source!r} needs TFDS: pip install tensorflow-datasets importlib_resources "
            "pillow"
        ) from error
    return tfds


def prepared(source: str, name: str) -> Any:
    """Finds a prepared data set.

    Args:
      source: what the user wrote, for the messages.
      name: of the data set. TFDS_DATA_DIR names the folder, as everywhere in TFDS.

    Returns:
      Its builder.

    Raises:
      ValueError: TFDS does not know it, or it is not prepared as ArrayRecord; the message says in
        one line what to do.
    """
    tfds = import_tfds(source)
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


def data_source(source: str, builder: Any, split: str, **options: Any) -> Any:
    """Opens a split for random access.

    Args:
      source: what the user wrote, for the message.
      builder: of `prepared`.
      split: in TFDS's notation, for example "train[:10%]".
      **options: of `as_data_source`.

    Returns:
      A sequence of records.

    Raises:
      ValueError: the split cannot be read.
    """
    try:
        return builder.as_data_source(split=split, **options)
    except Exception as error:  # an unknown split, a slice that is none, a missing file: many kinds
        raise ValueError(
            f"source={source!r}: the split {split!r} cannot be read ({_first_line(error)}); there "
            f"are {sorted(builder.info.splits)} in {builder.data_path}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
