"""Delta rules and gated linear attention: one public function, one file for each backend."""

from ttt_kernels.delta_rule.api import delta_rule

__all__ = ["delta_rule"]
