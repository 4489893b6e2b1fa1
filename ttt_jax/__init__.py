"""Test-time training layers, and the linear attention that they are.

``ttt`` runs any ``InnerLoop``; ``presets`` are the systems of the family; ``explain`` says whether
one is a linear attention and whether it runs in parallel.
"""

import importlib.metadata

from ttt_jax.inner_loop import fast_nets, losses, presets
from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.explain import explain
from ttt_jax.inner_loop.linear_attention import NotReducibleError, linear_attention_form
from ttt_jax.inner_loop.linear_form import LinearAttentionForm
from ttt_jax.inner_loop.spec import InnerLoop, NewtonSchulz, Span, WeightNorm
from ttt_jax.inner_loop.updates import Buffer, State

try:
    __version__ = importlib.metadata.version("ttt-jax")
except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Buffer",
    "InnerLoop",
    "LinearAttentionForm",
    "NewtonSchulz",
    "NotReducibleError",
    "Span",
    "State",
    "WeightNorm",
    "explain",
    "fast_nets",
    "linear_attention_form",
    "losses",
    "presets",
    "ttt",
]
