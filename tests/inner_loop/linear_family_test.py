"""Linear attention and delta rules against fla's and Mamba's references, in every mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.golden_cases import Golden
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import losses, presets

# case: (preset, names of q, k, v, names of the gates, whether arrays are [batch, heads, time, ...])
SYSTEMS = {
    "linattn_linear_recurrent": (presets.linear_attention(), "q k v", {}, False),
    "linattn_simple_gla": (presets.gla(), "q k v", {"forget": "g"}, False),
    "linattn_gla": (presets.gla(), "q k v", {"forget": "gk"}, False),
    "linattn_retention": (presets.retnet(heads=2), "q k v", {}, True),
    "linattn_mamba2_ssd": (presets.mamba2(), "C B X", {"forget": "A"}, False),
    "linattn_delta_rule": (presets.deltanet(), "q k v", {"lr": "beta"}, True),
    "linattn_gated_delta_rule": (
        presets.gated_deltanet(),
        "q k v",
        {"lr": "beta", "forget": "g"},
        False,
    ),
    "linattn_rwkv7_dplr": (
        presets.rwkv7(),
        "q k v",
        {"forget": "gk", "erase": ("alpha", "beta")},
        True,
    ),
}


def _run(case, x, mode, implementation):
    """Output and final state in the layout of the golden file."""
    spec, names, gates, head_first = SYSTEMS[case.name]

    def turn(array):
        return jnp.swapaxes(array, 1, 2) if head_first else array

    q, k, v = (turn(x[name]) for name in names.split())
    q = q * q.shape[-1] ** -0.5 if case.hyper.get("scale") else q
    arguments = {}
    for name, source in gates.items():
        if name == "erase":
            arguments[name] = tuple(turn(x[part]) for part in source)
        else:
            arguments[name] = jnp.exp(turn(x[source])) if name == "forget" else turn(x[source])
    transposed = "initial_states" in x  # Mamba's state is [value, key]
    if transposed:
        start = x["initial_states"][:, 0].mT
        arguments["lr"] = jnp.ones(q.shape[:3], q.dtype)  # X and A are already multiplied by Δ
    else:
        zero = jnp.zeros((q.shape[0], 2, q.shape[3], v.shape[3]), q.dtype)
        start = x.get("initial_state", zero)
    out, state = ttt_jax.ttt(
        spec, {"w": start}, q, k, v, mode=mode, implementation=implementation, **arguments
    )
    final = state.weights["w"]
    return turn(out), final.mT if transposed else final


@pytest.mark.parametrize(
    "mode,tag",
    [
        ("recurrent", "f64"),
        ("parallel", "f64"),
        ("kernel", "f64"),
        ("kernel", "f32"),
        pytest.param("recurrent", "f32", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", SYSTEMS)
def test_family_is_the_official_code(name, mode, tag):
    """Output, final state and the gradient of every input."""
    case = Golden(name)
    dtype = {"f64": "float64", "f32": "float32"}[tag]
    implementation = "xla" if mode == "kernel" else None

    def loss(x):
        out, final = _run(case, x, mode, implementation)
        total = jnp.sum(out * case.arrays["cot/out"])
        if "cot/final_state" in case.arrays:
            total += jnp.sum(final * case.arrays["cot/final_state"])
        return total, (out, final)

    with jax.enable_x64(tag == "f64"):
        inputs = {k[3:]: jnp.asarray(x, dtype) for k, x in case.arrays.items() if k[:3] == "in/"}
        (_, (out, final)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
        case.check(f"{tag}/out", out)
        if f"{tag}/final_state" in case.arrays:
            case.check(f"{tag}/final_state", final)
        for key, gradient in gradients.items():
            assert np.any(np.asarray(gradient)), key
            case.check(f"{tag}/grad/{key}", gradient)


def _segments(time):
    """Documents with padding inside, one of a single token; one long document."""
    row = np.repeat(np.arange(4), [3, 1, 9, time])[:time]
    row[5] = -1
    return jnp.asarray(np.stack([row, np.full(time, 2)]), jnp.int32)


DELTA_RULES = {
    "forget_first": {"forget": "per_token", "forget_first": True},
    "forget_later": {"forget": "per_token", "loss": losses.Squared(scale=0.5)},
    "ascent_by_head": {"forget": (0.9, 0.7), "rate": 0.2, "direction": "ascent"},
    "value_minus_key": {"target": "value_minus_key"},
    "erase": {"loss": losses.DotProduct(), "erase": "per_token", "forget": "per_token"},
    "channel_gate": {"forget": "per_token", "loss": losses.DotProduct(scale=0.3)},
    "channel_gate_delta": {"forget": "per_token", "forget_first": True},
}


_ON_DEMAND = ("forget_first", "value_minus_key", "channel_gate_delta")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in _ON_DEMAND else ())
        for name in DELTA_RULES
    ],
)
def test_one_delta_rule_is_the_recurrence(name):
    """Packed documents from weights that are not zero, a carried state, and every gradient."""
    spec = dataclasses.replace(presets.deltanet(), **DELTA_RULES[name])
    wide = name.startswith("channel_gate") or name == "erase"
    time = 21
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=time, dim=4, channel_gate=wide)
        _, before = cases.arguments(spec, time=5, dim=4, seed=1, channel_gate=wide)
        ids = _segments(time)
        _, state = cases.run(spec, weights, before)
        expected = cases.gradients(spec, weights, tokens, ids, state)
        found = cases.gradients(spec, weights, tokens, ids, state, "kernel", "xla")
        pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
        for (leaf, a), (_, b) in pairs:
            assert_close(a, b, 1e-10, leaf)


def test_a_named_prefix_does_not_run_a_delta_rule():
    """``implementation`` of the prefix over chunks names nothing that a delta rule has."""
    weights, tokens = cases.arguments(presets.deltanet(), time=4, dtype="float32")
    with pytest.raises(ValueError, match="implementation='associative_scan'"):
        cases.run(presets.deltanet(), weights, tokens, None, None, "parallel", "associative_scan")
