"""LPIPS: the distance of two images in the features of a VGG16, a measure and a loss.

The network's weights are not part of this project; they come from a file that the user makes:

    from ttt_jax.convert.files import read_tensors
    np.savez("lpips.npz", **read_tensors("vgg16-397923af.pth"), **read_tensors("vgg.pth"))

of torchvision's VGG16 and of the channel weights that the authors published (lpips/weights/v0.1).
"""

import os
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The convolutions of each of VGG16's blocks (Simonyan & Zisserman 2015, table 1, D), by their
# numbers in torchvision's `features`. The last output of each block, rectified, is compared.
BLOCKS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
_SMALLEST = 2 ** (len(BLOCKS) - 1)  # pixels a side that leave one behind the poolings

# The authors' scaling of pixels in [-1, 1], nearly that of ImageNet's statistics.
_SHIFT = np.array([-0.030, -0.088, -0.188], np.float32)
_SCALE = np.array([0.458, 0.448, 0.450], np.float32)
_EPSILON = 1e-10  # added to the norm of a pixel's features


class LPIPSWeights(NamedTuple):
    """What `lpips` needs, float32 and in blocks as in `BLOCKS`."""

    convolutions: tuple[tuple[tuple[np.ndarray, np.ndarray], ...], ...]  # [3, 3, in, out], [out]
    channels: tuple[np.ndarray, ...]  # [out] of each block's last


def load_lpips(path: str | os.PathLike[str]) -> LPIPSWeights:
    """Reads the weights.

    Args:
      path: an .npz file of torchvision's names, features.N.weight [out, in, 3, 3] and
        features.N.bias [out] (others are ignored), and of the authors' lin0.model.1.weight to
        lin4.model.1.weight [1, out, 1, 1]. Without the latter every channel counts 1, their
        baseline without learned weights.

    Returns:
      The weights.

    Raises:
      ValueError: there is no such file, a tensor is missing, or shapes do not fit; named.

    >>> load_lpips("nowhere.npz")
    Traceback (most recent call last):
    ...
    ValueError: lpips_file='nowhere.npz': no such file; ttt_jax.tasks.lpips says how to make it
    """
    if not os.path.isfile(path):
        found = "is a folder, no .npz file" if os.path.isdir(path) else "no such file"
        raise ValueError(f"lpips_file={str(path)!r}: {found}; {__name__} says how to make it")
    try:
        with np.load(path) as file:
            names = set(file.files)
            wanted = [f"features.{n}.{part}" for block in BLOCKS for n in block
                      for part in ("weight", "bias")]  # fmt: skip
            linear = [f"lin{i}.model.1.weight" for i in range(len(BLOCKS))]
            wanted += linear if names & set(linear) else []
            missing = [name for name in wanted if name not in names]
            if missing:
                raise ValueError(f"it has no {missing[0]!r}")
            tensors = {name: np.asarray(file[name], np.float32) for name in wanted}
        return _arrange(tensors, linear)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"lpips_file={str(path)!r} is no file of LPIPS weights ({error}); {__name__} says how "
            "to make one"
        ) from error


def _arrange(tensors: dict[str, np.ndarray], linear: list[str]) -> LPIPSWeights:
    """Checks the shapes and brings the axes into JAX's order."""
    blocks, channels, width = [], [], 3
    for index, block in enumerate(BLOCKS):
        pairs = []
        for number in block:
            name = f"features.{number}.weight"
            weight, bias = tensors[name], tensors[f"features.{number}.bias"]
            fits = weight.ndim == 4 and weight.shape[1:] == (width, 3, 3)
            if not fits or bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"{name} has shape {weight.shape} and its bias {bias.shape}; they must be "
                    f"(out, {width}, 3, 3) and (out,)"
                )
            width = weight.shape[0]
            pairs.append((weight.transpose(2, 3, 1, 0), bias))
        blocks.append(tuple(pairs))
        scale = tensors.get(linear[index], np.ones((1, width, 1, 1), np.float32))
        if scale.shape != (1, width, 1, 1):
            raise ValueError(f"{linear[index]} has shape {scale.shape}, not {(1, width, 1, 1)}")
        channels.append(scale.reshape(width))
    return LPIPSWeights(tuple(blocks), tuple(channels))


def lpips(weights: LPIPSWeights, images: jax.Array, references: jax.Array) -> jax.Array:
    """Σ_blocks mean_pixels Σ_c w_c (â_c − b̂_c)², a and b VGG16's features, â = a / |a|.

    Args:
      weights: of `load_lpips`.
      images: [..., height, width, 3] in [0, 1], float; sides of at least 16 pixels.
      references: the same.

    Returns:
      [...], float32, at least 0 for weights that are.

    Raises:
      ValueError: the images are too small for the network.

    Source: Zhang et al. 2018 (arXiv 1801.03924), eq. 1, and their code, version 0.1, "vgg".

    >>> widths = iter((3, *[4] * 12))
    >>> blocks = tuple(tuple((np.ones((3, 3, next(widths), 4)), np.ones(4)) for _ in block)
    ...                for block in BLOCKS)
    >>> weights = LPIPSWeights(blocks, (np.ones(4),) * 5)
    >>> x = jnp.ones((2, 16, 16, 3))
    >>> lpips(weights, x, x).tolist()
    [0.0, 0.0]
    """
    height, width = images.shape[-3:-1]
    if min(height, width) < _SMALLEST:
        raise ValueError(
            f"images has shape {images.shape}; LPIPS needs sides of at least {_SMALLEST} pixels"
        )
    lead = images.shape[:-3]
    both = jnp.stack([images, references]).astype(jnp.float32).reshape(-1, height, width, 3)
    x = (both * 2 - 1 - _SHIFT) / _SCALE
    total = jnp.zeros(both.shape[0] // 2, jnp.float32)
    for index, (block, scale) in enumerate(
        zip(weights.convolutions, weights.channels, strict=True)
    ):
        x = _pool(x) if index else x
        for kernel, bias in block:
            x = jax.nn.relu(_convolve(x, jnp.asarray(kernel, jnp.float32)) + bias)
        a, b = jnp.split(x / (_norm(x) + _EPSILON), 2)
        total += jnp.mean(jnp.sum(jnp.square(a - b) * scale, axis=-1), axis=(1, 2))
    return total.reshape(lead)


def _convolve(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x):
    """The largest of each 2 × 2 pixels; an odd last row or column is left out."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _norm(x):
    """The norm over the channels, with gradient 0 where all of them are 0."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
