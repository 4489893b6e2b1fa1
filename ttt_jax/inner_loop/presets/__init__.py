"""Every system as one value of ``InnerLoop``; ``dataclasses.replace`` changes one part of it."""

from ttt_jax.inner_loop.presets.attention import gla, linear_attention, mamba2, retnet
from ttt_jax.inner_loop.presets.delta import deltanet, gated_deltanet, rwkv7
from ttt_jax.inner_loop.presets.lact import lact_llm, lact_nvs
from ttt_jax.inner_loop.presets.layers import ttt_linear, ttt_mlp
from ttt_jax.inner_loop.presets.memory import atlas, titans
from ttt_jax.inner_loop.presets.vision import vittt_dwconv, vittt_glu

__all__ = [
    "atlas",
    "deltanet",
    "gated_deltanet",
    "gla",
    "lact_llm",
    "lact_nvs",
    "linear_attention",
    "mamba2",
    "retnet",
    "rwkv7",
    "titans",
    "ttt_linear",
    "ttt_mlp",
    "vittt_dwconv",
    "vittt_glu",
]
