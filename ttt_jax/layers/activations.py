"""Activations that keep their input alone for the backward pass.

Differentiated term by term, as JAX does by itself, a GELU keeps four arrays of its input's size
and rounds each to bfloat16. Here the backward pass starts from the input, in float32.
"""

from ttt_kernels.bias_gelu.xla import gelu
from ttt_kernels.norm_parts.xla import silu

__all__ = ["gelu", "silu"]
