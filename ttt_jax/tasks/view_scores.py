"""PSNR and SSIM of rendered views, the trivial answers beside them, and sums over scenes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax.tasks.base import Result

_WINDOW, _SIGMA = 11, 1.5  # of SSIM's Gaussian, in pixels
_C1, _C2 = 0.01**2, 0.03**2
_LEAST_ERROR = 1e-10  # mean square error of an exact rendering: 100 dB, so that means stay finite
ANSWERS = ("model", "mean_colour", "nearest_view")
SCORES = ("psnr", "ssim", "lpips")


def psnr(images: jax.Array, references: jax.Array) -> jax.Array:
    """Peak signal-to-noise ratio, −10 log10 of the mean square error, in dB; at most 100.

    Args:
      images: [..., height, width, 3] in [0, 1], float.
      references: the same.

    Returns:
      [...].

    >>> round(float(psnr(jnp.zeros((4, 4, 3)), jnp.full((4, 4, 3), 0.1))), 3)
    20.0
    """
    error = jnp.mean(jnp.square(images - references), axis=(-3, -2, -1))
    return -10 * jnp.log10(jnp.maximum(error, _LEAST_ERROR))


def ssim(images: jax.Array, references: jax.Array) -> jax.Array:
    """Mean structural similarity over the windows that lie inside, and over channels.

    (2 μx μy + c1)(2 σxy + c2) / ((μx² + μy² + c1)(σx² + σy² + c2)) with moments under a Gaussian of
    11 × 11 pixels, σ = 1.5, c1 = 0.01², c2 = 0.03². In smaller images the window is as large as
    the shorter side. Source: Wang et al. 2004, eq. 13.

    Args:
      images: [..., height, width, channels] in [0, 1], float.
      references: the same.

    Returns:
      [...], at most 1.

    >>> x = jnp.linspace(0, 1, 16 * 16 * 3).reshape(16, 16, 3)
    >>> round(float(ssim(x, x)), 5)
    1.0
    """
    size = min(_WINDOW, *images.shape[-3:-1])
    offsets = np.arange(size) - (size - 1) / 2
    taps = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    taps = (taps / taps.sum()).tolist()

    def mean(x):
        for axis in (-3, -2):
            count = x.shape[axis] - size + 1
            parts = (jax.lax.slice_in_dim(x, i, i + count, axis=axis % x.ndim) for i in range(size))
            x = sum(tap * part for tap, part in zip(taps, parts, strict=True))
        return x

    mean_x, mean_y = mean(images), mean(references)
    variance_x = mean(images * images) - mean_x**2
    variance_y = mean(references * references) - mean_y**2
    covariance = mean(images * references) - mean_x * mean_y
    top = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    bottom = (mean_x**2 + mean_y**2 + _C1) * (variance_x + variance_y + _C2)
    return jnp.mean(top / bottom, axis=(-3, -2, -1))


def trivial_answers(
    images: jax.Array, poses: jax.Array, target_poses: jax.Array
) -> dict[str, jax.Array]:
    """What needs no model: the inputs' mean colour, and the input view of the nearest camera.

    Args:
      images: [batch, views, height, width, 3], the input views.
      poses: [batch, views, 4, 4], their cameras.
      target_poses: [batch, targets, 4, 4]; nearest by the distance of the centres.

    Returns:
      name -> [batch, targets, height, width, 3].
    """
    targets = target_poses.shape[1]
    mean = jnp.mean(images, axis=(1, 2, 3), keepdims=True)
    distance = target_poses[:, :, None, :3, 3] - poses[:, None, :, :3, 3]
    nearest = jnp.argmin(jnp.sum(jnp.square(distance), -1), axis=-1)
    return {
        "mean_colour": jnp.broadcast_to(mean, (*images.shape[:1], targets, *images.shape[2:])),
        "nearest_view": jnp.take_along_axis(images, nearest[..., None, None, None], axis=1),
    }


class ViewScores:
    """Sums of scores by scene, on the host."""

    def __init__(self, names: Sequence[str]):
        """Begins with no example.

        Args:
          names: of the scenes of the examples, by the example's number; may repeat.
        """
        self._names = names
        self._rows: list[tuple[str, dict[str, float]]] = []
        self._unreadable = 0

    def add(self, scores: dict[str, np.ndarray], scenes: np.ndarray, weights: np.ndarray) -> None:
        """Adds a batch.

        Args:
          scores: "ANSWER_psnr", "ANSWER_ssim" and, where it is computed, "ANSWER_lpips" ->
            [batch], means over an example's views.
          scenes: [batch], numbers of the examples; -1 for a row that only fills the batch.
          weights: [batch]; rows of weight 0 are left out.
        """
        self._unreadable += int(np.sum((weights == 0) & (scenes >= 0)))
        for row in np.flatnonzero(weights > 0):
            values = {name: float(value[row]) for name, value in scores.items()}
            self._rows.append((self._names[int(scenes[row])], values))

    def result(self) -> Result:
        """Returns the means over scenes, each scene's own mean counting once.

        Raises:
          ValueError: no example was added.
        """
        if not self._rows:
            raise ValueError("no held-out scene could be read, so there is nothing to evaluate")
        by_scene: dict[str, list[dict[str, float]]] = {}
        for name, values in self._rows:
            by_scene.setdefault(name, []).append(values)
        scenes = {
            name: {key: float(np.mean([r[key] for r in rows])) for key in rows[0]}
            for name, rows in by_scene.items()
        }
        means = {key: float(np.mean([s[key] for s in scenes.values()])) for key in self._rows[0][1]}
        order = [f"{answer}_{score}" for score in SCORES for answer in ANSWERS]
        order = [key for key in order if key in means]
        metrics = {key.removeprefix("model_"): means[key] for key in order}
        metrics["unreadable"] = float(self._unreadable)
        missing = f", {self._unreadable} unreadable left out" if self._unreadable else ""
        lines = [f"{'scene':<32}  {'PSNR':>6}  {'SSIM':>6}  {'mean colour':>11}  nearest view"]
        for name, s in scenes.items():
            lines.append(
                f"{name[-32:]:<32}  {s['model_psnr']:>6.2f}  {s['model_ssim']:>6.3f}  "
                f"{s['mean_colour_psnr']:>11.2f}  {s['nearest_view_psnr']:>12.2f}"
            )
        lpips = f", LPIPS {metrics['lpips']:.3f}" if "lpips" in metrics else ""
        return Result(
            metrics=metrics,
            summary=f"held-out PSNR {metrics['psnr']:.2f} dB, SSIM {metrics['ssim']:.3f}{lpips} "
            f"over {len(scenes)} scenes{missing}; mean colour "
            f"{metrics['mean_colour_psnr']:.2f} dB, nearest input view "
            f"{metrics['nearest_view_psnr']:.2f} dB",
            table="\n".join(lines),
            details={"scenes": [{"name": name} | values for name, values in scenes.items()]},
        )
