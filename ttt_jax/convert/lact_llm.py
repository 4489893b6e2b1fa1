"""LaCT-LLM: names and configuration of the official ``LaCTForCausalLM``.

Source: github.com/a1600012888/LaCT, ``lact_llm/lact_model``.
"""

import math
from collections.abc import Mapping
from typing import Any

from ttt_jax.convert.tables import Entry, Table, linear, nested, swapped, vector
from ttt_jax.models.lact_llm import LactLLMConfig

# Fields of the official configuration that must have the value that this project implements.
_FIXED = {
    "lr_dim": 1,
    "qkv_silu": True,
    "lr_parameterization": "mamba",
    "ttt_loss_type": "dot_product",
    "elementwise_affine": True,
}
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "window_size",
    "rope_theta",
    "qkv_bias",
    "initializer_range",
    "use_momentum",
)
_OTHER_NAME = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attn_heads",
    "num_fast_heads": "num_lact_heads",
    "chunk_size": "lact_chunk_size",
    "qk_norm": "attn_qk_norm",
    "norm_epsilon": "norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "use_newton_schulz": "use_muon",
    "learned_scale": "learnable_ttt_scale",
}
_DEFAULTS = dict(
    vocab_size=32000,
    hidden_size=2048,
    num_hidden_layers=24,
    num_attn_heads=32,
    num_lact_heads=4,
    window_size=2048,
    lact_chunk_size=2048,
    rope_theta=10000.0,
    qkv_bias=False,
    attn_qk_norm=False,
    initializer_range=0.006,
    norm_eps=1e-6,
    tie_word_embeddings=False,
    use_momentum=True,
    use_muon=False,
    learnable_ttt_scale=True,
)


def config_fields(official: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `LactLLMConfig` that an official ``config.json`` decides.

    Args:
      official: what the file holds; a field that is missing takes the official default.

    Returns:
      Field name to value. Numerics (``dtype``, ``remat``, …) are not among them.

    Raises:
      ValueError: a field has a value that this project does not implement.

    Example:
      >>> fields = config_fields({"hidden_size": 64, "w0_w2_low_rank": 8, "ttt_prenorm": True})
      >>> fields["low_rank"], fields["weight_norm"], fields["num_attention_heads"]
      (8, 'pre', 32)
    """
    for name, value in _FIXED.items():
        if official.get(name, value) != value:
            raise ValueError(f"config.json: {name}={official[name]!r}; only {value!r} is supported")
    if official.get("hidden_act", "swish") not in ("swish", "silu"):
        raise ValueError(f"config.json: hidden_act={official['hidden_act']!r}; use 'swish'")
    known = _DEFAULTS | dict(official)
    fields = {name: known[name] for name in _SAME_NAME}
    fields |= {ours: known[theirs] for ours, theirs in _OTHER_NAME.items()}
    width = known["hidden_size"]
    size = official.get("intermediate_size")
    if size is None:
        size = int(width * (official.get("hidden_ratio") or 4) * 2 / 3)
        size = 256 * math.ceil(size / 256)
    return fields | {
        "variant": 0,
        "intermediate_size": size,
        "fast_hidden_multiple": float(official.get("inter_multi", 1)),
        "low_rank": max(official.get("w0_w2_low_rank", -1), 0),
        "weight_norm": "pre" if official.get("ttt_prenorm", False) else "post",
        "silu_values": not official.get("no_v_silu", False),
        "fast_rotary": not official.get("ttt_nope", False),
    }


def check(config: LactLLMConfig) -> None:
    """Raises ValueError where the official code has no such model."""
    plain = (config.variant, config.inner_steps, config.direction, config.query)
    if plain != (0, 1, "descent", "query"):
        raise ValueError(
            f"variant={config.variant}, inner_steps={config.inner_steps}, direction="
            f"{config.direction!r}, query={config.query!r}: the official code has variant=0, "
            "inner_steps=1, 'descent' and 'query' alone; give a run of these"
        )


def official_config(config: LactLLMConfig) -> dict[str, Any]:
    """The official ``config.json`` of a model.

    Args:
      config: of a model that passes `check`.

    Returns:
      What the file holds.

    Example:
      >>> from ttt_jax.models.lact_llm import preset
      >>> official_config(preset("760m"))["num_lact_heads"]
      4
    """
    fields = {name: getattr(config, name) for name in _SAME_NAME}
    fields |= {theirs: getattr(config, ours) for ours, theirs in _OTHER_NAME.items()}
    return fields | {
        "architectures": ["LaCTForCausalLM"],
        "model_type": "lact_swiglu",
        "intermediate_size": config.mlp_size(),
        "inter_multi": config.fast_hidden_multiple,
        "w0_w2_low_rank": config.low_rank or -1,
        "ttt_prenorm": config.weight_norm == "pre",
        "no_v_silu": not config.silu_values,
        "ttt_nope": not config.fast_rotary,
    }


def ignored(config: LactLLMConfig, name: str) -> bool:
    """Whether an official tensor holds nothing of its own: rotary frequencies, a tied head."""
    return name.endswith("inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def layer_table(fast_heads: int, rates: int = 3) -> Table:
    """The tensors of one ``LaCTSWIGLULayer``, by path in a `LactLayer`.

    Args:
      fast_heads: heads of the fast weights.
      rates: trained matrices, each with a rate a token.

    Returns:
      Official name to `Entry`.
    """
    shape = (fast_heads, rates)
    return {
        "w0": swapped(("branch", "weights", "w0")),
        "w2": swapped(("branch", "weights", "w2")),
        "w1": swapped(("branch", "weights", "w1")),
        # The official weights act from the left, so their left factor is our right one.
        **{
            f"{name}.w_{official}": swapped(("branch", "weights", f"{name}_{ours}"))
            for name in ("w0", "w2")
            for official, ours in (("left", "right"), ("right", "left"))
        },
        "qk_scale": swapped(("branch", "scale")),
        "qk_offset": swapped(("branch", "offset")),
        "qkv.weight": linear(*((name, "kernel") for name in ("query", "key", "value"))),
        "qkv.bias": vector(*((name, "bias") for name in ("query", "key", "value"))),
        "q_norm.weight": vector(("q_norm", "scale")),
        "k_norm.weight": vector(("k_norm", "scale")),
        "o_proj.weight": linear(("out", "kernel")),
        "lr_proj.weight": linear(("branch", "rate", "kernel"), out_shape=shape),
        "lr_proj.bias": vector(("branch", "rate", "bias"), shape=shape),
        "ttt_scale_proj.weight": linear(("branch", "output_scale", "kernel")),
        "ttt_scale_proj.bias": vector(("branch", "output_scale", "bias")),
        "ttt_norm.weight": vector(("branch", "norm", "scale")),
        "momentum_proj.0.weight": linear(("branch", "momentum", "kernel")),
        "momentum_proj.0.bias": vector(("branch", "momentum", "bias")),
    }


def table(config: LactLLMConfig) -> Table:
    """The tensors of ``LaCTForCausalLM``, by path in a `LactLLM` without `scan_layers`.

    Args:
      config: the model's configuration.

    Returns:
      Official name to `Entry`.

    Example:
      >>> from ttt_jax.models.lact_llm import preset
      >>> table(preset("tiny"))["lm_head.weight"].paths
      (('head', 'kernel'),)
    """
    block = {
        "attn_norm.weight": vector(("mixer_norm", "scale")),
        **nested(layer_table(config.num_fast_heads), "attn.", "mixer"),
        "mlp_norm.weight": vector(("mlp_norm", "scale")),
        **{f"mlp.{n}_proj.weight": linear(("mlp", n, "kernel")) for n in ("gate", "up", "down")},
    }
    found = {"model.embeddings.weight": Entry((("embedding", "table"),))}
    for index in range(config.num_layers):
        found |= nested(block, f"model.layers.{index}.", "layers", index)
    found["model.norm.weight"] = vector(("norm", "scale"))
    found["lm_head.weight"] = linear(("head", "kernel"))
    return found
