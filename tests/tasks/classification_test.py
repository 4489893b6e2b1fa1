"""The classification task: soft targets, exact scores, a run with the trainer, its picture."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.tolerances import assert_close
from ttt_jax import sharding, train
from ttt_jax.config import Config, OptimizerConfig, TrainConfig
from ttt_jax.config_images import ImageConfig
from ttt_jax.models import HViTTTConfig, ViTTTConfig, build, lact_llm
from ttt_jax.tasks import classification, make_task
from ttt_jax.tasks.class_scores import ClassScores

_MODEL = dict(
    num_classes=10, image_size=8, patch_size=4, hidden_size=16, num_layers=1, num_heads=2,
    scan_layers=False,
)  # fmt: skip


def _config(model=None, **data):
    return Config(
        model=model or ViTTTConfig(**_MODEL),
        data=ImageConfig(**{"batch_size": 32, **data}),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=2),
        train=TrainConfig(steps=3, save_every=3, log_every=1, ema_decay=0.5),
    )


class _Fixed(nnx.Module):
    """Answers with given scores, whatever the images."""

    def __init__(self, logits):
        self.logits = nnx.Param(logits)

    def __call__(self, images, *, key=None):
        assert images.dtype == jnp.float32
        return self.logits[...]


def test_the_loss_is_the_cross_entropy_with_the_stated_target():
    """Against the definition in float64, with damaged rows and padding."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((6, 10))
    batch = {
        "images": np.zeros((6, 8, 8, 3), np.uint8),
        "labels": np.array([1, 9, 3, 0, -1, 4], np.int32),
        "other_labels": np.array([2, 9, 3, 0, -1, 1], np.int32),
        "share": np.array([0.3, 1.0, 0.5, 1.0, 1.0, 0.9], np.float32),
        "weights": np.array([1, 1, 1, 0, 0, 1], np.float32),
    }
    expected = 0.0
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for row in np.flatnonzero(batch["weights"]):
        target = np.full(10, 0.2 / 10)
        target[batch["labels"][row]] += 0.8 * batch["share"][row]
        target[batch["other_labels"][row]] += 0.8 * (1 - batch["share"][row])
        assert np.isclose(target.sum(), 1)
        expected -= target @ log_p[row]
    task = make_task(_config(label_smoothing=0.2))
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    total, stats = task.loss(_Fixed(jnp.asarray(logits, jnp.float32)), batch, jax.random.key(0))
    assert_close(total, expected, 1e-6)
    assert stats["count"] == 4 and np.isclose(stats["unreadable"], 1 / 6)


def test_ranks_against_a_sort():
    random = np.random.default_rng(0)
    logits = random.integers(0, 4, (50, 7)).astype(np.float32)  # many ties
    labels = random.integers(0, 7, 50)
    order = np.argsort(-logits, axis=1, kind="stable")
    expected = [int(np.flatnonzero(o == label)[0]) for o, label in zip(order, labels, strict=True)]
    logits[3, 2] = np.nan
    expected[3] = 7
    found = classification.label_rank(jnp.asarray(logits), jnp.asarray(labels))
    assert found.tolist() == expected


def test_scores_are_exact_over_batches_of_uneven_weight():
    random = np.random.default_rng(1)
    labels, ranks = random.integers(0, 30, 200), random.integers(0, 12, 200)
    losses = random.exponential(size=200)
    scores = ClassScores(tuple(f"class {n}" for n in range(30)))
    for start in range(0, 200, 64):
        rows = slice(start, start + 64)
        padding = np.zeros(3)
        scores.add(
            *(np.concatenate([x[rows], fill]) for x, fill in (
                (losses, padding), (ranks, padding.astype(int)),
                (labels, np.array([-1, -1, 0])), (np.ones(200), padding),
            ))
        )  # fmt: skip
    metrics = scores.result().metrics
    assert np.isclose(metrics["top1"], np.mean(ranks < 1)) and np.isclose(
        metrics["top5"], np.mean(ranks < 5)
    )
    assert np.isclose(metrics["loss"], losses.mean())
    assert np.isclose(metrics["majority_top1"], np.bincount(labels).max() / 200)
    assert (metrics["images"], metrics["unreadable"]) == (200, 4)
    assert len(scores.result().table.splitlines()) == 21
    with pytest.raises(ValueError, match="no image that can be read"):
        ClassScores(("a",)).result()


def test_evaluation_does_not_depend_on_the_batch():
    """359 images in batches of 32 and of 128, the last ones filled up: the same numbers."""
    model = build(ViTTTConfig(**_MODEL), nnx.Rngs(jax.random.key(0, impl="rbg")))
    arrays = nnx.split(model, nnx.Param, nnx.BatchStat)
    tasks = [make_task(_config(batch_size=size)) for size in (32, 128)]
    one, other = (task.evaluate(*arrays, sharding.make_mesh()).metrics for task in tasks)
    assert one["images"] == 359 and one["top1"] == other["top1"] and one["top5"] == other["top5"]
    assert np.isclose(one["loss"], other["loss"], rtol=1e-6)


_STAGE = HViTTTConfig(
    num_classes=10, image_size=8, widths=(8,), depths=(1,), heads=(1,), scan_layers=False
)


@pytest.mark.parametrize(
    "model",
    [ViTTTConfig(**_MODEL), pytest.param(_STAGE, marks=pytest.mark.exhaustive)],
    ids=["vittt", "running statistics"],
)
def test_a_run_trains_evaluates_and_draws(model, tmp_path, capsys):
    """With the trainer's own main."""
    config = _config(model, mixup_alpha=0.8, cutmix_alpha=1.0, crop_min_area=0.5)
    assert train.main(config, tmp_path) == 0
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["images"] == 359 and 0 <= report["top1"] <= report["top5"] <= 1
    assert len(report["top1_by_class"]) == 10
    with Image.open(tmp_path / "predictions.png") as picture:
        assert picture.size[0] > 500 and len(picture.convert("RGB").getcolors(1 << 20)) > 100
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("unreadable" in line for line in lines)
    assert "most frequent class 11.70 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, message",
    [
        (_config(ViTTTConfig(**_MODEL | {"num_classes": 9})), "num_classes=9 is too small"),
        (_config(source="/no/such/folder"), "is no folder"),
        (_config(lact_llm.preset("tiny")), "LactLLMConfig, which does not classify images"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train.main(config, tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))


def test_the_example_has_the_shapes_of_a_batch():
    task = make_task(_config())
    batch = next(task.batches("train"))
    shapes = {name: (x.shape, x.dtype) for name, x in task.example().items()}
    assert shapes == {name: (x.shape, x.dtype) for name, x in batch.items()}
