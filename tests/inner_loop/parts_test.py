"""Fast networks, losses and updates one by one: closed forms, zeros, and errors that help."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases
from tests.tolerances import assert_close, tolerance
from ttt_jax import InnerLoop, NewtonSchulz, Span, WeightNorm, fast_nets, losses, presets
from ttt_jax.inner_loop import updates
from ttt_kernels import compat
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, newton_schulz


@pytest.mark.parametrize("loss", [losses.DotProduct(scale=0.3), losses.Squared(scale=2.0)])
@pytest.mark.parametrize("net", [fast_nets.Linear(), fast_nets.SwiGLU()])
def test_closed_form_gradient_is_autodiff(net, loss):
    """The written gradients against ``jax.grad`` of the loss, with a rate for each token."""
    with jax.enable_x64(True):
        spec = InnerLoop(fast_net=net, loss=loss, rate="per_token")
        weights, tokens = cases.arguments(spec, time=5, batch=1)
        weights = {n: w[None] for n, w in weights.items()}
        k, v = (jnp.swapaxes(tokens[n], 1, 2) for n in "kv")
        rates = {n: jnp.swapaxes(tokens["lr"], 1, 2)[..., i : i + 1] for i, n in enumerate(weights)}
        found = net.gradient(weights, k, lambda f: loss.cotangent(f, v), rates)
        for n, rate in rates.items():

            def total(w, n=n, rate=rate):
                return jnp.sum(rate[..., 0] * loss.value(net.apply({**weights, n: w}, k), v))

            assert_close(found[n], jax.grad(total)(weights[n]), 1e-12, n)


def test_own_network_and_loss_by_autodiff():
    """A network given by ``apply`` alone runs, and equals the built-in one it imitates."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(fast_nets.FastNet):
        names = ("w0", "w1", "w2")

        def shapes(self, key_dim, value_dim, hidden_dim):
            return fast_nets.SwiGLU().shapes(key_dim, value_dim, hidden_dim)

        def apply(self, weights, x):
            return fast_nets.SwiGLU().apply(weights, x)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(losses.Loss):
        def value(self, prediction, target):
            return jnp.sum((prediction - target) ** 2, -1) / 2

    with jax.enable_x64(True):
        mine = InnerLoop(fast_net=Mine(), loss=Half(), rate="per_token", chunk_size=3)
        built_in = dataclasses.replace(mine, fast_net=fast_nets.SwiGLU(), loss=losses.Squared())
        weights, tokens = cases.arguments(built_in, time=8)
        out, _ = cases.run(mine, weights, tokens)
        expected, _ = cases.run(built_in, weights, tokens)
        assert_close(out, expected, 1e-12)
        assert not ttt_jax.explain(mine).reducible


@pytest.mark.parametrize(
    "variant,dtype",
    [
        (0, "float32"),
        (0, "bfloat16"),
        (2, "bfloat16"),
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in (
            (2, "float32"), (5, "float32"), (5, "bfloat16")
        )),
    ],
)
def test_zeros_have_finite_gradients(variant, dtype):
    """A zero token, a zero chunk, zero rates and zero weights: nothing becomes NaN."""
    spec = presets.lact_llm(variant, chunk_size=4)
    weights, tokens = cases.arguments(spec, time=12, dtype="float32")
    tokens = {n: x.at[:, 2:9].set(0).astype(dtype) for n, x in tokens.items()}
    tokens = {n: x * 0 if n == "lr" else x for n, x in tokens.items()}
    weights = {n: w.at[0].set(0) for n, w in weights.items()}
    for name, x in cases.named_leaves(cases.gradients(spec, weights, tokens, mode="auto")):
        assert np.all(np.isfinite(np.asarray(x, np.float32))), name


def test_long_columns_in_pieces_have_the_same_norms(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = {"w0": (2, 1, 512, 4), "w2": (2, 1, 512, 4), "w1": (2, 1, 3, 5)}
    weights = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    weights["w2"] = weights["w2"].at[0, 0, :, 1].set(0)

    def norms_and_gradient(weights):
        norms, pullback = jax.vjp(updates.column_norms, weights)
        return norms, pullback(jax.tree.map(jnp.cos, norms))

    plain = norms_and_gradient(weights)
    monkeypatch.setattr(compat, "target_platform", lambda: "gpu")
    text = jax.jit(updates.column_norms).lower(weights).as_text()
    assert text.count("optimization_barrier") == 1  # w0 and w2 together
    for got, want in zip(jax.tree.leaves(norms_and_gradient(weights)), jax.tree.leaves(plain),
                         strict=True):  # fmt: skip
        assert_close(got, want, tolerance(jnp.float32, 512), "norms and gradients")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e8])
@pytest.mark.parametrize("shape", [(2, 3, 16, 64), (64, 16), (32, 32)])
def test_newton_schulz_orthogonalises(shape, scale):
    x = scale * jax.random.normal(jax.random.key(0), shape)
    values = np.linalg.svd(np.asarray(newton_schulz(x, LACT_COEFFICIENTS)), compute_uv=False)
    assert 0.6 < values.min() and values.max() < 1.3
    rounded = newton_schulz(x, LACT_COEFFICIENTS, dtype=jnp.bfloat16)
    close = np.linalg.svd(np.asarray(rounded, np.float32), compute_uv=False)
    assert np.max(np.abs(close - values)) < 0.05


def test_newton_schulz_gradient_at_zero_and_rank_one():
    for x in (jnp.zeros((4, 6)), jnp.ones((4, 6))):
        value, gradient = jax.value_and_grad(lambda y: jnp.sum(newton_schulz(y) ** 2))(x)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"update": "some"}, ["update='some'", "'last_layer'"]),
        ({"steps": 0}, ["steps=0"]),
        ({"chunk_size": 0}, ["chunk_size=0"]),
        ({"chunk_size": None}, ["chunk_size=None", "update_then_apply"]),
        ({"order": "sideways"}, ["order='sideways'"]),
        ({"order": (Span(0, 4, True, True), Span(2, 6, False, True))}, ["applies token 2 twice"]),
        ({"rate": (1.0, 2.0)}, ["2 numbers", "w0"]),
        ({"momentum": "sometimes"}, ["momentum='sometimes'"]),
        ({"loss": "dot_product"}, ["loss='dot_product'", "losses.DotProduct()"]),
        ({"fast_net": "linear"}, ["fast_net='linear'"]),
        ({"chunk_size": 2.5}, ["chunk_size=2.5", "whole number"]),
        ({"window": "bogus"}, ["window='bogus'", "whole number"]),
        ({"steps": 1.5}, ["steps=1.5", "whole number"]),
        ({"orthogonalise": "bogus"}, ["orthogonalise='bogus'", "NewtonSchulz("]),
        ({"weight_norm": "bogus"}, ["weight_norm='bogus'", "WeightNorm("]),
        ({"momentum": 1.5}, ["momentum=1.5", "from 0 to 1"]),
        ({"forget": (0.5, -0.1)}, ["forget=-0.1", "from 0 to 1"]),
        ({"rate": float("nan")}, ["rate=nan", "finite"]),
        ({"rate": (1.0, jnp.ones(()), 1.0)}, ["rate=Array", "finite number"]),
        ({"rate": "token"}, ["rate='token'", "'per_token' or a number"]),
        ({"clip": 1}, ["clip=1", "True or False"]),
        ({"loss": losses.DotProduct(scale=float("nan"))}, ["loss.scale=nan", "finite"]),
        ({"fast_net": fast_nets.SwiGLU(init_scale=-1)}, ["fast_net.init_scale=-1", "0 or more"]),
    ],
)
def test_specification_errors(change, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(presets.lact_llm(0, chunk_size=4), **change)
    assert all(word in str(error.value) for word in words), error.value


def test_sizes_and_specifications_of_functions_are_checked():
    spec, key = presets.lact_llm(0, chunk_size=4), jax.random.key(0)
    for run, word in (
        (lambda: spec.init(key, heads=0, key_dim=8), "heads=0"),
        (lambda: spec.init(key, heads=2.5, key_dim=8), "heads=2.5"),
        (lambda: spec.init(key, heads=2, key_dim=-8), "key_dim=-8"),
        (lambda: spec.init(key, heads=2, key_dim=8, hidden_dim=0), "hidden_dim=0"),
        (lambda: presets.atlas(steps=-1), "steps=-1"),
        (lambda: presets.lact_llm(2.0), "variant=2.0"),
        (lambda: presets.lact_llm(True), "variant=True"),
        (lambda: presets.lact_nvs([(0, 4)]), r"entries hold \(0, 4\)"),
        (lambda: presets.lact_nvs([(0, 4, True, True)], muon_dtype="float99"), "dtype='float99'"),
        (lambda: presets.retnet(2.5), "heads=2.5"),
        (lambda: presets.vittt_dwconv(4, 4.0), "width=4.0"),
        (lambda: NewtonSchulz(eps=-1), "eps=-1"),
        (lambda: NewtonSchulz(coefficients=(1, 2)), "coefficients="),
        (lambda: WeightNorm(eps=float("inf")), "eps=inf"),
        (lambda: ttt_jax.explain("lact"), "spec='lact'"),
    ):
        with pytest.raises(ValueError, match=word):
            run()


@pytest.mark.parametrize(
    "change,words",
    [
        ({"lr": None}, ["lr is missing", "per_token"]),
        ({"lr": 0.1}, ["lr=0.1", "rate=0.1"]),
        ({"lr": "wrong"}, ["lr.shape", "4th axis must be 1 or 3"]),
        ({"momentum": 0.9}, ["momentum=0.9", "constant"]),
        ({"momentum": "whole"}, ["momentum has dtype int32", "float"]),
        ({"q": None}, ["q=None", "array"]),
        ({"k": [1.0]}, ["k=[1.0]", "array"]),
        ({"weights": None}, ["weights is a NoneType", "spec.init"]),
        ({"weights": "whole_weights"}, ["weights['w0'] has dtype int32", "float"]),
        ({name: "empty" for name in "qkv"}, ["k.shape=(0,", "no axis may be empty"]),
        ({"forget": "momentum"}, ["forget is given", "per_token"]),
        ({"q": "short"}, ["q.shape", "batch, time and heads"]),
        ({"v": "int"}, ["v has dtype int32", "float"]),
        ({"segment_ids": "momentum"}, ["segment_ids has dtype", "integer"]),
        ({"weights": "one"}, ["weights", "w0", "spec.init"]),
        ({"mode": "parallel"}, ["mode='parallel'", "weight_norm", "update='last_layer'"]),
        ({"mode": "fast"}, ["mode='fast'", "'recurrent'"]),
        ({"mode": "recurrent", "implementation": "triangular"}, ["implementation='triangular'"]),
        ({"initial_state": "momentum"}, ["initial_state", "State"]),
    ],
)
def test_argument_errors(change, words):
    """Every error names the argument, its value and the way out."""
    spec = presets.lact_llm(0, chunk_size=4)
    weights, tokens = cases.arguments(spec, time=6, dtype="float32")
    arguments = {"weights": weights, **tokens}
    special = {
        "momentum": tokens["momentum"],
        "short": tokens["q"][:, :3],
        "int": tokens["v"].astype(jnp.int32),
        "one": {"w0": weights["w0"]},
        "wrong": jnp.ones((*tokens["lr"].shape[:3], 2)),
        "whole": jnp.ones(tokens["momentum"].shape, jnp.int32),
        "whole_weights": {n: w.astype(jnp.int32) for n, w in weights.items()},
        "empty": tokens["q"][:0],
    }
    arguments |= {n: special.get(x, x) if isinstance(x, str) else x for n, x in change.items()}
    with pytest.raises(ValueError) as error:
        ttt_jax.ttt(spec, **arguments)
    assert all(word in str(error.value) for word in words), error.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relu(fast_nets.FastNet):
    """A user's own network, with a mistake on demand."""

    names = ("w0", "w1")
    last = "w1"
    mistake: str = ""

    def shapes(self, key_dim, value_dim, hidden_dim):
        return {"w0": (key_dim, hidden_dim), "w1": (hidden_dim, value_dim)}

    def features(self, weights, x):
        return jax.nn.relu(x @ weights["w0"])

    def apply(self, weights, x):
        out = self.features(weights, x) @ weights["w1"]
        return {"": out, "shape": out[..., :1], "value": 2 * out}[self.mistake]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(losses.Loss):
    """A user's own loss, with a mistake on demand."""

    state_free = True
    mistake: str = ""

    def value(self, prediction, target):
        value = -jnp.sum(prediction * target, -1)
        return {"": value, "shape": jnp.sum(value), "value": value**2}[self.mistake]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_own_networks_and_losses_are_held_to_what_they_promise(transform):
    def run(net, loss):
        spec = InnerLoop(fast_net=net, loss=loss, chunk_size=2, update="last_layer")
        weights, tokens = cases.arguments(spec, time=4, dtype="float32")
        transform(lambda weights, tokens: ttt_jax.ttt(spec, weights, **tokens))(weights, tokens)

    run(Relu(), Own())
    for net, loss, words in (
        (Relu(mistake="shape"), Own(), "Relu.apply makes .* it must be"),
        (Relu(mistake="value"), Own(), "Relu.apply is not .features @ w1. . gate"),
        (Relu(), Own(mistake="shape"), "Own.value makes .* one number a token"),
        (Relu(), Own(mistake="value"), "Own.state_free=True, but its cotangent depends"),
    ):
        with pytest.raises(ValueError, match=words):
            run(net, loss)


def test_float64_tokens_need_weights_as_wide():
    spec = presets.linear_attention()
    weights, tokens = cases.arguments(spec, time=3, dtype="float32")
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.float64) for name, x in tokens.items()}
        with pytest.raises(ValueError, match="dtype=float32 but k.dtype=float64.*cast"):
            ttt_jax.ttt(spec, weights, **wide)


def test_state_of_another_specification_is_refused():
    spec = presets.lact_llm(2, chunk_size=4)
    weights, tokens = cases.arguments(spec, time=6, dtype="float32")
    _, state = cases.run(spec, weights, tokens)
    longer = dataclasses.replace(spec, chunk_size=8)
    with pytest.raises(ValueError, match="buffer.k.* has shape"):
        cases.run(longer, weights, tokens, None, state)
    with pytest.raises(ValueError, match="made by another spec.*spec needs .*norms"):
        cases.run(dataclasses.replace(spec, weight_norm=WeightNorm()), weights, tokens, None, state)


def test_constant_rates_and_momentum_are_the_gates_of_that_value():
    """``rate=(a, b, c)`` and ``momentum=β`` equal per-token gates that are constant."""
    with jax.enable_x64(True):
        gates = presets.lact_llm(0, chunk_size=4)
        constant = dataclasses.replace(gates, rate=(0.1, 0.2, 0.3), momentum=0.7)
        weights, tokens = cases.arguments(gates, time=11)
        lead = tokens["q"].shape[:3]
        tokens["lr"] = jnp.broadcast_to(jnp.asarray([0.1, 0.2, 0.3]), (*lead, 3))
        tokens["momentum"] = jnp.full(lead, 0.7)
        expected, _ = cases.run(gates, weights, tokens)
        out, _ = cases.run(constant, weights, {n: tokens[n] for n in "qkv"})
        assert_close(out, expected, 1e-12)


def test_explain_names_what_stands_in_the_way():
    page = str(ttt_jax.explain(presets.lact_llm(0)))
    assert "weight_norm" in page and "w0, w2" in page and "Modes: recurrent, kernel." in page
    assert ttt_jax.explain(presets.lact_llm(2)).parallel
    assert NewtonSchulz(dtype="bfloat16") == NewtonSchulz(dtype="bfloat16")
