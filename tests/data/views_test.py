"""Camera files and the stream of views: formats, true intrinsics, bad input, positions."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from tests.data import posed_scenes
from tests.data.posed_scenes import HEIGHT, WIDTH
from ttt_jax.config_views import ViewsConfig
from ttt_jax.data import scenes
from ttt_jax.data.cameras import read_json, read_realestate10k
from ttt_jax.data.pipeline import DataPositionError
from ttt_jax.data.scene_sets import open_scenes
from ttt_jax.data.view_loading import load_view, resize_and_crop
from ttt_jax.data.view_sampling import centre_cameras, draw_views
from ttt_jax.data.views import ViewBatches, ViewSource


def _config(source, **fields):
    sizes = dict(height=12, width=16, input_views=2, target_views=2, batch_size=2)
    config = ViewsConfig(source=str(source), **sizes | fields)
    config.validate()
    return config


def test_both_formats_give_the_rendered_views_and_cameras(tmp_path):
    """Read at their own size, images, intrinsics and poses are those that were written."""
    posed_scenes.write_json(tmp_path / "a", seed=1)
    posed_scenes.write_realestate10k(tmp_path, seed=1)
    images, intrinsics, poses = posed_scenes.rendered(1, 6)
    for views, bad in (
        read_json(tmp_path / "a" / "cameras.json"),
        read_realestate10k(tmp_path / "clip.txt", tmp_path),
    ):
        assert len(views) == 6 and not bad
        for view, image, k, pose in zip(views, images, intrinsics, poses, strict=True):
            found, pixels = load_view(view, HEIGHT, WIDTH)
            assert (found == image).all()
            assert np.allclose(pixels, k, atol=1e-5)
            assert np.allclose(view.pose, pose, atol=1e-5)


@pytest.mark.parametrize("size", [(12, 16), (12, 12), (24, 8), (36, 48)])
def test_resizing_and_cropping_keep_the_intrinsics_true(size):
    """A scaled and cropped image is what a camera with the returned intrinsics sees."""
    random = np.random.default_rng(4)
    scene = scenes.random_scene(random)
    intrinsics, poses = scenes.random_cameras(random, 1, 96, 128)
    large = scenes.render(scene, intrinsics, poses, 96, 128, 2)[0]
    small, k = resize_and_crop(Image.fromarray(large), intrinsics[0].astype(float), *size)
    small = np.asarray(small, float)

    def error(change):
        return np.abs(scenes.render(scene, (k + change)[None], poses, *size, 8)[0] - small).mean()

    # Half a pixel, or a focal length of 5 % more or less, fits worse.
    changes = [*(0.5 * np.eye(4)[2:]), *(0.05 * k[0] * np.eye(4)[:2])]
    worse = min(error(sign * change) for change in changes for sign in (-1, 1))
    assert error(0) < worse, (error(0), worse)


def test_centred_cameras_see_the_same(tmp_path):
    """The transformation is one rigid motion and scale for all cameras of the example."""
    poses = posed_scenes.rendered(2, 6)[2].astype(np.float64)
    centred = centre_cameras(poses, 4)
    assert np.allclose(centred[:4, :3, 3].mean(0), 0, atol=1e-6)
    assert np.isclose(np.linalg.norm(centred[:4, :3, 3], axis=-1).max(), 1)
    before, after = (np.linalg.inv(p[:1]) @ p for p in (poses, centred))
    assert np.allclose(before[:, :3, :3], after[:, :3, :3], atol=1e-6)
    lengths = [np.linalg.norm(p[1:, :3, 3], axis=-1) for p in (before, after)]
    assert np.allclose(lengths[1] / lengths[0], (lengths[1] / lengths[0])[0])


def _spoil(tmp_path, change):
    """A set of three scenes of six views; `change` spoils the entry 2 of the first."""
    for number in range(3):
        entries = posed_scenes.write_json(tmp_path / f"scene{number}", seed=number)
        if number == 0:
            change(entries[2])
            posed_scenes.save(tmp_path / "scene0", entries)
    return _config(tmp_path)


def _normalise(entry):
    entry.update(
        fx=entry["fx"] / WIDTH, fy=entry["fy"] / HEIGHT, cx=entry["cx"] / WIDTH,
        cy=entry["cy"] / HEIGHT,
    )  # fmt: skip


def _scale(entry):
    entry["w2c"] = (np.diag([2.0, 2, 2, 1]) @ np.array(entry["w2c"])).tolist()


def _mirror(entry):
    entry["w2c"] = (np.diag([1.0, 1, -1, 1]) @ np.array(entry["w2c"])).tolist()


BAD_VIEWS = {
    "look like fractions": _normalise,
    "this format has pixels": lambda entry: entry.update(cx=0.5, cy=0.5),
    "the centre inside the image": lambda entry: entry.update(cx=0.0),
    "scales by about 2": _scale,
    "it mirrors": _mirror,
    "there is no image": lambda entry: entry.update(file_path="none.png"),
    "has no 'fx'": lambda entry: entry.pop("fx"),
    "are not numbers|finite numbers": lambda entry: entry.update(fx=float("nan")),
    "last row": lambda entry: entry["w2c"][3].__setitem__(3, 2.0),
    "must be positive": lambda entry: entry.update(w=0),
}


@pytest.mark.parametrize("message", BAD_VIEWS)
def test_a_view_at_fault_is_left_out_and_counted(tmp_path, message, caplog):
    found = open_scenes(_spoil(tmp_path, BAD_VIEWS[message]))
    assert (found.skipped_views, found.skipped_scenes) == (1, 0)
    sizes = {scene.name: len(scene.views) for scene in found.train + found.held_out}
    assert sizes == {"scene0/cameras": 5, "scene1/cameras": 6, "scene2/cameras": 6}
    assert any(part in caplog.text for part in message.split("|")), caplog.text


def test_a_set_at_fault_is_an_error_that_says_why(tmp_path):
    for number in range(2):
        entries = posed_scenes.write_json(tmp_path / f"scene{number}", seed=number)
        for entry in entries:
            _normalise(entry)
        posed_scenes.save(tmp_path / f"scene{number}", entries)
    with pytest.raises(ValueError, match="no usable scene.*look like fractions"):
        open_scenes(_config(tmp_path))
    posed_scenes.write_realestate10k(tmp_path / "r")
    lines = (tmp_path / "r" / "clip.txt").read_text().splitlines()
    pixels = [line.split() for line in lines[1:]]
    for words in pixels:
        words[1:5] = [str(500 * float(x)) for x in words[1:5]]
    (tmp_path / "r" / "clip.txt").write_text(
        "\n".join([lines[0], *(" ".join(words) for words in pixels)])
    )
    with pytest.raises(ValueError, match="no usable scene.*look like pixels"):
        open_scenes(_config(tmp_path / "r"))


def test_errors_of_sources(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        open_scenes(_config(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"neither it nor its subfolders"):
        open_scenes(_config(tmp_path))
    (tmp_path / "cameras.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        open_scenes(_config(tmp_path))
    posed_scenes.write_json(tmp_path)
    with pytest.raises(ValueError, match=r"leave none to train on; give more scenes, or hold out"):
        open_scenes(_config(tmp_path))
    with pytest.raises(ValueError, match="has 6 usable views to draw from, 8 are needed"):
        open_scenes(_config(tmp_path, input_views=6))
    posed_scenes.write_realestate10k(tmp_path / "r")
    with pytest.raises(ValueError, match="config.data.frames"):
        open_scenes(_config(tmp_path / "r", frames=str(tmp_path / "missing")))
    (tmp_path / "r" / "clip" / "2000.png").rename(tmp_path / "r" / "clip" / "2000.jpg")
    (tmp_path / "r" / "clip" / "3000.png").unlink()
    views, bad = read_realestate10k(tmp_path / "r" / "clip.txt", tmp_path / "r")
    assert len(views) == 5 and views[2].image.suffix == ".jpg" and "no image" in str(bad[0])
    (tmp_path / "r" / "clip.txt").write_text("0 1 2\n")
    with pytest.raises(ValueError, match="begins with the address"):
        open_scenes(_config(tmp_path / "r"))
    for fields, rule in (
        (dict(height=0), "height"), (dict(sampling="all"), "sampling"),
        (dict(eval_fraction=1.0), "eval_fraction"), (dict(held_out="views"), "held_out"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"config.data.{rule}="):
            ViewsConfig(**fields).validate()


def test_damaged_images_give_way_to_other_views(tmp_path, caplog):
    """Cut off, of another shape: replaced; a scene with too few left has weight 0."""
    for number in range(2):
        posed_scenes.write_json(tmp_path / f"scene{number}", seed=number)
    config = _config(tmp_path, held_out="scenes", eval_fraction=0.5)
    train = ViewSource(config).scenes.train[0]
    data = train.views[0].image.read_bytes()
    train.views[0].image.write_bytes(data[: len(data) // 2])
    Image.new("RGB", (20, 20)).save(train.views[3].image)
    source = ViewSource(config)
    for step in range(8):
        example = source.examples("train").example(step)
        assert example.images.shape == (4, 12, 16, 3) and example.images.std() > 10
        assert len(np.unique(example.poses[:, :3, 3], axis=0)) == 4
    assert "2 damaged views so far" in caplog.text and "another shape" in caplog.text


def test_scenes_of_damaged_images_are_left_out_and_a_set_of_them_is_an_error(tmp_path):
    """Whether found before the run or, when files break, during it."""
    for number in range(5):
        posed_scenes.write_json(tmp_path / f"scene{number}", seed=number)
    config = _config(tmp_path, eval_fraction=0.2)

    def damage(scene):
        for view in scene.views:
            view.image.write_bytes(b"")

    first, *others = ViewSource(config).scenes.train
    damage(first)
    source = ViewSource(config)
    batch = next(source.batches("train", 4))
    assert sorted(batch["weights"]) == [0, 1, 1, 1]
    assert (batch["scenes"] >= 0).all()
    for scene in others:
        damage(scene)
    again = pickle.loads(pickle.dumps(source.examples("train")))  # without the images it keeps
    with pytest.raises(ValueError, match="none of 4 scenes has enough images.*last fault: .*png"):
        ViewBatches(again, config, batch_size=4, process_index=0, process_count=1)[0]
    with pytest.raises(ValueError, match="16 examples of the split 'train' none.*fault: .*png"):
        ViewSource(config)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "I;16"])
def test_modes_of_images(tmp_path, mode):
    posed_scenes.write_json(tmp_path)
    view = read_json(tmp_path / "cameras.json")[0][0]
    image = Image.open(view.image).convert("L")
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    if mode == "RGBA":
        image.putalpha(0)
    image.save(view.image)
    found = load_view(view, 12, 16)[0]
    assert found.shape == (12, 16, 3) and found.dtype == np.uint8
    assert (found == 255).all() if mode == "RGBA" else found.std() > 10


def test_sampling(tmp_path):
    """Nearest: an example's views are the anchor and the closest to it; random: any."""
    posed_scenes.write_json(tmp_path, count=20)
    config = _config(tmp_path, sampling="nearest", held_out="views", eval_fraction=0.2)
    found = open_scenes(config)
    scene, held_out = found.train[0], found.held_out[0]
    assert len(held_out.targets) == 4 and not set(held_out.targets) & set(scene.inputs)
    centres = scene.poses()[:, :3, 3]
    for seed in range(5):
        inputs, targets = draw_views(np.random.default_rng(seed), scene, config)
        used = {targets[0], *targets[:2]} | set([i for i in inputs if i not in targets[:2]][:2])
        allowed = sorted(
            scene.inputs, key=lambda i: np.linalg.norm(centres[i] - centres[targets[0]])
        )
        ranks = np.argsort(np.argsort(np.linalg.norm(centres - centres[targets[0]], axis=-1)))
        # Held-out views take ranks too, and none is ever drawn.
        inside = [i for i in allowed if ranks[i] <= 3]
        assert set(inside) <= used or len(inside) < 4
        assert not used & set(held_out.targets)


@pytest.mark.parametrize("source", ["builtin", "files"])
def test_the_stream_is_a_function_of_seed_and_step(tmp_path, source):
    """Resumed anywhere, cut over two processes, or sent to a worker, batches are the same."""
    fields = dict(eval_scenes=3)
    if source == "files":
        for number in range(5):
            posed_scenes.write_json(tmp_path / f"s{number}", seed=number, count=5)
        fields, source = {}, tmp_path
    config = _config(source, **fields)
    iterator = ViewSource(config).batches("train", 2)
    first = [next(iterator) for _ in range(4)]
    state = json.loads(json.dumps(iterator.get_state()))
    following = next(iterator)
    again = ViewSource(config).batches("train", 2)
    again.set_state(state)
    for name, value in next(again).items():
        assert (value == following[name]).all(), name
    halves = [next(ViewSource(config).batches("train", 1, p, 2)) for p in range(2)]
    for name, value in first[0].items():
        assert (np.concatenate([half[name] for half in halves]) == value).all(), name
    assert (first[0]["images"] != first[1]["images"]).any()
    other = ViewSource(dataclasses.replace(config, shuffle_seed=1)).batches("train", 2)
    assert any((next(other)["images"] != batch["images"]).any() for batch in first)
    with pytest.raises(DataPositionError, match="shuffle_seed"):
        other.set_state(state)
    examples = pickle.loads(pickle.dumps(ViewSource(config).examples("train")))
    assert (examples.example(1).images == first[0]["images"][1]).all()
    evaluation = list(ViewSource(config).batches("eval", 2))
    count = len(ViewSource(config).examples("eval"))
    assert sum(batch["weights"].sum() for batch in evaluation) == count
    assert evaluation[-1]["weights"].shape == (2,)
