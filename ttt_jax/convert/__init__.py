"""Weights of the official PyTorch code, both ways, without PyTorch."""

from ttt_jax.convert.workdir import export_weights, import_weights, load, save

__all__ = ["export_weights", "import_weights", "load", "save"]
