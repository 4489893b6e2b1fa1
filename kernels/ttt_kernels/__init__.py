"""Kernels for linear attention and its relatives: JAX only, usable from any model.

Each operation is one folder with one file a backend; the function exported here is its public
face. Submodules are reached by `from ttt_kernels.<operation> import <module>`.
"""

from ttt_kernels.chunk_products import chunk_outputs, chunk_states, chunk_summaries
from ttt_kernels.delta_rule import delta_rule
from ttt_kernels.fast_weight import (
    fast_weight_apply,
    fast_weight_gradients,
    fast_weight_hidden,
)
from ttt_kernels.linear_attention import linear_attention
from ttt_kernels.newton_schulz import newton_schulz

__all__ = [
    "chunk_outputs", "chunk_states", "chunk_summaries", "delta_rule", "fast_weight_apply",
    "fast_weight_gradients", "fast_weight_hidden", "linear_attention", "newton_schulz",
]  # fmt: skip
