"""Layers: flax nnx modules that project, run the inner loop or attention, and project back."""
