"""Images of TensorFlow Datasets, without TensorFlow."""

import importlib
import pickle

import numpy as np
import pytest

from ttt_jax.data import image_sources
from ttt_jax.data.image_decode import UnreadableImage

tfds = pytest.importorskip("tensorflow_datasets")

_BUILDER = """
import io
import tensorflow_datasets as tfds
from PIL import Image

class TttImages(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        label = tfds.features.ClassLabel(names=["dark", "light"])
        features = tfds.features.FeaturesDict({"image": tfds.features.Image(), "label": label})
        return self.dataset_info_from_configs(features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(6), "validation": self._generate_examples(4)}

    def _generate_examples(self, count):
        for number in range(count):
            file = io.BytesIO()
            Image.new("RGB", (4, 3), (number, 0, 200 * (number % 2))).save(file, "PNG")
            if number == 3:
                file = io.BytesIO(file.getvalue()[:30])
            file.seek(0)
            yield number, {"image": file, "label": number % 2}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with one data set of images, the fourth of each split damaged."""
    folder = tmp_path_factory.mktemp("tfds")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    package = folder / "tttimages"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text(_BUILDER)
    code = importlib.import_module("tttimages.code")
    data = folder / "data"
    code.TttImages(data_dir=str(data), file_format="array_record").download_and_prepare()
    patch.setattr(tfds.core.constants, "DATA_DIR", str(data))
    patch.setenv("TFDS_DATA_DIR", str(data))
    yield data
    patch.undo()


def test_the_splits_read_and_travel_to_workers(prepared):
    train, held_out = image_sources.open_images("tfds:ttt_images", 0.2)
    assert (len(train), len(held_out), train.classes) == (6, 4, ("dark", "light"))
    assert train.hash != held_out.hash
    for images in (held_out, pickle.loads(pickle.dumps(held_out))):
        seen, damaged = [], 0
        for index in range(4):
            try:
                image, label = images.read(index)
            except UnreadableImage as error:
                assert "tfds:ttt_images[validation], record" in str(error)
                damaged += 1
                continue
            red, _, blue = np.asarray(image)[0, 0].tolist()
            assert image.size == (4, 3) and blue == 200 * label
            seen.append(red)
        assert sorted(seen) == [0, 1, 2] and damaged == 1


def test_a_named_split_is_cut_and_an_unknown_one_is_refused(prepared):
    train, held_out = image_sources.open_images("tfds:ttt_images[train[:4]]", 0.25)
    assert (len(train), len(held_out)) == (3, 1)
    with pytest.raises(ValueError, match="the split 'new' cannot be read"):
        image_sources.open_images("tfds:ttt_images[new]", 0.25)
    with pytest.raises(ValueError, match="TFDS knows no data set 'ttt_none'"):
        image_sources.open_images("tfds:ttt_none", 0.25)
