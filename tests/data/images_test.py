"""Batches of images: deterministic, restorable, whole; bad input loses only itself."""

import gzip
import io
import pathlib
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ttt_jax.config_images import ImageConfig
from ttt_jax.data import augment, idx, image_sources, images, rand_augment
from ttt_jax.data.image_decode import UnreadableImage, decode
from ttt_jax.data.pipeline import DataPositionError

_RECIPE = dict(
    crop_min_area=0.3, flip=0.5, randaugment_layers=2, erase=0.5, mixup_alpha=0.8, cutmix_alpha=1.0
)


def _set(count=10, size=8, classes=5):
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3)).astype(np.uint8)
    labels = np.arange(count) % classes
    return image_sources.ArraySet(pixels, labels, tuple("abcde"[:classes]))


def _iterator(source, *, train, batch_size=4, process=(0, 1), **recipe):
    config = ImageConfig(**recipe)
    index, count = process
    return images.image_iterator(
        source, config, train=train, image_size=6, batch_size=batch_size,
        process_index=index, process_count=count,
    )  # fmt: skip


def _equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_a_batch_is_a_function_of_seed_and_step():
    """From any saved position, with two processes as with one; another seed is another stream."""
    whole = _iterator(_set(), train=True, **_RECIPE)
    batches = [next(whole) for _ in range(6)]  # of 4 rows: the third crosses an epoch's edge
    assert batches[0]["images"].shape == (4, 6, 6, 3)
    state = _iterator(_set(), train=True, **_RECIPE).get_state()
    for step in (5, 2):
        resumed = _iterator(_set(), train=True, **_RECIPE)
        resumed.set_state(state | {"step": step})
        assert _equal(next(resumed), batches[step])
        assert resumed.get_state()["step"] == step + 1
    half = dict(train=True, batch_size=2, **_RECIPE)
    halves = [_iterator(_set(), process=(p, 2), **half) for p in (0, 1)]
    for batch in batches[:3]:
        parts = [next(half) for half in halves]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        assert _equal(joined, batch)
    other = _iterator(_set(), train=True, shuffle_seed=1, **_RECIPE)
    assert not _equal(next(other), batches[0])
    for change in (dict(flip=0.1), dict(shuffle_seed=1)):
        with pytest.raises(DataPositionError, match=next(iter(change))):
            _iterator(_set(), train=True, **_RECIPE | change).set_state(state)
    with pytest.raises(DataPositionError, match="images"):
        _iterator(_set(9), train=True, **_RECIPE).set_state(state)


def test_an_epoch_has_every_image_once():
    plain = _iterator(_set(), train=True, batch_size=5)
    seen = [next(plain) for _ in range(4)]
    source, pixels = _set(), []
    for batch in seen:
        assert np.all(batch["weights"] == 1) and np.all(batch["share"] == 1)
        pixels += [image.tobytes() for image in batch["images"]]
    expected = sorted(
        augment.eval_image(source.read(index)[0], 6, 1.0).tobytes() for index in range(10)
    )
    assert sorted(pixels[:10]) == sorted(pixels[10:]) == expected
    assert pixels[:10] != pixels[10:]


def test_worker_processes_give_the_same_batches():
    train, _ = image_sources.open_images("builtin", 0.2)
    alone = _iterator(train, train=True, **_RECIPE)
    workers = _iterator(train, train=True, num_workers=2, **_RECIPE)
    for _ in range(3):
        assert _equal(next(workers), next(alone))
    workers.close()


@pytest.mark.parametrize("count, batch_size, processes", [(10, 4, 1), (10, 4, 2), (8, 4, 1)])
def test_evaluation_has_every_image_exactly_once(count, batch_size, processes):
    found = []
    for process in range(processes):
        batches = list(
            _iterator(_set(count), train=False, batch_size=batch_size, process=(process, processes))
        )
        assert len(batches) == -(-count // (batch_size * processes))
        for batch in batches:
            assert batch["images"].shape == (batch_size, 6, 6, 3)
            assert np.all((batch["weights"] > 0) == (batch["labels"] >= 0))
            found += batch["labels"][batch["weights"] > 0].tolist()
    assert sorted(found) == sorted(np.arange(count) % 5)


# ------------------------------------------------------------------------- variation


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 70), height=st.integers(1, 70), area=st.floats(0.01, 1.0),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_random_boxes_lie_in_the_image(width, height, area, seed):
    left, upper, right, lower = augment.random_box(width, height, area, np.random.default_rng(seed))
    assert 0 <= left < right <= width and 0 <= upper < lower <= height


def test_every_operation_changes_an_image_within_its_size():
    """At full strength, and rotations and shears by nothing change nothing."""
    pixels = np.random.default_rng(0).integers(20, 200, (40, 32, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    for number, operation in enumerate(rand_augment.OPERATIONS):
        out = operation(image, 1.0, np.random.default_rng(0))
        assert out.size == image.size and out.mode == "RGB"
        assert np.any(np.asarray(out) != pixels), number
    for number in (3, 6, *range(7, 15)):
        out = rand_augment.OPERATIONS[number](image, 0.0, np.random.default_rng(0))
        assert np.array_equal(np.asarray(out), pixels), number


def _pairs(weights):
    batch = {
        "images": np.zeros((5, 20, 20, 3), np.uint8),
        "labels": np.arange(5, dtype=np.int32),
        "share": np.ones(5, np.float32),
        "weights": np.array(weights, np.float32),
    }
    batch["other_labels"] = batch["labels"].copy()
    batch["images"][:] = 50 * np.arange(5, dtype=np.uint8)[:, None, None, None]
    return batch


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_pairs_are_mixed_by_the_share_that_is_stated(mixup, cutmix):
    shares = set()
    for seed in range(20):
        batch = _pairs([1, 1, 1, 0, 1])
        augment.mix_pairs(batch, mixup, cutmix, np.random.default_rng(seed))
        assert batch["other_labels"].tolist() == [1, 0, 2, 3, 4]
        assert batch["share"][2:].tolist() == [1, 1, 1]
        share = float(batch["share"][0])
        shares.add(share)
        # Rows 0 and 1 are constant images of 0 and 50, so their means tell the true shares.
        assert abs(batch["images"][0].mean() - 50 * (1 - share)) <= 0.5
        assert abs(batch["images"][1].mean() - 50 * share) <= 0.5
        for row in (2, 3, 4):
            assert np.all(batch["images"][row] == 50 * row)
    assert len(shares) > 10


def test_erasing_fills_one_rectangle_of_the_stated_area():
    for seed in range(20):
        pixels = np.full((30, 40, 3), 255, np.uint8)
        augment.erase(pixels, np.random.default_rng(seed))
        rows, columns = np.nonzero(np.any(pixels != 255, axis=2))
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1) / 1200
        assert 0.01 < area < 0.36


def test_mirrors_and_centres():
    """All mirrored at probability 1; the centre is that of the shorter side."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    assert np.array_equal(augment.eval_image(image, 6, 1.0), pixels[:, 2:8])
    flipped = augment.train_image(image, 6, ImageConfig(flip=1.0), np.random.default_rng(0))
    assert np.array_equal(flipped, pixels[:, 7:1:-1])


# ------------------------------------------------------------------------- bad input


def _bytes(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    "mode, value, expected",
    [
        ("L", 100, (100,) * 3),
        ("1", 1, (255,) * 3),
        ("LA", (0, 0), (255,) * 3),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255,) * 3),
        ("I;16", 257 * 77, (77,) * 3),
        ("P", 0, (0,) * 3),
    ],
)
def test_every_mode_becomes_rgb(mode, value, expected):
    image = Image.new(mode, (3, 2), value)
    assert decode(_bytes(image), "x").getpixel((0, 0)) == expected


def test_cmyk_and_turned_jpegs():
    assert decode(_bytes(Image.new("CMYK", (8, 8)), "JPEG"), "x").getpixel((0, 0)) == (255,) * 3
    image, exif = Image.new("RGB", (8, 4)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    assert decode(file.getvalue(), "x").size == (4, 8)


@pytest.mark.parametrize("cut", [0, 3, 60])
def test_damaged_files_are_named(cut):
    data = _bytes(Image.effect_noise((32, 32), 50), "JPEG")[:cut]
    with pytest.raises(UnreadableImage, match="a/b.jpg cannot be read as an image"):
        decode(data, "a/b.jpg")


def _folder(root, splits=("train", "val"), damaged=()):
    """Three classes of four images of uneven sizes and modes each."""
    for split in splits:
        for label, name in enumerate(("cat", "dog", "eel")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                mode = ("RGB", "L", "RGBA", "P")[number]
                path = folder / f"{number}.png"
                Image.new(mode, (5 + number, 9 - label)).save(path)
                if (split, name, number) in damaged:
                    path.write_bytes(path.read_bytes()[:20])
            (folder / "notes.txt").write_text("not an image")
    return root


def test_a_folder_with_a_damaged_image_goes_on_without_it(tmp_path, caplog):
    damaged = [("train", "dog", 1), ("val", "cat", 0)]
    train, held_out = image_sources.open_images(str(_folder(tmp_path, damaged=damaged)), 0.2)
    assert train.classes == held_out.classes == ("cat", "dog", "eel")
    assert len(train) == len(held_out) == 12 and train.hash != ""
    images.check_readable(train, "train")
    batches = list(_iterator(held_out, train=False, batch_size=8))
    labels = np.concatenate([batch["labels"] for batch in batches])
    weights = np.concatenate([batch["weights"] for batch in batches])
    assert weights.sum() == 11 and (labels >= 0).sum() == 12
    assert "val/cat/0.png cannot be read as an image" in caplog.text
    endless = _iterator(train, train=True, **_RECIPE)
    assert sum(next(endless)["weights"].sum() for _ in range(3)) == 11
    assert len(pickle.loads(pickle.dumps(train))) == 12


def test_a_folder_without_a_held_out_part_is_cut(tmp_path):
    root = _folder(tmp_path, splits=("train",))
    for source in (root, root / "train"):
        train, held_out = image_sources.open_images(str(source), 0.25)
        assert (len(train), len(held_out)) == (9, 3)
        again = image_sources.open_images(str(source), 0.25)
        assert (train.hash, held_out.hash) == (again[0].hash, again[1].hash)
    with pytest.raises(ValueError, match=r"eval_fraction=0.01 of 12 images"):
        image_sources.open_images(str(root), 0.01)


def test_a_set_that_is_at_fault_is_an_error(tmp_path):
    open_images = image_sources.open_images
    with pytest.raises(ValueError, match="is no folder"):
        open_images(str(tmp_path / "none"), 0.2)
    with pytest.raises(ValueError, match="has no subfolders"):
        open_images(str(tmp_path), 0.2)
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="a holds no image"):
        open_images(str(tmp_path / "empty"), 0.2)
    every = [("train", name, n) for name in ("cat", "dog", "eel") for n in range(4)]
    root = _folder(tmp_path / "bad", damaged=every)
    train, _ = open_images(str(root), 0.2)
    with pytest.raises(ValueError, match="none of 12 images of train can be read; the first: "):
        images.check_readable(train, "train")
    with pytest.raises(ValueError, match="none of 4 images can be read"):
        images.ImageBatches(
            train, ImageConfig(), train=True, image_size=4, batch_size=4, process_index=0,
            process_count=1,
        )[0]  # fmt: skip
    (root / "val" / "fox").mkdir()
    with pytest.raises(ValueError, match="fox is no class of the training split"):
        open_images(str(root), 0.2)


# ------------------------------------------------------------------------- sources


def _write_idx(path: pathlib.Path, array: np.ndarray):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    data = header + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_idx_folders(tmp_path):
    random = np.random.default_rng(0)
    for name, count, end in (("train", 6, ".gz"), ("t10k", 3, "")):
        pixels = random.integers(0, 256, (count, 4, 5)).astype(np.uint8)
        _write_idx(tmp_path / f"{name}-images-idx3-ubyte{end}", pixels)
        _write_idx(tmp_path / f"{name}-labels-idx1-ubyte{end}", np.arange(count, dtype=np.uint8))
    train, held_out = image_sources.open_images(str(tmp_path), 0.2)
    assert (len(train), len(held_out), len(train.classes)) == (6, 3, 6)
    image, label = held_out.read(2)
    assert np.array_equal(np.asarray(image)[..., 1], pixels[2]) and label == 2
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shape \(3, 4, 5\) and holds 59 bytes instead of 60"):
        idx.read_folder(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="has no partner"):
        idx.read_folder(tmp_path)
    path.write_bytes(b"\0\0\x0d\x01")
    with pytest.raises(ValueError, match="no IDX file of unsigned bytes"):
        idx.read(path)


def test_the_built_in_digits():
    train, held_out = image_sources.open_images("builtin", 0.2)
    assert (len(train), len(held_out)) == (1438, 359)
    whole = image_sources.builtin()
    counts = np.bincount(whole.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert whole.images.max() == 255 and whole.images.shape == (1797, 8, 8)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("source", "", "name"),
        ("eval_fraction", 1.0, r"\(0, 1\)"),
        ("batch_size", 0, ">= 1"),
        ("flip", 1.5, r"\[0, 1\]"),
        ("crop_min_area", 0.0, r"\(0, 1\]"),
        ("randaugment_magnitude", 11.0, r"\[0, 10\]"),
        ("randaugment_layers", 1.5, "integer"),
        ("mixup_alpha", float("nan"), r"\[0, inf\)"),
        ("label_smoothing", 1.0, r"\[0, 1\)"),
    ],
)
def test_configurations(field, value, rule):
    ImageConfig().validate()
    with pytest.raises(ValueError, match=rf"config\.data\.{field}=.*{rule}"):
        ImageConfig(**{field: value}).validate()
    with pytest.raises(ValueError, match="odd|even"):
        _iterator(_set(), train=True, batch_size=3, process=(0, 2), mixup_alpha=1.0)
