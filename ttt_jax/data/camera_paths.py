"""A closed path of cameras around what given cameras look at, for turntables."""

import numpy as np

from ttt_jax.data.scenes import look_at

_ROUND = 2 * np.pi / 3  # cameras farther than this from their mean azimuth: all the way round
_UPWARD = 0.01  # weight of the images' own upward direction
_PRIOR = 1e-3  # weight of the prior on the focus, against parallel optical axes


def focus_of(poses: np.ndarray) -> np.ndarray:
    """The point that is nearest to all optical axes, by least squares.

    Axes that are nearly parallel meet nowhere; a weak prior then puts the focus in front of the
    cameras, as far as they lie apart.

    Args:
      poses: [n, 4, 4], camera to world.

    Returns:
      [3].

    >>> poses = look_at(np.array([[3.0, 0, 1], [0, 3.0, 1]]), np.array([0.0, 0.0, 0.5]))
    >>> focus_of(poses).round(2).tolist()
    [0.0, 0.0, 0.5]
    """
    centres, forward = poses[:, :3, 3], poses[:, :3, 2]
    spread = np.linalg.norm(centres - centres.mean(0), axis=-1).max()
    guess = centres.mean(0) + max(spread, 1e-3) * forward.mean(0)
    across = np.eye(3) - forward[:, :, None] * forward[:, None, :]
    matrix = across.sum(0) + _PRIOR * np.eye(3)
    return np.linalg.solve(matrix, np.einsum("nij,nj->i", across, centres) + _PRIOR * guess)


def up_of(poses: np.ndarray) -> np.ndarray:
    """The direction that is up: level cameras have their x axes across it.

    The unit vector u that minimises mean((x_i · u)²) − 0.01 (y̅ · u)², y̅ the mean upward axis of the
    images, which decides the sign, and the direction where all x axes are alike.

    Args:
      poses: [n, 4, 4], camera to world.

    Returns:
      [3].

    >>> poses = look_at(np.array([[3.0, 0, 1], [0, 3.0, 2]]), np.array([0.0, 0.0, 0.5]))
    >>> bool(up_of(poses)[2] > 0.999)
    True
    """
    right, upward = poses[:, :3, 0], -poses[:, :3, 1].mean(0)
    matrix = right.T @ right / len(poses) - _UPWARD * np.outer(upward, upward)
    up = np.linalg.eigh(matrix)[1][:, 0]
    return up * np.sign(up @ upward)


def swing(poses: np.ndarray, frames: int) -> np.ndarray:
    """Cameras that swing about the focus of given ones, or go round it where those do.

    Height and distance are the means of the given cameras'; the swing reaches as far as the one
    farthest from their mean azimuth.

    Args:
      poses: [n, 4, 4], camera to world, n >= 1.
      frames: number of cameras.

    Returns:
      [frames, 4, 4]; the path is closed: the first follows the last.

    >>> poses = look_at(np.array([[3.0, 0, 1], [0, 3.0, 1]]), np.array([0.0, 0.0, 0.5]))
    >>> swing(poses, 4)[:, 2, 3].round(1).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    focus = focus_of(poses)
    up = up_of(poses)
    offsets = poses[:, :3, 3] - focus
    heights = offsets @ up
    flat = offsets - heights[:, None] * up
    first = flat.mean(0)
    if np.linalg.norm(first) < 0.1 * np.linalg.norm(flat, axis=-1).mean():
        first = flat[0]  # cameras all around have no mean azimuth
    first = first / np.linalg.norm(first)
    second = np.cross(up, first)
    reach = np.abs(np.arctan2(flat @ second, flat @ first)).max()
    turn = 2 * np.pi * np.arange(frames) / frames
    azimuth = turn if reach > _ROUND else reach * np.sin(turn)
    ring = np.cos(azimuth)[:, None] * first + np.sin(azimuth)[:, None] * second
    radius = np.linalg.norm(flat, axis=-1).mean()
    return look_at(focus + radius * ring + heights.mean() * up, focus, up)
