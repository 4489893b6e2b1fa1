"""Linear attention: one public function, one file for each backend."""

from ttt_kernels.linear_attention.api import linear_attention

__all__ = ["linear_attention"]
