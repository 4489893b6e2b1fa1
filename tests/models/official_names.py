"""Parameters of the official LaCT code (PyTorch names and layouts) as paths in our modules."""

import jax.numpy as jnp
import numpy as np
from flax import nnx


def _linear(path, out_shape=None):
    """[out, in] -> [in, *out_shape]."""

    def ours(w):
        return w.T if out_shape is None else w.T.reshape(w.shape[1], *out_shape)

    return path, ours, lambda g: g.reshape(g.shape[0], -1).T


def _same(path, shape=None):
    return path, lambda w: w if shape is None else w.reshape(shape), lambda g: g.reshape(-1)


def _swapped(path):
    def swap(w):
        return np.swapaxes(w, -1, -2)

    return path, swap, swap


def layer_entries(fast_heads, rates=3):
    """Official name -> (path, to ours, back) for one `LaCTSWIGLULayer`."""
    return {
        **{f"{n}.weight": _linear((n, "kernel")) for n in ("query", "key", "value")},
        "q_norm.weight": _same(("q_norm", "scale")),
        "k_norm.weight": _same(("k_norm", "scale")),
        "o_proj.weight": _linear(("out", "kernel")),
        "qk_scale": _swapped(("branch", "scale")),
        "qk_offset": _swapped(("branch", "offset")),
        "lr_proj.weight": _linear(("branch", "rate", "kernel"), (fast_heads, rates)),
        "lr_proj.bias": _same(("branch", "rate", "bias"), (fast_heads, rates)),
        "momentum_proj.0.weight": _linear(("branch", "momentum", "kernel")),
        "momentum_proj.0.bias": _same(("branch", "momentum", "bias")),
        "ttt_scale_proj.weight": _linear(("branch", "output_scale", "kernel")),
        "ttt_scale_proj.bias": _same(("branch", "output_scale", "bias")),
        "ttt_norm.weight": _same(("branch", "norm", "scale")),
        **{name: _swapped(("branch", "weights", name)) for name in ("w0", "w1", "w2")},
        # The official weights act from the left, so their left factor is our right one.
        **{
            f"{name}.w_{official}": _swapped(("branch", "weights", f"{name}_{ours}"))
            for name in ("w0", "w2")
            for official, ours in (("left", "right"), ("right", "left"))
        },
    }


def model_entries(layers, fast_heads):
    """Official name -> (path, to ours, back) for `LaCTForCausalLM`, layers not scanned."""
    entries = {
        "model.embeddings.weight": (("embedding", "table"), lambda w: w, lambda g: g),
        "model.norm.weight": _same(("norm", "scale")),
        "lm_head.weight": _linear(("head", "kernel")),
    }
    inside = {
        "attn_norm.weight": _same(("mixer_norm", "scale")),
        "mlp_norm.weight": _same(("mlp_norm", "scale")),
        **{f"mlp.{n}_proj.weight": _linear(("mlp", n, "kernel")) for n in ("gate", "up", "down")},
    }
    for name, (path, *maps) in layer_entries(fast_heads).items():
        inside[f"attn.{name}"] = (("mixer", *path), *maps)
    for index in range(layers):
        for name, (path, *maps) in inside.items():
            entries[f"model.layers.{index}.{name}"] = (("layers", index, *path), *maps)
    return entries


def split_qkv(params):
    """The official parameters with one weight each for queries, keys and values."""
    out = {}
    for name, value in params.items():
        if name.endswith("qkv.weight"):
            for part, weight in zip(("query", "key", "value"), np.split(value, 3), strict=True):
                out[name.replace("qkv", part)] = weight
        else:
            out[name] = value
    return out


def _join_qkv(gradients):
    out = {n: g for n, g in gradients.items() if not n.endswith(("key.weight", "value.weight"))}
    for name in [n for n in out if n.endswith("query.weight")]:
        parts = [gradients[name.replace("query", p)] for p in ("query", "key", "value")]
        out[name.replace("query", "qkv")] = np.concatenate(parts)
        del out[name]
    return out


def load(abstract, entries, params, dtype) -> nnx.State:
    """The parameters of a module, all of them from the official ones.

    Args:
      abstract: the module, from `nnx.eval_shape`.
      entries: from `layer_entries` or `model_entries`.
      params: official name -> array.
      dtype: of the parameters.
    """
    flat = dict(nnx.to_flat_state(nnx.state(abstract)))
    missing = set(flat)
    for name, value in split_qkv(params).items():
        path, ours, _ = entries[name]
        value = ours(value)
        if flat[path].shape != value.shape:
            raise AssertionError(f"{name}: {value.shape} for {path}, {flat[path].shape}")
        flat[path] = flat[path].replace(jnp.asarray(value, dtype))
        missing.remove(path)
    if missing:
        raise AssertionError(f"parameters that the official code does not have: {missing}")
    return nnx.from_flat_state(list(flat.items()))


def official_gradients(gradients: nnx.State, entries, params):
    """Gradients by official name, in the official layout."""
    flat = dict(nnx.to_flat_state(gradients))
    paths = {name: entries[name] for name in split_qkv(params)}
    return _join_qkv({n: back(np.asarray(flat[p][...])) for n, (p, _, back) in paths.items()})
