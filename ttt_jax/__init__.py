"""Test-time training layers, and the linear attention that they are.

``ttt`` runs any ``InnerLoop``; ``presets`` are the systems of the family; ``explain`` says whether
one is a linear attention and whether it runs in parallel.
"""

from ttt_jax.inner_loop import fast_nets, losses, presets
from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.explain import explain
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz, Span, WeightNorm
from ttt_jax.inner_loop.updates import State

__all__ = [
    "InnerLoop",
    "NewtonSchulz",
    "Span",
    "State",
    "WeightNorm",
    "explain",
    "fast_nets",
    "losses",
    "presets",
    "ttt",
]
