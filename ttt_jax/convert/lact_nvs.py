"""LaCT-NVS: names of the official ``LaCTLVSM``.

Source: github.com/a1600012888/LaCT, ``lact_nvs/model.py`` and ``lact_nvs/lact_ttt.py``.
"""

from ttt_jax.convert.tables import Entry, Table, linear, nested, vector
from ttt_jax.models.lact_nvs import LactNVSConfig


def check(config: LactNVSConfig) -> None:
    """Raises ValueError where the official code has no such model."""
    if config.variant != 0:
        raise ValueError(
            f"variant={config.variant}: the official code has variant=0 alone; give a run of it"
        )


def ignored(config: LactNVSConfig, name: str) -> bool:
    """Whether an official tensor holds nothing of its own: there is none."""
    return False


def layer_table(size: int, fast_heads: int) -> Table:
    """The tensors of one ``FastWeightGluMLPMultihead``, by path in a `ScheduledTTT`.

    Args:
      size: width of the model.
      fast_heads: heads of the fast weights; rates are in the order (matrix, head).

    Returns:
      Official name to `Entry`.
    """
    return {
        **{name: Entry((("weights", name),)) for name in ("w0", "w1", "w2")},
        "to_qkv.weight": linear(("qkv", "kernel"), out_shape=(3, size)),
        "c_proj.weight": linear(("out", "kernel")),
        "lr_fc.weight": linear(("rate", "kernel"), out_shape=(3, fast_heads)),
        "lr_fc.bias": vector(("rate", "bias"), shape=(3, fast_heads)),
        "o_norm.weight": vector(("norm", "scale")),
    }


def table(config: LactNVSConfig) -> Table:
    """The tensors of ``LaCTLVSM``, by path in a `LactNVS` without `scan_layers`.

    Args:
      config: the model's configuration.

    Returns:
      Official name to `Entry`.

    Example:
      >>> from ttt_jax.models.lact_nvs_config import preset
      >>> table(preset("tiny"))["blocks.1.module_list.1.f.w0"].paths
      (('layers', 1, 'ttt', 'weights', 'w0'),)
    """
    size = config.hidden_size
    attention = {
        "to_qkv.weight": linear(("qkv", "kernel"), out_shape=(3, size)),
        "c_proj.weight": linear(("out", "kernel")),
        "q_norm.weight": vector(("q_norm", "scale")),
        "k_norm.weight": vector(("k_norm", "scale")),
    }
    block = {
        "0.ln.weight": vector(("attention_norm", "scale")),
        **nested(attention, "0.f.", "attention"),
        "1.ln.weight": vector(("ttt_norm", "scale")),
        **nested(layer_table(size, config.num_fast_heads), "1.f.", "ttt"),
        "2.ln.weight": vector(("mlp_norm", "scale")),
        "2.f.c_fc.weight": linear(("mlp", "up", "kernel")),
        "2.f.c_proj.weight": linear(("mlp", "down", "kernel")),
    }
    found = {
        "input_linear.weight": linear(("embed", "kernel")),
        "input_layernorm.weight": vector(("embed_norm", "scale")),
    }
    for index in range(config.num_layers):
        found |= nested(block, f"blocks.{index}.module_list.", "layers", index)
    found["image_token_decoder.0.weight"] = vector(("norm", "scale"))
    found["image_token_decoder.1.weight"] = linear(("head", "kernel"))
    return found
