"""Parameters of the official LaCT-NVS code (PyTorch names and layouts) as paths in our modules."""

import jax.numpy as jnp
import numpy as np
from flax import nnx


def _linear(path, *shape):
    """[out, in] <-> [in, *shape], where the output axes may be several."""

    def ours(w):
        return w.T.reshape(w.shape[1], *shape) if shape else w.T

    return path, ours, lambda g: g.reshape(g.shape[0], -1).T


def _same(path, *shape):
    return path, lambda w: w.reshape(shape or w.shape), lambda g: g.reshape(-1) if shape else g


def ttt_entries(size, heads):
    """Official name -> (path, to ours, back) for one `FastWeightGluMLPMultihead`."""
    return {
        **{name: _same(("weights", name)) for name in ("w0", "w1", "w2")},
        "to_qkv.weight": _linear(("qkv", "kernel"), 3, size),
        "c_proj.weight": _linear(("out", "kernel")),
        "lr_fc.weight": _linear(("rate", "kernel"), 3, heads),
        "lr_fc.bias": _same(("rate", "bias"), 3, heads),
        "o_norm.weight": _same(("norm", "scale")),
    }


def model_entries(layers, size, heads):
    """Official name -> (path, to ours, back) for `LaCTLVSM`, layers not scanned."""
    entries = {
        "input_linear.weight": _linear(("embed", "kernel")),
        "input_layernorm.weight": _same(("embed_norm", "scale")),
        "image_token_decoder.0.weight": _same(("norm", "scale")),
        "image_token_decoder.1.weight": _linear(("head", "kernel")),
    }
    inside = {
        "0.ln.weight": _same(("attention_norm", "scale")),
        "0.f.to_qkv.weight": _linear(("attention", "qkv", "kernel"), 3, size),
        "0.f.c_proj.weight": _linear(("attention", "out", "kernel")),
        "0.f.q_norm.weight": _same(("attention", "q_norm", "scale")),
        "0.f.k_norm.weight": _same(("attention", "k_norm", "scale")),
        "1.ln.weight": _same(("ttt_norm", "scale")),
        "2.ln.weight": _same(("mlp_norm", "scale")),
        "2.f.c_fc.weight": _linear(("mlp", "up", "kernel")),
        "2.f.c_proj.weight": _linear(("mlp", "down", "kernel")),
    }
    for name, (path, *maps) in ttt_entries(size, heads).items():
        inside[f"1.f.{name}"] = (("ttt", *path), *maps)
    for index in range(layers):
        for name, (path, *maps) in inside.items():
            entries[f"blocks.{index}.module_list.{name}"] = (("layers", index, *path), *maps)
    return entries


def load(abstract, entries, params, dtype) -> nnx.State:
    """The parameters of a module, all of them from the official ones and none left over.

    Args:
      abstract: the module, from `nnx.eval_shape`.
      entries: of `ttt_entries` or `model_entries`.
      params: official name -> array.
      dtype: of the parameters.
    """
    flat = dict(nnx.to_flat_state(nnx.state(abstract, nnx.Param)))
    missing = set(flat)
    for name, value in params.items():
        path, ours, _ = entries[name]
        value = ours(value)
        assert flat[path].shape == value.shape, (name, value.shape, flat[path].shape)
        flat[path] = flat[path].replace(jnp.asarray(value, dtype))
        missing.remove(path)
    assert not missing, f"parameters that the official code does not have: {missing}"
    return nnx.from_flat_state(list(flat.items()))


def official_gradients(gradients: dict, entries):
    """Gradients, nested dicts as of `nnx.to_pure_dict`, by official name in the official layout."""
    out = {}
    for name, (path, _, back) in entries.items():
        leaf = gradients
        for part in path:
            leaf = leaf[part]
        out[name] = back(np.asarray(leaf))
    return out
