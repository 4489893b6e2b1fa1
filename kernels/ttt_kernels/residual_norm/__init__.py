"""A residual branch added to its stream, and the norm that the next branch reads."""

from ttt_kernels.residual_norm.api import add_branch, residual_norm

__all__ = ["add_branch", "residual_norm"]
