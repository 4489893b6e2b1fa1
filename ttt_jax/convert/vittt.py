"""ViTTT and H-ViTTT: names of the official ``VisionTransformer`` and hierarchical ``ViTTT``.

Source: github.com/LeapLabTHU/ViTTT, ``vittt/models``.
"""

import numpy as np

from ttt_jax.convert.tables import Entry, Path, Table, linear, nested, vector
from ttt_jax.models.h_vittt import HViTTTConfig
from ttt_jax.models.vittt import ViTTTConfig

STEM_CONVOLUTIONS = 5


def check(config: ViTTTConfig | HViTTTConfig) -> None:
    """Raises ValueError where the official code has no such model."""
    direction = getattr(config, "direction", "descent")
    query = getattr(config, "query", "query")
    if (config.variant, direction, query) != (0, "descent", "query"):
        raise ValueError(
            f"variant={config.variant}, {direction=}, {query=}: the official code has variant=0, "
            "'descent' and 'query' alone; give a run of these"
        )


def ignored(config: ViTTTConfig | HViTTTConfig, name: str) -> bool:
    """Whether an official tensor holds nothing of its own: counts of batches, rotary tables."""
    return name.endswith(("num_batches_tracked", "rotations"))


def table(config: ViTTTConfig | HViTTTConfig) -> Table:
    """All tensors of a model, running statistics included, by path without `scan_layers`.

    Args:
      config: the model's configuration.

    Returns:
      Official name to `Entry`.

    Example:
      >>> from ttt_jax.models.vittt import preset
      >>> table(preset("tiny"))["blocks.0.attn.w1"].paths
      (('blocks', 'layers', 0, 'mixer', 'gated', 'w1'),)
    """
    if isinstance(config, HViTTTConfig):
        return _hierarchical(config)
    width, patch = config.hidden_size, config.patch_size

    def flat(w: np.ndarray) -> np.ndarray:
        return w.transpose(2, 3, 1, 0).reshape(-1, width)

    def square(w: np.ndarray) -> np.ndarray:
        return w.reshape(patch, patch, 3, width).transpose(3, 2, 0, 1)

    found = {
        "patch_embed.proj.weight": Entry((("patches", "kernel"),), flat, square),
        "patch_embed.proj.bias": vector(("patches", "bias")),
    }
    for index in range(config.num_layers):
        found |= nested(block_table(width), f"blocks.{index}.", "blocks", "layers", index)
    return found | _norm("norm", "norm") | _head()


def block_table(width: int) -> Table:
    """The tensors of one block, with those of H-ViTTT's convolutional MLP.

    Args:
      width: of the model.

    Returns:
      Official name to `Entry`.
    """
    return {
        "cpe.weight": _depthwise(("position", "kernel")),
        "cpe.bias": vector(("position", "bias")),
        **_norm("norm1", "mixer_norm"),
        "attn.w1": _without_first_axis(("mixer", "gated", "w1")),
        "attn.w2": _without_first_axis(("mixer", "gated", "w2")),
        "attn.w3": Entry(
            (("mixer", "local", "w"),),
            lambda w: w.reshape(-1, 9, 1),
            lambda w: w.reshape(-1, 1, 3, 3),
        ),
        "attn.qkv.weight": Entry(
            (("mixer", "qkv", "kernel"),),
            lambda w: np.moveaxis(_by_part(w, width), -1, 0),
            lambda w: _by_branch(np.moveaxis(w, 0, -1), width),
        ),
        "attn.qkv.bias": Entry(
            (("mixer", "qkv", "bias"),),
            lambda w: _by_part(w, width),
            lambda w: _by_branch(w, width),
        ),
        **_linear("attn.proj", "mixer", "out"),
        **_norm("norm2", "mlp_norm"),
        **_linear("mlp.fc1", "mlp", "up"),
        "mlp.dwc.weight": _depthwise(("mlp", "conv", "kernel")),
        "mlp.dwc.bias": vector(("mlp", "conv", "bias")),
        **_linear("mlp.fc2", "mlp", "down"),
    }


def _hierarchical(config: HViTTTConfig) -> Table:
    found: dict[str, Entry] = {}
    for index in range(STEM_CONVOLUTIONS):
        name = f"patch_embed.conv.{index}"
        found[f"{name}.conv.weight"] = _convolution(("stem", "convs", index, "kernel"))
        found |= _batch_norm(f"{name}.norm", "stem", "norms", index)
    down = {
        "0.conv.weight": _convolution(("up", "kernel")),
        "0.conv.bias": vector(("up", "bias")),
        "1.conv.weight": _depthwise(("conv", "kernel")),
        "1.conv.bias": vector(("conv", "bias")),
        "2.conv.weight": _convolution(("down", "kernel")),
        "2.conv.bias": vector(("down", "bias")),
        **_batch_norm("2.norm", "norm"),
    }
    for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        for index in range(depth):
            name, path = f"layers.{stage}.blocks.{index}.", ("stages", stage, "layers", index)
            found |= nested(block_table(width), name, *path)
        if stage + 1 < len(config.widths):
            found |= nested(down, f"layers.{stage}.downsample.conv.", "downsamples", stage)
    return found | _batch_norm("norm", "norm") | _head()


def _by_part(joined: np.ndarray, width: int) -> np.ndarray:
    """Official rows q1 k1 v1 (``width`` each) q2 k2 v2 (the rest) to ``[3, width + rest, …]``."""
    wide, narrow = np.split(joined[: 3 * width], 3), np.split(joined[3 * width :], 3)
    return np.stack([np.concatenate(pair) for pair in zip(wide, narrow, strict=True)])


def _by_branch(parts: np.ndarray, width: int) -> np.ndarray:
    """The inverse of ``_by_part``."""
    return np.concatenate([*parts[:, :width], *parts[:, width:]])


def _without_first_axis(path: Path) -> Entry:
    return Entry((path,), lambda w: w[0], lambda w: w[None])


def _convolution(path: Path) -> Entry:
    """OIHW to HWIO."""
    return Entry(
        (path,), lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1)
    )


def _depthwise(path: Path) -> Entry:
    """``[channels, 1, 3, 3]`` to ``[9, channels]``."""
    return Entry((path,), lambda w: w.reshape(-1, 9).T, lambda w: w.T.reshape(-1, 1, 3, 3))


def _linear(name: str, *path: str) -> Table:
    return {
        f"{name}.weight": linear((*path, "kernel")),
        f"{name}.bias": vector((*path, "bias")),
    }


def _norm(name: str, *path: str | int) -> Table:
    return {
        f"{name}.weight": vector((*path, "scale")),
        f"{name}.bias": vector((*path, "bias")),
    }


def _batch_norm(name: str, *path: str | int) -> Table:
    return {
        **_norm(name, *path),
        f"{name}.running_mean": vector((*path, "mean")),
        f"{name}.running_var": vector((*path, "variance")),
    }


def _head() -> Table:
    return _linear("head", "head")
