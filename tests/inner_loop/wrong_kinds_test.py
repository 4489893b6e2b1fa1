"""A value of a wrong kind for an argument of a public function is a ValueError that names it."""

import dataclasses

import jax
import numpy as np
import pytest

import ttt_jax
from tests.wrong_kinds import check_argument
from ttt_jax import InnerLoop, NewtonSchulz, Span, WeightNorm, fast_nets, presets

_SPEC = presets.lact_llm(variant=2, chunk_size=2)
_KEY = jax.random.key(0)
_TOKENS, _GATES = np.ones((1, 3, 1, 2), np.float32), np.ones((1, 3, 1), np.float32)
_WEIGHTS = _SPEC.init(_KEY, heads=1, key_dim=2)
_CALL = dict(
    spec=_SPEC, weights=_WEIGHTS, q=_TOKENS, k=_TOKENS, v=_TOKENS, lr=_GATES[..., None],
    momentum=_GATES,
)  # fmt: skip


def _fields(part):
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _init(spec=_SPEC, **arguments):
    return spec.init(**arguments)


# Options and what else is None by default; a network's init_scale is checked with the whole.
_OPTIONAL = {"chunk_size", "window", "momentum", "orthogonalise", "weight_norm", "forget", "erase",
             "dtype", "value_dim", "hidden_dim", "muon_dtype"}  # fmt: skip
_MLP = {name: value for name, value in _fields(fast_nets.MLP()).items() if name != "init_scale"}
_CASES = {
    ttt_jax.ttt: _CALL | dict(mode="recurrent"),
    ttt_jax.linear_attention_form: _CALL,
    ttt_jax.explain: dict(spec=_SPEC),
    _init: dict(key=_KEY, heads=1, key_dim=2, value_dim=2, hidden_dim=2),
    InnerLoop: _fields(_SPEC),
    NewtonSchulz: _fields(NewtonSchulz()),
    WeightNorm: _fields(WeightNorm()),
    Span: _fields(Span(0, 1, True, True)),
    fast_nets.MLP: _MLP,
    fast_nets.Polynomial: dict(net=fast_nets.Linear(), degree=2),
    fast_nets.DepthwiseConv3x3: dict(height=2, width=2),
    presets.lact_llm: dict(variant=0, chunk_size=2),
    presets.lact_nvs: dict(entries=[(0, 1, True, True)], muon_steps=1, muon_dtype="bfloat16"),
    presets.titans: dict(depth=2, chunk_size=2),
    presets.atlas: dict(depth=2, degree=2, window=2, chunk_size=2, steps=1),
    presets.retnet: dict(heads=1),
    presets.vittt_glu: dict(variant=0),
    presets.vittt_dwconv: dict(height=2, width=2),
    presets.ttt_linear: dict(chunk_size=2),
    presets.ttt_mlp: dict(chunk_size=2),
}


@pytest.mark.parametrize(
    "function, name", [(f, name) for f, arguments in _CASES.items() for name in arguments]
)
def test_a_wrong_kind_is_named(function, name):
    check_argument(function, _CASES[function], name, none=name not in _OPTIONAL)


@pytest.mark.parametrize("name", ["momentum", "forget", "rate"])
def test_a_gate_is_no_empty_tuple(name):
    with pytest.raises(ValueError, match=rf"{name}=\(\)"):
        dataclasses.replace(_SPEC, **{name: ()})


def test_one_momentum_for_all_heads():
    with pytest.raises(ValueError, match=r"momentum=\(0.5,\): use a number from 0 to 1"):
        dataclasses.replace(_SPEC, momentum=(0.5,))
