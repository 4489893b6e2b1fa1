"""Schedule, rules for parameters, and Muon's update, against formulas of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close, tolerance
from ttt_jax import optim, sharding, train_step
from ttt_jax.config import OptimizerConfig
from ttt_jax.models import lact_llm, transformer


@settings(deadline=None, max_examples=30)
@given(
    steps=st.integers(1, 500),
    warmup=st.integers(0, 60),
    end=st.floats(0.0, 1.0),
    count=st.integers(0, 499),
)
def test_schedule_is_its_formula(steps, warmup, end, count):
    progress = min(max((count + 1 - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    expected = min(1.0, (count + 1) / max(warmup, 1)) * (
        end + (1 - end) * 0.5 * (1 + np.cos(np.pi * progress))
    )
    got = float(optim.warmup_cosine(steps, warmup, end)(count))
    assert got == pytest.approx(expected, abs=1e-5)


def test_schedule_has_its_peak_after_warmup_and_its_end_value_last():
    factor = optim.warmup_cosine(100, 10, 0.1)
    values = [float(factor(n)) for n in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == values[9] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(values[9:], values[10:], strict=False))


def one_update(config, names, params, gradient):
    optimizer, _ = optim.make_optimizer(config, names, 100)
    return optimizer.update(gradient, optimizer.init(params), params)[0]


def muon_config(**changes):
    values = dict(name="muon", muon_learning_rate=1.0, weight_decay=0.0, clip_norm=0.0)
    return OptimizerConfig(warmup_steps=0, **{**values, **changes})


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (16, 16)])
def test_muon_orthogonalises_each_matrix_of_a_stack(shape):
    key = jax.random.key(0)
    stack = jax.random.normal(key, (3, *shape))
    names = {"w": ("layers", "embed", "mlp")}
    got = one_update(muon_config(), names, {"w": stack}, {"w": stack})["w"]
    scale = max(1.0, shape[1] / shape[0]) ** 0.5
    for layer in range(3):
        singular = np.linalg.svd(np.asarray(got[layer]), compute_uv=False) / scale
        assert singular.min() > 0.6 and singular.max() < 1.3
        alone = {"w": stack[layer]}
        expected = one_update(muon_config(), {"w": ("embed", "mlp")}, alone, alone)["w"]
        assert_close(got[layer], expected, tolerance(jnp.float32, 16 * 5))


def test_muon_treats_queries_keys_and_values_of_a_joint_kernel_apart():
    joint = jax.random.normal(jax.random.key(1), (8, 3, 12))
    names = {"kernel": ("embed", None, "heads")}
    got = one_update(muon_config(), names, {"kernel": joint}, {"kernel": joint})["kernel"]
    for part in range(3):
        alone = {"kernel": joint[:, part]}
        expected = one_update(muon_config(), {"kernel": ("embed", "heads")}, alone, alone)
        assert_close(got[:, part], expected["kernel"], tolerance(jnp.float32, 8 * 5))


def test_muon_of_a_zero_gradient_is_zero():
    zeros = {"w": jnp.zeros((2, 4, 8))}
    got = one_update(muon_config(), {"w": ("layers", "embed", "mlp")}, zeros, zeros)["w"]
    assert not np.any(np.asarray(got))


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match="no matrix inside its layers"):
        optim.make_optimizer(muon_config(), {"b": ("embed",)}, 10)


def model_rules(config, optimizer):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    _, shapes, _, names = train_step.abstract_params(config, mesh)
    rules = optim.parameter_rules(names, optimizer)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): rule
        for path, rule in jax.tree_util.tree_leaves_with_path(rules)
    }, optim.describe_rules(names, shapes, optimizer)


@pytest.mark.parametrize("config", [lact_llm.preset("tiny"), transformer.preset("tiny")])
def test_every_parameter_of_the_models_falls_under_the_right_rule(config):
    rules, described = model_rules(config, muon_config())
    for name, rule in rules.items():
        last = name.rsplit(".", 1)[-1]
        if "embedding" in name or name.startswith("head"):
            assert rule == "adamw", name
        elif last in ("scale", "offset", "bias") or "norm" in name:
            assert rule == "adamw without decay", name
        elif "mlp" in name or name.endswith(("out.kernel", "query.kernel", "w1")):
            assert rule == "muon", name
        assert f" {name} (" in described
    assert {"muon", "adamw", "adamw without decay"} == set(rules.values())


@pytest.mark.parametrize("config", [lact_llm.preset("tiny"), transformer.preset("tiny")])
def test_the_rules_do_not_depend_on_scanning_the_layers(config):
    scanned, _ = model_rules(config, muon_config())
    config.scan_layers = False
    unrolled, _ = model_rules(config, muon_config())
    for name, rule in unrolled.items():
        first, _, rest = name.partition(".")
        same = f"{first}.{rest.partition('.')[2]}" if first == "layers" else name
        assert scanned[same] == rule, name


def test_weight_decay_leaves_gains_alone():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.5)
    names = {"kernel": ("embed", "mlp"), "scale": ("embed",)}
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = one_update(config, names, params, zeros)
    rate = float(optim.warmup_cosine(100, 0, 0.1)(0))
    np.testing.assert_allclose(updates["kernel"], -0.5 * rate, rtol=1e-6)
    np.testing.assert_array_equal(updates["scale"], 0.0)


def test_clipping_scales_the_whole_gradient_to_its_limit():
    names = {"a": ("embed",), "b": ("embed",)}
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])}
    params = jax.tree.map(jnp.zeros_like, gradient)
    config = OptimizerConfig(clip_norm=1.0, b1=0.0, eps=1.0, learning_rate=1.0, warmup_steps=0)
    got = one_update(config, names, params, gradient)
    # Adam's first step with b1 = 0 and eps = 1 is g / (|g| + 1), of the clipped g.
    rate = float(optim.warmup_cosine(100, 0, 0.1)(0))
    np.testing.assert_allclose(got["a"], [-rate * 0.6 / 1.6, 0.0], rtol=1e-5)
    np.testing.assert_allclose(got["b"], [0.0, -rate * 0.8 / 1.8], rtol=1e-5)
