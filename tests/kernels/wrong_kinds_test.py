"""A value of a wrong kind for any argument of any operation is a ValueError that names it."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.wrong_kinds import check_argument
from ttt_kernels.bias_gelu import bias_gelu
from ttt_kernels.chunk_products import chunk_outputs, chunk_states, chunk_summaries
from ttt_kernels.delta_rule import delta_rule
from ttt_kernels.depthwise_conv import depthwise_conv
from ttt_kernels.fast_weight import fast_weight_apply, fast_weight_gradients, fast_weight_hidden
from ttt_kernels.glu_step import glu_step, glu_step_beside
from ttt_kernels.linear_attention import linear_attention
from ttt_kernels.newton_schulz import newton_schulz
from ttt_kernels.norm_parts import norm_parts
from ttt_kernels.residual_norm import add_branch, residual_norm


def _ones(*shape):
    return np.ones(shape, np.float32)


_TOKENS, _GATES, _STATE = _ones(1, 3, 1, 2), _ones(1, 3, 1), _ones(1, 1, 2, 2)
_IDS = np.zeros((1, 3), np.int32)
_QKV = dict(q=_TOKENS, k=_TOKENS, v=_TOKENS)
_FAST = dict.fromkeys(("w0", "w1", "w2"), _STATE)
_GLU = dict(weights=dict.fromkeys(("w1", "w2"), _ones(1, 2, 2)), scale=1.0, clip=True)
_BRANCH = dict(x=_ones(1, 2), branch=_ones(1, 2), branch_bias=_ones(2), factor=_ones(1))
_CASES = {
    bias_gelu: dict(x=_ones(2, 3), bias=_ones(3)),
    chunk_summaries: dict(k=_TOKENS, v=_TOKENS, chunk_size=2, rates=_GATES, dtype="float32"),
    chunk_outputs: dict(q=_TOKENS, states=_ones(1, 1, 2, 2, 2), chunk_size=2, transposed=False),
    chunk_states: dict(
        summaries=_ones(1, 1, 2, 2, 2), initial=_STATE, decay=_ones(1, 1, 2), include_own=False,
        dtype="float32",
    ),
    delta_rule: dict(
        **_QKV, beta=_GATES, log_decay=-_GATES, initial_state=_STATE, reset_state=_STATE,
        segment_ids=_IDS, chunk_size=2,
    ),
    depthwise_conv: dict(
        x=_ones(1, 2, 2, 1), kernel=_ones(9, 1), bias=_ones(1), stride=1, residual=False
    ),
    fast_weight_apply: dict(weights=_FAST, q=_STATE),
    fast_weight_hidden: dict(weights=_FAST, x=_TOKENS, rates=_GATES),
    fast_weight_gradients: dict(
        weights=_FAST, k=_STATE, error=_STATE, rates=_ones(1, 1, 2, 3), trained="all"
    ),
    glu_step: dict(**_GLU, **_QKV),
    glu_step_beside: dict(
        **_GLU, qkv=_ones(1, 3, 3, 2, 2), bias=_ones(3, 2, 2), beside=lambda a, q, k, v: q
    ),
    linear_attention: dict(
        **_QKV, log_decay=-_GATES, initial_state=_STATE, segment_ids=_IDS, causal="chunk",
        chunk_size=2, include_current_chunk=False,
    ),
    newton_schulz: dict(
        x=_ones(2, 2), coefficients=((3.4445, -4.7750, 2.0315),), eps=1e-7, dtype="float32"
    ),
    norm_parts: dict(x=_ones(1, 2), scales=_ones(1, 2), kinds=("rms",), size=2, epsilon=1e-6),
    residual_norm: dict(**_BRANCH, scale=_ones(2), bias=_ones(2), epsilon=1e-6),
    add_branch: _BRANCH,
}  # fmt: skip


@pytest.mark.parametrize(
    "operation, name", [(f, name) for f, kwargs in _CASES.items() for name in kwargs]
)
def test_a_wrong_kind_is_named(operation, name):
    arrays = {"arrays": ()} if operation is glu_step_beside else {}  # any pytree
    optional = isinstance(_CASES[operation][name], np.ndarray) or name == "dtype"
    optional = optional or (operation, name) == (delta_rule, "chunk_size")
    check_argument(operation, _CASES[operation] | arrays, name, none=not optional)


@pytest.mark.parametrize("name", ["x", "kernel"])
def test_arrays_without_numbers_of_floats_are_named(name):
    arguments = _CASES[depthwise_conv] | {name: jnp.ones(2, bool)}
    with pytest.raises(ValueError, match=f"{name} has dtype bool"):
        depthwise_conv(**arguments)
