"""Layers: flax nnx modules that project, run the inner loop or attention, and project back.

``InnerLoopLayer`` is the one for a model of one's own: any ``InnerLoop`` as a token mixer.
"""

from ttt_jax.layers.inner_loop_layer import InnerLoopLayer

__all__ = ["InnerLoopLayer"]
