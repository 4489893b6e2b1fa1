"""LPIPS against a NumPy implementation of its own, with a narrow VGG16 of random weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_jax.config import Config
from ttt_jax.config_views import ViewsConfig
from ttt_jax.models import lact_nvs
from ttt_jax.tasks.lpips import load_lpips, lpips
from ttt_jax.tasks.views import Views, split_views

# torchvision's numbers, written down once more: convolutions, and where the maximum is taken.
_LAYERS = (0, 2, "pool", 5, 7, "pool", 10, 12, 14, "pool", 17, 19, 21, "pool", 24, 26, 28)
_COMPARED = (2, 7, 14, 21, 28)
_WIDTH = 4


@pytest.fixture(scope="module")
def tensors():
    random = np.random.default_rng(0)
    found, width = {"classifier.0.weight": np.zeros(3)}, 3
    for layer in _LAYERS:
        if layer != "pool":
            weight = random.normal(size=(_WIDTH, width, 3, 3)) * (2 / (9 * width)) ** 0.5
            found[f"features.{layer}.weight"] = weight.astype(np.float32)
            found[f"features.{layer}.bias"] = random.normal(size=_WIDTH).astype(np.float32) / 10
            width = _WIDTH
    for block in range(5):
        found[f"lin{block}.model.1.weight"] = random.random((1, _WIDTH, 1, 1), np.float32)
    return found


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("lpips") / "lpips.npz"
    np.savez(path, **tensors)
    return str(path)


def _features(tensors, image):
    """The compared features of one image [height, width, 3], each [channels, pixels]."""
    x = (2 * image.astype(np.float64) - 1 - [-0.030, -0.088, -0.188]) / [0.458, 0.448, 0.450]
    x, found = x.transpose(2, 0, 1), []
    for layer in _LAYERS:
        if layer == "pool":
            height, width = (size // 2 for size in x.shape[1:])
            x = x[:, : 2 * height, : 2 * width].reshape(-1, height, 2, width, 2).max((2, 4))
            continue
        weight, bias = (tensors[f"features.{layer}.{part}"] for part in ("weight", "bias"))
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
        x = np.maximum(np.einsum("ihwrc,oirc->ohw", windows, weight) + bias[:, None, None], 0)
        if layer in _COMPARED:
            found.append(x.reshape(len(x), -1))
    return found


def _reference(tensors, image, reference, learned=True):
    total = 0.0
    pairs = zip(_features(tensors, image), _features(tensors, reference), strict=True)
    for block, (a, b) in enumerate(pairs):
        a, b = (x / (np.sqrt((x**2).sum(0)) + 1e-10) for x in (a, b))
        weight = tensors[f"lin{block}.model.1.weight"].reshape(-1, 1) if learned else 1.0
        total += (weight * (a - b) ** 2).sum(0).mean()
    return total


def _images(shape):
    random = np.random.default_rng(1)
    return random.random(shape, np.float32), random.random(shape, np.float32)


def test_values_are_those_of_the_reference_and_the_gradient_lowers_them(tensors, path):
    weights = load_lpips(path)
    images, references = _images((2, 1, 18, 21, 3))  # odd sizes: the poolings leave pixels out

    @jax.jit
    def run(x):
        value, pullback = jax.vjp(lambda x: lpips(weights, x, references), x)
        gradient = pullback(jnp.ones_like(value))[0]
        size = jnp.sqrt(jnp.sum(jnp.square(gradient), axis=(2, 3, 4), keepdims=True))
        lower = lpips(weights, x - 0.1 * gradient / size, references)
        return value, lower, lpips(weights, references, references)

    value, lower, same = run(images)
    expected = [[_reference(tensors, images[i, 0], references[i, 0])] for i in range(2)]
    assert_close(value, np.array(expected), tolerance(np.float32, 9 * _WIDTH))
    assert (np.asarray(lower) < np.asarray(value)).all() and not np.asarray(same).any()


def test_without_learned_weights_every_channel_counts_alike(tensors, tmp_path):
    path = tmp_path / "vgg.npz"
    np.savez(path, **{k: v for k, v in tensors.items() if not k.startswith("lin")})
    images, references = _images((16, 16, 3))
    expected = _reference(tensors, images, references, learned=False)
    value = jax.jit(lambda a, b: lpips(load_lpips(path), a, b))(images, references)
    assert_close(value, np.array(expected), tolerance(np.float32, 9 * _WIDTH))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features.5.bias": None}, "has no 'features.5.bias'"),
        ({"lin3.model.1.weight": None}, "has no 'lin3.model.1.weight'"),
        ({"features.7.weight": np.zeros((4, 5, 3, 3))}, "features.7.weight has shape (4, 5, 3, 3)"),
        ({"lin0.model.1.weight": np.zeros((1, 5, 1, 1))}, "not (1, 4, 1, 1)"),
    ],
)
def test_a_file_at_fault_is_named_with_its_tensor(tensors, tmp_path, change, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **{k: v for k, v in (tensors | change).items() if v is not None})
    with pytest.raises(ValueError, match=re.escape(message)):
        load_lpips(path)


def test_files_of_another_kind_and_small_images_are_refused(path, tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").touch()
    for name in ("text.npz", "empty.npz"):
        with pytest.raises(ValueError, match=f"lpips_file='.*{name}' is no file of LPIPS weights"):
            load_lpips(tmp_path / name)
    with pytest.raises(ValueError, match="lpips_file=.*: is a folder, no .npz file; .* says how"):
        load_lpips(tmp_path)
    with pytest.raises(ValueError, match="sides of at least 16 pixels"):
        lpips(load_lpips(path), *_images((8, 16, 3)))
    with pytest.raises(ValueError, match="lpips_weight=1.0: needs the network's weights"):
        ViewsConfig(lpips_weight=1.0).validate()


def test_the_loss_of_views_adds_it(path):
    """A stand-in for the model: what it renders is given, so the loss can be computed by hand."""
    random = np.random.default_rng(2)
    rendered = random.random((2, 1, 16, 16, 3), np.float32)
    batch = {
        "images": random.integers(0, 256, (2, 3, 16, 16, 3), np.uint8),
        "intrinsics": np.ones((2, 3, 4), np.float32),
        "poses": np.tile(np.eye(4, dtype=np.float32), (2, 3, 1, 1)),
        "weights": np.array([1.0, 0.0], np.float32),
        "scenes": np.zeros(2, np.int32),
    }
    data = ViewsConfig(height=16, width=16, input_views=2, target_views=1, lpips_file=path)
    results = {}
    for weight in (0.0, 0.5):
        data.lpips_weight = weight
        task = Views(Config(model=lact_nvs.preset("tiny"), data=data))
        results[weight] = task.loss(lambda *_: jnp.asarray(rendered), batch, None)
    target = split_views(batch, 2)[2]
    distance = float(lpips(load_lpips(path), rendered, target)[0, 0])
    assert "lpips" not in results[0.0][1]
    assert_close(results[0.5][1]["lpips"], np.array(distance), 1e-6)
    assert_close(results[0.5][0] - results[0.0][0], np.array(0.5 * distance), 1e-5)
