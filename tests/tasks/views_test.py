"""View synthesis as a task: scores against SciPy and by hand, loss, evaluation, pictures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from scipy import ndimage

from tests.data import posed_scenes
from ttt_jax import sharding, train
from ttt_jax.config import Config, TrainConfig
from ttt_jax.config_views import ViewsConfig
from ttt_jax.data.camera_paths import focus_of, swing, up_of
from ttt_jax.data.scene_sets import open_scenes
from ttt_jax.data.scenes import look_at
from ttt_jax.models import build, lact_nvs, transformer
from ttt_jax.tasks import make_task
from ttt_jax.tasks.view_scores import ViewScores, psnr, ssim, trivial_answers
from ttt_jax.tasks.views import Views


def _config(**fields):
    sizes = dict(height=16, width=16, input_views=2, target_views=2, batch_size=2, eval_scenes=3)
    model = lact_nvs.preset("tiny", hidden_size=16, num_layers=1, patch_size=8)
    return Config(model=model, data=ViewsConfig(**sizes | fields), train=TrainConfig(steps=1))


def _parts(config):
    graphdef, params = nnx.split(build(config.model, nnx.Rngs(0)), nnx.Param)
    return graphdef, nnx.to_pure_dict(params), {}


def test_ssim_is_the_gaussian_window_formula():
    """Against moments by SciPy's Gaussian filter, cut to the windows that lie inside."""
    random = np.random.default_rng(0)
    x = random.random((2, 20, 24, 3))
    y = np.clip(x + 0.2 * random.standard_normal(x.shape), 0, 1)

    def mean(a):
        a = ndimage.gaussian_filter(a, (0, 1.5, 1.5, 0), truncate=5 / 1.5)
        return a[:, 5:-5, 5:-5]

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    expected = (2 * mx * my + c1) * (2 * cov + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    found = ssim(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    assert np.allclose(found, expected.mean((1, 2, 3)), atol=2e-5)
    assert np.allclose(psnr(x, y), -10 * np.log10(((x - y) ** 2).mean((1, 2, 3))), atol=1e-3)
    assert float(psnr(x, x)[0]) == pytest.approx(100) and np.all(ssim(x[:, :8], y[:, :8]) < 0.99)


def test_trivial_answers():
    images = jnp.arange(2 * 3.0).reshape(2, 3, 1, 1, 1) * jnp.ones((2, 3, 4, 4, 3))
    poses = jnp.zeros((2, 3, 4, 4)).at[:, :, 0, 3].set(jnp.array([0.0, 5.0, 9.0]))
    wanted = jnp.zeros((2, 2, 4, 4)).at[:, :, 0, 3].set(jnp.array([6.0, 8.0]))
    found = trivial_answers(images, poses, wanted)
    assert found["mean_colour"][:, :, 0, 0, 0].tolist() == [[1, 1], [4, 4]]
    assert found["nearest_view"][:, :, 0, 0, 0].tolist() == [[1, 2], [4, 5]]


def test_scenes_count_once_whatever_their_number_of_views():
    scores = ViewScores(["a", "a", "b", "c"])
    names = [f"{answer}_{kind}" for answer in ("model", "mean_colour", "nearest_view")
             for kind in ("psnr", "ssim")]  # fmt: skip
    values = np.array([10.0, 20.0, 30.0, 1000.0])
    scores.add({name: values for name in names}, np.arange(4), np.array([1, 1, 1, 0]))
    result = scores.result()
    assert result.headline == ("psnr", 22.5) and result.metrics["unreadable"] == 1
    assert "over 2 scenes, 1 unreadable left out" in result.summary
    assert [scene["model_psnr"] for scene in result.details["scenes"]] == [15, 30]
    with pytest.raises(ValueError, match="no held-out scene could be read"):
        ViewScores([]).result()


def test_a_path_around_what_the_cameras_look_at():
    focus = np.array([0.5, -1.0, 2.0])
    positions = focus + np.array([[3.0, 0, 1], [2.0, 2.0, 1.2], [2.0, -2.0, 0.8]])
    poses = look_at(positions, focus)
    assert np.allclose(focus_of(poses), focus, atol=1e-2)
    assert np.allclose(up_of(poses), [0, 0, 1], atol=0.02)
    path = swing(poses, 12)
    assert np.allclose(path[:, :3, :3] @ path[:, :3, :3].transpose(0, 2, 1), np.eye(3), atol=1e-9)
    forward = np.einsum("nij,j->ni", np.linalg.inv(path)[:, :3, :3], focus) + np.linalg.inv(
        path
    )[:, :3, 3]
    assert np.allclose(forward[:, :2], 0, atol=2e-2) and np.all(forward[:, 2] > 2)
    azimuth = np.degrees(np.arctan2(path[:, 1, 3] - focus[1], path[:, 0, 3] - focus[0]))
    assert 40 < azimuth.max() < 50 and -50 < azimuth.min() < -40
    around = np.linspace(0, 2 * np.pi, 9)[:-1]
    ring = np.stack([2 * np.cos(around), 2 * np.sin(around), np.ones(8)], -1)
    turn = swing(look_at(ring, np.zeros(3)), 4)[:, :2, 3]
    assert np.allclose(turn.sum(0), 0, atol=1e-6)  # all the way round
    parallel = np.tile(look_at(np.array([[0, -2.0, 0]]), np.zeros(3)), (3, 1, 1))
    parallel[:, 0, 3] = [-0.2, 0.0, 0.2]
    assert np.isfinite(swing(parallel, 4)).all()


def test_loss_evaluation_and_pictures(tmp_path):
    """Rows of weight 0 count for nothing; every scene is scored once; pictures are drawn."""
    config = _config()
    task = make_task(config)
    assert isinstance(task, Views) and "rendered, 3 held out" in task.describe()
    graphdef, params, buffers = _parts(config)
    batch = next(task.batches("train"))
    example = task.example()
    assert {name: (x.shape, x.dtype) for name, x in example.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }
    loss = jax.jit(lambda batch: task.loss(nnx.merge(graphdef, params), batch, None))
    total, stats = loss(batch)
    assert float(stats["count"]) == 4
    batch["weights"][1], batch["images"][1] = 0, 0
    half, stats = loss(batch)
    assert float(stats["count"]) == 2 and 0 < float(half) < float(total)
    assert stats["unreadable"] == 0.5
    assert float(stats["psnr"]) == pytest.approx(-10 * np.log10(float(half) / 2), abs=1e-3)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    result = task.evaluate(graphdef, params, buffers, mesh)
    assert len(result.details["scenes"]) == 3
    expected = {"psnr", "mean_colour_psnr", "nearest_view_psnr", "ssim", "mean_colour_ssim"}
    assert expected < set(result.metrics) and result.headline[0] == "psnr"
    assert result.metrics["mean_colour_psnr"] > 9
    paths = task.artefacts(graphdef, params, buffers, tmp_path)
    assert [path.name for path in paths] == ["views.png", "turntable.gif"]
    strip = np.asarray(Image.open(paths[0]))
    # The first input view, enlarged six times, below the header.
    shown = strip[24 : 24 + 96 : 6, 4 : 4 + 96 : 6]
    assert (shown == next(task.batches("eval"))["images"][0, 0]).all()
    with Image.open(paths[1]) as gif:
        assert gif.n_frames > 10 and gif.size == (3 * 96, 24 + 96)
    assert task.flops_per_step(nnx.merge(graphdef, params)) > 1e6


def test_held_out_views_of_files(tmp_path):
    """Evaluation asks for views that training never sees, all of them, from views that it does."""
    for number in range(2):
        posed_scenes.write_json(tmp_path / f"s{number}", seed=number, count=10)
    config = _config(source=str(tmp_path), held_out="views", eval_fraction=0.4)
    task = make_task(config)
    assert "2 scenes to train on and 2 to evaluate (held out: views)" in task.describe()

    def cameras(batch, first):
        return [pose.tobytes() for pose in batch["poses"][:, first:].reshape(-1, 16)]

    wanted = [camera for batch in task.batches("eval") for camera in cameras(batch, 2)]
    train = task.batches("train")
    seen = {camera for _ in range(20) for camera in cameras(next(train), 0)}
    assert len(wanted) == len(set(wanted)) == 8 and not set(wanted) & seen
    config.data.sampling = "nearest"
    for batch in make_task(config).batches("eval"):
        centres = batch["poses"][:, :, :3, 3]
        near = np.linalg.norm(centres[:, :2] - centres[:, 2:3], axis=-1)
        assert np.all(near[:, 0] <= near[:, 1])


def test_held_out_images_that_cannot_be_read_are_found_before_the_first_step(tmp_path):
    """One damaged picture leaves the only held-out scene too few views."""
    for number in range(3):
        posed_scenes.write_json(tmp_path / "set" / f"s{number}", seed=number, count=4)
    config = _config(source=str(tmp_path / "set"), eval_fraction=0.3)
    (scene,) = open_scenes(config.data).held_out
    scene.views[0].image.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="1 examples of the split 'eval' none has enough"):
        train.main(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_errors():
    config = _config(height=20)
    with pytest.raises(ValueError, match="config.data.height=20 must be a multiple"):
        make_task(config)
    with pytest.raises(ValueError, match="TransformerConfig, which renders no views"):
        make_task(dataclasses.replace(_config(), model=transformer.preset("tiny")))
    with pytest.raises(ValueError, match="no such file or folder"):
        make_task(_config(source="none")).describe()
