"""The theorems: the form built from arrays equals the inner loop that was run."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import NewtonSchulz, Span, WeightNorm, fast_nets, losses, presets

LIMIT = 1e-10  # relative to the largest output, in float64


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=0)
def _form(spec, weights, tokens):
    return ttt_jax.linear_attention_form(spec, weights, **tokens)


def _assert_form_is_the_loop(spec, time, dim=4, seed=0):
    weights, tokens = cases.arguments(spec, time=time, dim=dim, seed=seed)
    form = _form(spec, weights, tokens)
    expected, _ = cases.run(spec, weights, tokens)
    assert_close(form.apply(), expected, LIMIT, str(spec))
    return form, weights, tokens, expected


def test_theorem_5_1_one_step():
    """One step on one key: ``o = φ_{t+1}(q) (W_t + φ_t(k)ᵀ ĝ_t(k))``, term by term."""
    spec = ttt_jax.InnerLoop(
        fast_net=fast_nets.SwiGLU(), loss=losses.Squared(), rate=0.3, chunk_size=1
    )
    form, weights, tokens, expected = _assert_form_is_the_loop(spec, time=1)
    net, error = spec.fast_net, None
    q, k, v = (jnp.swapaxes(tokens[n], 1, 2) for n in "qkv")
    error = net.apply(weights, k) - v
    assert_close(form.v_hat[:, 0], -jnp.swapaxes(error, 1, 2), 1e-12, "v̂ = -∂L/∂f")
    assert_close(form.k_hat, 0.3 * jnp.swapaxes(net.features(weights, k), 1, 2), 1e-12, "k̂")
    assert not form.static_kernel
    state = weights["w1"] + jnp.einsum("bhtf,bhtv->bhfv", 0.3 * net.features(weights, k), -error)
    _, learnt = cases.run(spec, weights, tokens)
    kernel = {n: learnt.weights[n] for n in ("w0", "w2")}
    out = jnp.einsum("bhtf,bhfv->bthv", net.features({**weights, **kernel}, q), state)
    assert_close(out, expected, LIMIT)


@pytest.mark.parametrize("loss", [losses.DotProduct(), losses.Squared()])
@pytest.mark.parametrize("order", ["apply_then_update", "update_then_apply"])
def test_theorem_5_2_a_sequence(order, loss):
    """Unrolled over a sequence with a trained kernel, lengths off the chunk, several steps."""
    spec = ttt_jax.InnerLoop(
        fast_net=fast_nets.SwiGLU(), loss=loss, rate="per_token", chunk_size=3, order=order, steps=2
    )
    form, *_ = _assert_form_is_the_loop(spec, time=8)
    assert form.A is None and form.D is None and form.v_hat.shape[1] == 1


def test_theorem_5_3_momentum():
    """``v̂_eff = ĝ_i Σ_{j=i..t} Π_{s=i+1..j} β_s``: the copies of each value, summed."""
    spec = presets.lact_llm(5, chunk_size=2)
    plain = dataclasses.replace(spec, orthogonalise=None, momentum="per_token")
    form, _, tokens, _ = _assert_form_is_the_loop(plain, time=9)
    gates = tokens["momentum"][:, :8].reshape(2, 4, 2, 2).mean(2)  # [batch, updates, heads]
    read = 3  # updates seen by tokens 6 and 7
    effective = form.v_hat[:, :read].sum(1)
    for source in range(2 * read):
        own = source // 2
        weight = sum(jnp.prod(gates[:, own + 1 : later + 1], 1) for later in range(own, read))
        expected = tokens["v"][:, source] * weight[..., None]
        assert_close(effective[:, source], expected, 1e-12, f"source {source}")


@pytest.mark.parametrize("momentum", [None, 0.7])
def test_newton_schulz_folds_into_the_values(momentum):
    spec = ttt_jax.InnerLoop(
        chunk_size=3, order="apply_then_update", orthogonalise=NewtonSchulz(), momentum=momentum
    )
    _assert_form_is_the_loop(spec, time=10)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_weight_norm_and_forgetting_are_factors(norm):
    spec = dataclasses.replace(
        presets.lact_llm(0, chunk_size=3), weight_norm=WeightNorm(form=norm), forget="per_token"
    )
    form, *_ = _assert_form_is_the_loop(spec, time=10)
    assert form.A is not None and form.D is not None


def test_vector_forget_acts_on_the_key_side():
    spec = ttt_jax.InnerLoop(forget="per_token", chunk_size=1)
    weights, tokens = cases.arguments(spec, time=7)
    tokens["forget"] = jax.random.uniform(jax.random.key(3), tokens["k"].shape, jnp.float64)
    form = _form(spec, weights, tokens)
    assert form.A.shape[-1] == tokens["k"].shape[-1]
    assert_close(form.apply(), cases.run(spec, weights, tokens)[0], LIMIT)
    rest = jnp.einsum("bthf,tbhf,bhfv->bthv", form.q_hat, form.A[form.reads][:, 0], form.S0)
    out = jnp.einsum("bhte,behv->bthv", form.scores(), form.v_hat[:, 0]) + rest
    assert_close(out, form.apply(), LIMIT, "scores")


def test_explicit_spans():
    spec = ttt_jax.InnerLoop(
        fast_net=fast_nets.SwiGLU(),
        order=(Span(0, 5, True, False), Span(5, 7, True, True), Span(0, 5, False, True)),
        orthogonalise=NewtonSchulz(),
        weight_norm=WeightNorm(),
        rate="per_token",
    )
    _assert_form_is_the_loop(spec, time=9)


@pytest.mark.parametrize("variant", range(1, 7))
def test_ascent_negates_the_values(variant):
    """One step of ascent is one of descent with ``−v̂``: why ascent trains as well."""
    spec = presets.lact_llm(variant, chunk_size=4)
    weights, tokens = cases.arguments(spec, time=7)
    descent = _form(spec, weights, tokens)
    ascent = _form(dataclasses.replace(spec, direction="ascent"), weights, tokens)
    assert np.array_equal(ascent.v_hat, -descent.v_hat)
    assert np.array_equal(ascent.k_hat, descent.k_hat)


def test_scores_mix_the_values():
    """``o = scores @ v̂ + q̂ S₀``, causal by chunk, for the last variant."""
    spec = presets.lact_llm(6, chunk_size=4)
    weights, tokens = cases.arguments(spec, time=10)
    form = _form(spec, weights, tokens)
    mixed = jnp.einsum("bhte,behv->bthv", form.scores(), form.v_hat[:, 0])
    out = mixed + jnp.einsum("bthf,bhfv->bthv", form.q_hat, form.S0)
    assert_close(out, form.apply(), LIMIT)
    assert not np.any(np.asarray(form.scores())[..., :4, :])
    assert form.static_kernel and "k̂" in str(form) and "static" in str(form)


def _family():
    """Every preset of the family that is a linear attention, small."""
    lact = presets.lact_llm(0, chunk_size=3)
    spans = ((0, 6, True, False), (0, 9, False, True))
    return {
        "lact_llm": lact,
        "lact_nvs": presets.lact_nvs(spans),
        "vittt_glu": presets.vittt_glu(),
        "vittt_glu_v1": dataclasses.replace(presets.vittt_glu(), update="last_layer"),
        "titans_1": presets.titans(1),
        "titans_2": presets.titans(2, chunk_size=2),
        "atlas": presets.atlas(),
        "linear_attention": presets.linear_attention(),
        "retnet": presets.retnet(2),
        "mamba2": presets.mamba2(),
        "gla": presets.gla(),
        "deltanet": presets.deltanet(),
        "gated_deltanet": presets.gated_deltanet(),
        "rwkv7": presets.rwkv7(),
    }


@pytest.mark.parametrize("name", _family())
def test_every_reducible_preset_is_its_form(name):
    _assert_form_is_the_loop(_family()[name], time=11)  # no multiple of any chunk


def test_depthwise_convolution_is_a_local_linear_attention():
    spec = presets.vittt_dwconv(3, 4)
    rng = np.random.default_rng(0)
    tokens = {n: jnp.asarray(rng.normal(size=(2, 12, 5, 1))) for n in "qkv"}
    weights = {"w": jnp.asarray(rng.normal(size=(5, 9, 1)))}
    form = _form(spec, weights, tokens)
    assert form.q_hat.shape[-1] == 9 and form.static_kernel
    assert_close(form.apply(), cases.run(spec, weights, tokens)[0], LIMIT)


@pytest.mark.parametrize("preset", [presets.ttt_linear, presets.ttt_mlp])
def test_ttt_linear_is_not_reducible(preset):
    """The error names the norm after the last layer."""
    with pytest.raises(ttt_jax.NotReducibleError, match="norm after its last layer"):
        spec = preset(chunk_size=4)
        weights, tokens = cases.arguments(spec, time=5)
        ttt_jax.linear_attention_form(spec, weights, **tokens)
    assert not ttt_jax.explain(preset()).reducible


@st.composite
def _specs(draw):
    return ttt_jax.InnerLoop(
        fast_net=draw(st.sampled_from([fast_nets.SwiGLU(), fast_nets.Linear()])),
        loss=draw(st.sampled_from([losses.DotProduct(reduction="mean"), losses.Squared()])),
        update=draw(st.sampled_from(["all", "last_layer"])),
        steps=draw(st.integers(1, 2)),
        direction=draw(st.sampled_from(["descent", "ascent"])),
        query=draw(st.sampled_from(["query", "key"])),
        chunk_size=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(["apply_then_update", "update_then_apply"])),
        rate=draw(st.sampled_from(["per_token", 0.2])),
        momentum=draw(st.sampled_from([None, "per_token"])),
        orthogonalise=draw(st.sampled_from([None, NewtonSchulz()])),
        weight_norm=draw(st.sampled_from([None, WeightNorm(), WeightNorm(form="pre")])),
        forget=draw(st.sampled_from([None, "per_token"])),
    )


_ANY = dict(spec=_specs(), time=st.integers(1, 9), seed=st.integers(0, 5))


@hypothesis.given(**_ANY)
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
def test_every_reducible_loop_is_its_form(spec, time, seed):
    _assert_form_is_the_loop(spec, time, dim=3, seed=seed)


@pytest.mark.exhaustive
@hypothesis.given(**_ANY)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_every_reducible_loop_is_its_form_everywhere(spec, time, seed):
    _assert_form_is_the_loop(spec, time, dim=3, seed=seed)


def test_not_reducible_names_the_part():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tanh(fast_nets.FastNet):
        names = ("w",)

        def shapes(self, key_dim, value_dim, hidden_dim):
            return {"w": (key_dim, value_dim)}

        def apply(self, weights, x):
            return jnp.tanh(fast_nets.dense(x, weights["w"]))

    spec = ttt_jax.InnerLoop(fast_net=Tanh())
    weights, tokens = cases.arguments(spec, time=3)
    with pytest.raises(ttt_jax.NotReducibleError, match="Tanh has no linear, bias-free last layer"):
        _form(spec, weights, tokens)
