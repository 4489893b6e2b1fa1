"""Norms and activations of the parts of rows that one product has made."""

from ttt_kernels.norm_parts.api import norm_parts

__all__ = ["norm_parts"]
