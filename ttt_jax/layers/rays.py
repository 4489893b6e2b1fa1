"""Cameras as rays, and images as patches: the tokens of a posed view.

A camera is a pinhole in OpenCV's convention: x to the right, y down, z forward. Pixel (i, j) of
row i and column j has its centre at (j + ½, i + ½).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttt_jax.layers.rms_norm import at_least_float32


class Cameras(NamedTuple):
    """Pinhole cameras, any number of leading axes.

    Attributes:
      intrinsics: [..., 4]: fx, fy, cx, cy in pixels of the image that the camera takes.
      poses: [..., 4, 4]: camera to world, a rotation and a translation; the translation's unit is
        that of the scene.
    """

    intrinsics: jax.Array
    poses: jax.Array


def camera_rays(cameras: Cameras, height: int, width: int):
    """The ray through each pixel's centre.

    d = R ((j + ½ − cx) / fx, (i + ½ − cy) / fy, 1), normalised; o = the camera's centre.

    Args:
      cameras: [...] cameras.
      height: rows of the image, in pixels.
      width: columns.

    Returns:
      (origins [..., height, width, 3] in the scene's unit, unit directions of the same shape), in
      at least float32.

    >>> cameras = Cameras(jnp.array([2.0, 2.0, 1.0, 1.0]), jnp.eye(4))
    >>> [round(float(x), 3) for x in camera_rays(cameras, 2, 2)[1][0, 0]]
    [-0.236, -0.236, 0.943]
    """
    dtype = at_least_float32(cameras.poses.dtype)
    intrinsics, poses = cameras.intrinsics.astype(dtype), cameras.poses.astype(dtype)
    fx, fy, cx, cy = jnp.moveaxis(intrinsics[..., None, None, :], -1, 0)
    x = (jnp.arange(width, dtype=dtype) + 0.5 - cx) / fx
    y = (jnp.arange(height, dtype=dtype)[:, None] + 0.5 - cy) / fy
    x, y = jnp.broadcast_arrays(x, y)
    local = jnp.stack([x, y, jnp.ones_like(x)], axis=-1)
    rotation = poses[..., None, None, :3, :3]
    # Three products and a sum each, written out: a matmul would be rounded on accelerators.
    directions = jnp.sum(rotation * local[..., None, :], axis=-1)
    directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
    origins = jnp.broadcast_to(poses[..., None, None, :3, 3], directions.shape)
    return origins, directions


def pluecker_rays(cameras: Cameras, height: int, width: int):
    """The nine numbers of each pixel's ray: o, d and o × d, the line's moment.

    Args:
      cameras: [...] cameras.
      height: rows of the image.
      width: columns.

    Returns:
      [..., height, width, 9], in at least float32.

    >>> pluecker_rays(Cameras(jnp.array([2.0, 2.0, 1.0, 1.0]), jnp.eye(4)), 2, 2).shape
    (2, 2, 9)
    """
    origins, directions = camera_rays(cameras, height, width)
    return jnp.concatenate([origins, directions, jnp.cross(origins, directions)], axis=-1)


def patchify(x, patch_size: int):
    """Cuts images into patches, row by row.

    Args:
      x: [..., height, width, channels].
      patch_size: p, divides height and width.

    Returns:
      [..., height/p · width/p, p · p · channels]; inside a patch the channel runs fastest, then
      the column.

    Raises:
      ValueError: if p does not divide the image.

    >>> patchify(jnp.arange(16).reshape(4, 4, 1), 2)[1].tolist()
    [2, 3, 6, 7]
    """
    *lead, height, width, channels = x.shape
    check_patches(height, width, patch_size)
    rows, columns = height // patch_size, width // patch_size
    x = x.reshape(*lead, rows, patch_size, columns, patch_size, channels)
    return jnp.swapaxes(x, -4, -3).reshape(*lead, rows * columns, -1)


def unpatchify(x, patch_size: int, height: int, width: int):
    """The inverse of `patchify`.

    Args:
      x: [..., height/p · width/p, p · p · channels].
      patch_size: p.
      height: rows of the image.
      width: columns.

    Returns:
      [..., height, width, channels].

    >>> x = jnp.arange(48).reshape(4, 4, 3)
    >>> bool((unpatchify(patchify(x, 2), 2, 4, 4) == x).all())
    True
    """
    check_patches(height, width, patch_size)
    rows, columns = height // patch_size, width // patch_size
    x = x.reshape(*x.shape[:-2], rows, columns, patch_size, patch_size, -1)
    return jnp.swapaxes(x, -4, -3).reshape(*x.shape[:-5], height, width, x.shape[-1])


def check_patches(height: int, width: int, patch_size: int) -> None:
    """Raises ValueError unless the patch size divides both sides of the image.

    >>> check_patches(32, 48, 8)
    """
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"an image of {height} x {width} pixels is not divisible by patch_size={patch_size}; "
            "resize or crop it to multiples of the patch"
        )
