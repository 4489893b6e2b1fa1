"""The SwiGLU fast weight of LaCT: its application, and its gradients summed over tokens."""

from ttt_kernels.fast_weight.api import (
    fast_weight_apply,
    fast_weight_gradients,
    fast_weight_hidden,
)

__all__ = ["fast_weight_apply", "fast_weight_gradients", "fast_weight_hidden"]
