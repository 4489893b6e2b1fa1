"""A bias and a GELU in one pass, and their gradients in another."""

from ttt_kernels.bias_gelu.api import bias_gelu

__all__ = ["bias_gelu"]
