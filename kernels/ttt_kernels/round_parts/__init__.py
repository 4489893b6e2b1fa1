"""Matrices of float32 and their parts rounded to bfloat16, many in one pass."""

from ttt_kernels.round_parts.api import round_parts

__all__ = ["round_parts"]
