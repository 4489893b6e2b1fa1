"""Parameters of the official ViTTT code (PyTorch names and layouts) as paths in our modules.

An entry is a path and the two maps: an official array to ours, and one of ours back.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx


def _same(*path):
    return path, lambda w: w, lambda w: w


def _linear(*path):
    return path, lambda w: w.T, lambda w: w.T


def _conv(*path):
    """OIHW to HWIO."""
    return path, lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1)


def _depthwise(*path):
    """[channels, 1, 3, 3] to [9, channels]."""
    return path, lambda w: w.reshape(-1, 9).T, lambda w: w.T.reshape(-1, 1, 3, 3)


def _norm(name, *path):
    return {f"{name}.weight": _same(*path, "scale"), f"{name}.bias": _same(*path, "bias")}


def _split(joined, width):
    """Official rows q1 k1 v1 (width each), q2 k2 v2 (the rest) to [3, width + rest]."""
    cuts = np.cumsum([width] * 3)
    wide, narrow = np.split(joined, cuts)[:3], np.split(joined[cuts[-1] :], 3)
    return np.stack([np.concatenate(pair) for pair in zip(wide, narrow, strict=True)])


def _join(split, width):
    return np.concatenate([*split[:, :width], *split[:, width:]])


def block_entries(width, convolutional_mlp=False):
    """Official name -> entry for one block of ViTTT or H-ViTTT."""
    entries = {
        "cpe.weight": _depthwise("position", "kernel"),
        "cpe.bias": _same("position", "bias"),
        **_norm("norm1", "mixer_norm"),
        **_norm("norm2", "mlp_norm"),
        "attn.w1": (("mixer", "gated", "w1"), lambda w: w[0], lambda w: w[None]),
        "attn.w2": (("mixer", "gated", "w2"), lambda w: w[0], lambda w: w[None]),
        "attn.w3": (
            ("mixer", "local", "w"),
            lambda w: w.reshape(-1, 9, 1),
            lambda w: w.reshape(-1, 1, 3, 3),
        ),
        "attn.qkv.weight": (
            ("mixer", "qkv", "kernel"),
            lambda w: np.moveaxis(_split(w, width), -1, 0),
            lambda w: _join(np.moveaxis(w, 0, -1), width),
        ),
        "attn.qkv.bias": (
            ("mixer", "qkv", "bias"),
            lambda w: _split(w, width),
            lambda w: _join(w, width),
        ),
        "attn.proj.weight": _linear("mixer", "out", "kernel"),
        "attn.proj.bias": _same("mixer", "out", "bias"),
        "mlp.fc1.weight": _linear("mlp", "up", "kernel"),
        "mlp.fc1.bias": _same("mlp", "up", "bias"),
        "mlp.fc2.weight": _linear("mlp", "down", "kernel"),
        "mlp.fc2.bias": _same("mlp", "down", "bias"),
    }
    if convolutional_mlp:
        entries["mlp.dwc.weight"] = _depthwise("mlp", "conv", "kernel")
        entries["mlp.dwc.bias"] = _same("mlp", "conv", "bias")
    return entries


def _blocks(prefix, path, depth, entries):
    return {
        f"{prefix}.{index}.{name}": ((*path, "layers", index, *inside), *maps)
        for index in range(depth)
        for name, (inside, *maps) in entries.items()
    }


def _head():
    return {"head.weight": _linear("head", "kernel"), "head.bias": _same("head", "bias")}


def vittt_entries(config):
    """Official name -> entry for `VisionTransformer`, layers not scanned."""
    width, patch = config.hidden_size, config.patch_size
    embed = (
        ("patches", "kernel"),
        lambda w: w.transpose(2, 3, 1, 0).reshape(-1, width),
        lambda w: w.reshape(patch, patch, 3, width).transpose(3, 2, 0, 1),
    )
    return {
        "patch_embed.proj.weight": embed,
        "patch_embed.proj.bias": _same("patches", "bias"),
        **_blocks("blocks", ("blocks",), config.num_layers, block_entries(width)),
        **_norm("norm", "norm"),
        **_head(),
    }


def _batch_norm(name, *path):
    return _norm(name, *path) | {
        f"{name}.running_mean": _same(*path, "mean"),
        f"{name}.running_var": _same(*path, "variance"),
    }


def h_vittt_entries(config):
    """Official name -> entry for the hierarchical `ViTTT`, running statistics included."""
    entries = _batch_norm("norm", "norm") | _head()
    for index in range(5):
        name = f"patch_embed.conv.{index}"
        entries[f"{name}.conv.weight"] = _conv("stem", "convs", index, "kernel")
        entries |= _batch_norm(f"{name}.norm", "stem", "norms", index)
    for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
        blocks, path = block_entries(width, convolutional_mlp=True), ("stages", stage)
        entries |= _blocks(f"layers.{stage}.blocks", path, depth, blocks)
        name, path = f"layers.{stage}.downsample.conv", ("downsamples", stage)
        entries[f"{name}.0.conv.weight"] = _conv(*path, "up", "kernel")
        entries[f"{name}.0.conv.bias"] = _same(*path, "up", "bias")
        entries[f"{name}.1.conv.weight"] = _depthwise(*path, "conv", "kernel")
        entries[f"{name}.1.conv.bias"] = _same(*path, "conv", "bias")
        entries[f"{name}.2.conv.weight"] = _conv(*path, "down", "kernel")
        entries[f"{name}.2.conv.bias"] = _same(*path, "down", "bias")
        entries |= _batch_norm(f"{name}.2.norm", *path, "norm")
    return entries


def load(abstract, entries, arrays, dtype) -> nnx.State:
    """The state of a module, every array of it from an official one.

    Args:
      abstract: the module, from `nnx.eval_shape`.
      entries: official name -> entry.
      arrays: official name -> array, all of which must be used.
      dtype: of the state.
    """
    flat = dict(nnx.to_flat_state(nnx.state(abstract)))
    missing = set(flat)
    for name, value in arrays.items():
        path, ours, _ = entries[name]
        value = np.ascontiguousarray(ours(value))
        assert flat[path].shape == value.shape, (name, value.shape, flat[path].shape)
        flat[path] = flat[path].replace(jnp.asarray(value, dtype))
        missing.remove(path)
    assert not missing, f"not in the official code: {missing}"
    return nnx.from_flat_state(list(flat.items()))


def official(gradients: nnx.State, entries) -> dict[str, np.ndarray]:
    """Arrays of a state by official name, in the official layout."""
    flat = dict(nnx.to_flat_state(gradients))
    return {n: back(np.asarray(flat[p][...])) for n, (p, _, back) in entries.items() if p in flat}
