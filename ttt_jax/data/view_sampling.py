"""Which views make an example, and in which frame their cameras are given."""

import numpy as np

from ttt_jax.config_views import ViewsConfig
from ttt_jax.data.scene_sets import PosedScene


def centre_cameras(poses: np.ndarray, inputs: int) -> np.ndarray:
    """Expresses cameras in the mean frame of the first ones, the farthest at distance 1.

    The mean rotation is the one closest to the sum of all (by its singular vectors).

    Args:
      poses: [n, 4, 4], camera to world.
      inputs: how many of the first define the frame.

    Returns:
      [n, 4, 4]; the images of a scene moved and scaled alike are unchanged.

    >>> from ttt_jax.data.scenes import look_at
    >>> poses = look_at(np.array([[0.0, -3.0, 0.0], [0.0, -1.0, 0.0]]), np.array([0, 9.0, 0]))
    >>> centre_cameras(poses, 2)[:, 2, 3].tolist()
    [-1.0, 1.0]
    """
    u, _, vt = np.linalg.svd(poses[:inputs, :3, :3].sum(0))
    rotation = u @ np.diag([1, 1, np.linalg.det(u @ vt)]) @ vt
    offsets = poses[:, :3, 3] - poses[:inputs, :3, 3].mean(0)
    radius = np.linalg.norm(offsets[:inputs], axis=-1).max()
    out = poses.copy()
    out[:, :3, :3] = rotation.T @ poses[:, :3, :3]
    out[:, :3, 3] = offsets @ rotation / (radius if radius > 1e-6 else 1.0)
    return out


def draw_views(
    random: np.random.Generator, scene: PosedScene, config: ViewsConfig
) -> tuple[list[int], list[int]]:
    """Draws the views of an example: candidates in order, of which the first usable ones are taken.

    "random": any views. "nearest": a view is drawn, and it and the input_views + target_views − 1
    nearest to it (by camera centre) come first, in random order; the others follow by distance.

    Args:
      random: generator.
      scene: the scene.
      config: sampling, input_views and target_views are used.

    Returns:
      (candidates for the inputs, for the targets); a view may be in both, and is to be used once.
    """
    targets = random.permutation(scene.targets).tolist()
    inputs = random.permutation(scene.inputs).tolist()
    if config.sampling == "nearest":
        centres = scene.poses()[:, :3, 3]
        distance = np.linalg.norm(centres - centres[targets[0]], axis=-1)
        ranks = np.argsort(np.argsort(distance, kind="stable"), kind="stable")
        window = config.input_views + config.target_views - 1

        def beyond(view: int) -> int:
            return max(int(ranks[view]) - window, 0)

        targets, inputs = sorted(targets, key=beyond), sorted(inputs, key=beyond)
    return inputs, targets


def spread_views(poses: np.ndarray, views: list[int]) -> list[int]:
    """Orders views so that the first k are well spread, for every k: farthest point sampling.

    Args:
      poses: [n, 4, 4] of all views of a scene.
      views: some of their numbers; the first stays first.

    Returns:
      The same numbers, each as far as can be from those before it.

    >>> poses = np.tile(np.eye(4), (4, 1, 1)); poses[:, 0, 3] = [0, 1, 2, 3]
    >>> spread_views(poses, [0, 1, 2, 3])
    [0, 3, 1, 2]
    """
    centres = poses[views, :3, 3]
    nearest = np.full(len(views), np.inf)
    order = [0]
    for _ in range(len(views) - 1):
        nearest = np.minimum(nearest, np.linalg.norm(centres - centres[order[-1]], axis=-1))
        nearest[order] = -1
        order.append(int(np.argmax(nearest)))
    return [views[i] for i in order]
