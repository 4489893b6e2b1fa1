"""TensorFlow Datasets without TensorFlow: what is prepared reads, what is not says so."""

import importlib
import os

import pytest

from ttt_jax.data import sources

tfds = pytest.importorskip("tensorflow_datasets")

_BUILDER = """
import tensorflow_datasets as tfds

class {name}(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict({features}))

    def _split_generators(self, dl_manager):
        return {{"train": self._generate_examples()}}

    def _generate_examples(self):
        for number in range(10):
            yield number, dict.fromkeys({features}, f"document {{number}} é")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with two data sets: one with the feature "text", one with two others."""
    folder = tmp_path_factory.mktemp("tfds")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    for name, features in (("TttTiny", '{"text": text, "more": text}'),
                           ("TttTwo", '{"a": text, "b": text}')):  # fmt: skip
        package = folder / name.lower()
        package.mkdir()
        (package / "__init__.py").write_text("")
        features = features.replace(": text", ": tfds.features.Text()")
        (package / "code.py").write_text(_BUILDER.format(name=name, features=features))
        module = importlib.import_module(f"{name.lower()}.code")
        builder = getattr(module, name)(data_dir=str(folder / "data"), file_format="array_record")
        builder.download_and_prepare()
    yield folder / "data"
    patch.undo()


def _read(source, monkeypatch, folder):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(folder))
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    return list(sources.read_documents(source))


@pytest.mark.parametrize(("split", "count"), [("", 10), ("[train]", 10), ("[train[:30%]]", 3)])
def test_prepared_text_reads(prepared, monkeypatch, split, count):
    documents = _read(f"tfds:ttt_tiny{split}", monkeypatch, prepared)
    assert len({t for _, t in documents}) == count
    assert {t for _, t in documents} <= {f"document {i} é" for i in range(10)}
    assert documents[1][0] == f"tfds:ttt_tiny{split}, record 1"


def _message(source, monkeypatch, folder):
    with pytest.raises(ValueError) as caught:
        _read(source, monkeypatch, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_read_says_so_in_one_line(prepared, monkeypatch, tmp_path):
    message = _message("tfds:ttt_tiny[test]", monkeypatch, prepared)
    assert "the split 'test' cannot be read" in message and "there are ['train']" in message
    message = _message("tfds:ttt_two", monkeypatch, prepared)
    assert "has the text features ['a', 'b'], none named \"text\"" in message
    assert "TFDS knows no data set 'ttt_none'" in _message("tfds:ttt_none", monkeypatch, prepared)
    message = _message("tfds:ag_news_subset", monkeypatch, tmp_path)
    assert f"is not prepared in {tmp_path}{os.sep}ag_news_subset" in message
    assert "download_and_prepare()" in message


def test_data_prepared_as_tfrecord_says_so(prepared, monkeypatch):
    info = prepared / "ttt_tiny" / "1.0.0" / "dataset_info.json"
    before = info.read_text()
    info.write_text(before.replace('"array_record"', '"tfrecord"'))
    try:
        message = _message("tfds:ttt_tiny", monkeypatch, prepared)
    finally:
        info.write_text(before)
    assert "is prepared as tfrecord in" in message and "file_format='array_record'" in message


def test_without_tfds(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match="needs TFDS: pip install tensorflow-datasets"):
        list(sources.read_documents("tfds:ttt_tiny"))
