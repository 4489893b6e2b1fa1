"""View synthesis: the squared error of rendered views; PSNR, SSIM, LPIPS of held-out scenes."""

import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttt_jax.data.camera_paths import swing
from ttt_jax.data.views import ViewSource, batch_shapes
from ttt_jax.models.lact_nvs import Cameras, LactNVSConfig
from ttt_jax.sharding import constrain
from ttt_jax.tasks.base import Result, place_whole_rows, rows_to_read
from ttt_jax.tasks.lpips import load_lpips, lpips
from ttt_jax.tasks.view_pictures import draw_strip, draw_turntable
from ttt_jax.tasks.view_scores import ViewScores, psnr, ssim, trivial_answers
from ttt_kernels import compat

Batch = dict[str, jax.Array]

_PICTURED = 3  # scenes of a picture
_FRAMES, _FRAMES_AT_ONCE = 48, 8  # of a turntable


class Views:
    """Posed views; a `ttt_jax.tasks.base.Task`.

    A batch is as of `ttt_jax.data.views.ViewBatches`: the first `input_views` of each row are
    given to the model, the others are asked for.
    """

    counted = "views"
    loss_name = "mean squared error of a pixel in [0, 1]"
    rows = "batch"

    def __init__(self, config: Any):
        """Checks the model; the scenes are opened when they are first needed.

        Args:
          config: a `ttt_jax.config.Config` whose data is a `ViewsConfig`.

        Raises:
          ValueError: the model renders no views, its patches do not divide the images, or the file
            of LPIPS weights cannot be used.
        """
        self.data = config.data
        if not isinstance(config.model, LactNVSConfig):
            raise ValueError(
                f"config.model is a {type(config.model).__name__}, which renders no views; with a "
                "ViewsConfig use a LactNVSConfig"
            )
        for name in ("height", "width"):
            size, patch = getattr(self.data, name), config.model.patch_size
            if size % patch:
                raise ValueError(
                    f"config.data.{name}={size} must be a multiple of config.model.patch_size="
                    f"{patch}"
                )

        # Read at once: a run must not fail over it at its first evaluation.
        self._lpips = load_lpips(self.data.lpips_file) if self.data.lpips_file else None

    @functools.cached_property
    def _source(self) -> ViewSource:
        return ViewSource(self.data)

    def describe(self) -> str:
        """Names the scenes, what was left out of them, and their hash.

        Raises:
          ValueError: they cannot be used.
        """
        what, found = f"Views: {self.data.source!r}", self._source.scenes
        if found is None:
            return f"{what}, rendered, {self.data.eval_scenes} held out, hash {self._source.hash}"
        return (
            f"{what}, {len(found.train)} scenes to train on and {len(found.held_out)} to evaluate "
            f"(held out: {self.data.held_out}), left out {found.skipped_scenes} scenes and "
            f"{found.skipped_views} views, hash {found.hash}"
        )

    def batches(self, split: str, mesh: Mesh | None = None) -> Any:
        """Opens this process's rows of a split, "train" or "eval" (see `Task.batches`)."""
        return self._source.batches(split, *rows_to_read(self.data.batch_size, mesh))

    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of a batch, without opening the scenes."""
        shapes = batch_shapes(self.data, self.data.batch_size)
        return {name: jax.ShapeDtypeStruct(*pair) for name, pair in shapes.items()}

    def loss(
        self, model: nnx.Module, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Sums over target views their mean squared error, and counts them (see `Task.loss`).

        With `lpips_weight` that times the view's LPIPS is added. The statistics are psnr, the mean
        over scenes of −10 log10 of the scene's error, and unreadable, the part of the scenes that
        are damaged.
        """
        images, cameras, target_images, targets = split_views(batch, self.data.input_views)
        out = model(images, cameras, targets)
        errors = jnp.mean(jnp.square(out - target_images), axis=(1, 2, 3, 4))
        weights, views = batch["weights"], out.shape[1]
        rows = jnp.sum(weights)
        decibels = -10 * jnp.log10(jnp.maximum(errors, 1e-10))
        unreadable = jnp.mean((batch["scenes"] >= 0) & (weights == 0), dtype=jnp.float32)
        stats = {"count": views * rows, "unreadable": unreadable}
        stats["psnr"] = jnp.sum(weights * decibels) / jnp.maximum(rows, 1)
        if self.data.lpips_weight:
            distances = jnp.mean(lpips(self._lpips, out, target_images), axis=1)
            errors = errors + self.data.lpips_weight * distances
            stats["lpips"] = jnp.sum(weights * distances) / jnp.maximum(rows, 1)
        return views * jnp.sum(weights * errors), stats

    def flops_per_step(self, model: nnx.Module) -> float:
        """Counts every scene of a batch."""
        data = self.data
        views = (data.input_views, data.target_views, data.height, data.width)
        return data.batch_size * model.flops_per_scene(*views)

    def evaluate(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, mesh: Mesh, max_batches: int = 0
    ) -> Result:
        """Computes PSNR, SSIM and, with its weights, LPIPS of held-out scenes and trivial answers.

        Raises:
          ValueError: no held-out scene can be read.
        """
        scores = ViewScores(self._source.examples("eval").names())
        eval_step = _eval_step(mesh, self.data.input_views, self.data.lpips_file)
        with jax.set_mesh(mesh):
            for number, batch in enumerate(self.batches("eval", mesh), start=1):
                out = eval_step(graphdef, params, buffers, place_whole_rows(batch, mesh))
                scores.add(*jax.tree.map(np.asarray, out))
                if number == max_batches:
                    break
        return scores.result()

    def artefacts(
        self, graphdef: nnx.GraphDef, params: Any, buffers: Any, workdir: pathlib.Path
    ) -> list[pathlib.Path]:
        """Draws held-out scenes: views.png, side by side, and turntable.gif, a swing around them.

        Nothing is drawn where several processes share the arrays.
        """
        if jax.process_count() > 1:
            return []
        examples = self._source.examples("eval")
        made = map(examples.example, range(len(examples)))  # no more of them than are drawn
        shown = list(itertools.islice((x for x in made if x is not None), _PICTURED))
        batch = {
            name: np.stack([getattr(example, name) for example in shown])
            for name in ("images", "intrinsics", "poses")
        }
        images, cameras, target_images, targets = split_views(batch, self.data.input_views)
        model = nnx.merge(graphdef, params, buffers)
        size = images.shape[2:4]
        states = jax.jit(lambda m, i, c: m.reconstruct(i, c))(model, images, cameras)
        render = jax.jit(lambda m, s, c: m.render(s, c, *size))
        one = jax.tree.map(lambda x: x[:, :1], targets)
        drawn = np.asarray(render(model, states, one))[:, 0]
        wanted = np.asarray(target_images[:, 0])
        decibels = [f"PSNR {float(x):.1f} dB" for x in psnr(drawn, wanted)]
        strip = draw_strip(workdir / "views.png", np.asarray(images), wanted, drawn, decibels)
        path = np.stack([swing(np.asarray(poses, np.float64), _FRAMES) for poses in cameras.poses])
        frames = []
        for start in range(0, _FRAMES, _FRAMES_AT_ONCE):
            poses = jnp.asarray(path[:, start : start + _FRAMES_AT_ONCE], jnp.float32)
            lens = jnp.broadcast_to(cameras.intrinsics[:, :1], (*poses.shape[:2], 4))
            frames.append(np.asarray(render(model, states, Cameras(lens, poses))))
        turning = np.moveaxis(np.concatenate(frames, axis=1), 1, 0)
        return [strip, draw_turntable(workdir / "turntable.gif", turning)]


def split_views(batch: Any, inputs: int) -> tuple[jax.Array, Cameras, jax.Array, Cameras]:
    """Cuts a batch's views into given and wanted ones, and scales bytes to [0, 1].

    Args:
      batch: images uint8 [B, V, H, W, 3], intrinsics [B, V, 4], poses [B, V, 4, 4].
      inputs: how many of the V views are given.

    Returns:
      (images float32, their cameras, wanted images, their cameras).
    """
    images = jnp.asarray(batch["images"], jnp.float32) / 255
    cameras = Cameras(jnp.asarray(batch["intrinsics"]), jnp.asarray(batch["poses"]))
    # Each device has all views of its scenes; without a word the compiler would cut them before
    # they are parted, and then move them.
    def part(x, views):
        return constrain(x[:, views], ("batch", *(None,) * (x.ndim - 1)))

    given, wanted = (
        jax.tree.map(lambda x, views=views: part(x, views), (images, cameras))
        for views in (slice(inputs), slice(inputs, None))
    )
    return *given, *wanted


@functools.cache
def _eval_step(mesh: Mesh, inputs: int, lpips_file: str) -> Any:
    """Compiles the scores of each row; the result is whole on every process."""
    weights = load_lpips(lpips_file) if lpips_file else None

    def eval_step(graphdef, params, buffers, batch):
        images, cameras, target_images, targets = split_views(batch, inputs)
        answers = trivial_answers(images, cameras.poses, targets.poses)
        answers["model"] = nnx.merge(graphdef, params, buffers)(images, cameras, targets)
        scores = {}
        for name, answer in answers.items():
            scores[f"{name}_psnr"] = jnp.mean(psnr(answer, target_images), axis=1)
            scores[f"{name}_ssim"] = jnp.mean(ssim(answer, target_images), axis=1)
            if weights is not None:
                scores[f"{name}_lpips"] = jnp.mean(lpips(weights, answer, target_images), axis=1)
        return scores, batch["scenes"], batch["weights"]

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        eval_step,
        static_argnums=0,
        out_shardings=whole,
        compiler_options=compat.program_options(),
    )
