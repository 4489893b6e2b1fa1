"""Recurrent = parallel = the independent reference, values and every gradient."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases, reference
from tests.tolerances import assert_close, tolerance
from ttt_jax import NewtonSchulz, Span, WeightNorm, fast_nets, losses, presets
from ttt_jax.inner_loop.prefix import PREFIXES

FLOAT64 = 1e-12  # relative, as promised for float64
FLOAT32 = 1e-5

SPECS = {f"lact_v{n}": presets.lact_llm(n, chunk_size=16) for n in range(7)}
SPECS["linear_attention"] = presets.linear_attention()
SPECS["forget_steps"] = dataclasses.replace(SPECS["lact_v3"], forget="per_token", steps=2)
SPECS["inclusive_mean"] = dataclasses.replace(
    SPECS["lact_v2"],
    order="update_then_apply",
    loss=losses.DotProduct(scale=0.3, reduction="mean"),
    rate=0.7,
    momentum=0.6,
)
# The squared loss with momentum, one token a chunk and chunks that later ones read.
SPECS["titans"] = presets.titans(1)
SPECS["titans_chunks"] = dataclasses.replace(
    presets.titans(1, chunk_size=4),
    fast_net=fast_nets.SwiGLU(),
    update="last_layer",
    loss=losses.Squared(reduction="mean"),
    forget_first=True,
    direction="ascent",
)


def _segments(time):
    """Two packings: documents of many lengths with padding, and one document."""
    first = np.repeat(np.arange(6), [1, 5, 17, 20, 3, time])[:time]
    first[min(9, time - 1)] = -1 if time > 9 else first[-1]
    return jnp.asarray(np.stack([first, np.full(time, 4)]), jnp.int32)


RUNS = (*(("parallel", name) for name in PREFIXES), ("kernel", "xla"))


def _compare(spec, time, packed, carried, dtype, limit, runs=RUNS):
    with jax.enable_x64(dtype == "float64"):
        weights, tokens = cases.arguments(spec, time=time, dtype=dtype)
        ids = _segments(time) if packed else None
        state = None
        if carried:
            _, before = cases.arguments(spec, time=21, dtype=dtype, seed=1)
            _, state = cases.run(spec, weights, before)
        expected = cases.gradients(spec, weights, tokens, ids, state)
        for run in runs:
            found = cases.gradients(spec, weights, tokens, ids, state, *run)
            for (name, a), (_, b) in zip(
                cases.named_leaves(found), cases.named_leaves(expected), strict=True
            ):
                assert_close(a, b, limit, f"{run}{name}")


PARALLEL = [name for name, spec in SPECS.items() if ttt_jax.explain(spec).parallel]


@pytest.mark.parametrize(
    "name,time,chunk,packed,carried,implementation",
    [
        ("lact_v2", 65, 16, True, False, "triangular"),
        ("lact_v3", 70, 16, False, False, "triangular"),
        ("lact_v5", 64, 16, False, False, None),
        ("lact_v6", 7, 16, True, True, "associative_scan"),
        ("forget_steps", 65, 16, True, True, "triangular"),
        ("inclusive_mean", 35, 16, False, False, "associative_scan"),
        ("titans", 21, 1, True, True, "associative_scan"),
        pytest.param(
            *("titans_chunks", 21, 4, True, True, "associative_scan"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_parallel_is_recurrent(name, time, chunk, packed, carried, implementation):
    spec = dataclasses.replace(SPECS[name], chunk_size=chunk)
    run = ("parallel", implementation) if implementation else ("kernel", "xla")
    _compare(spec, time, packed, carried, "float64", FLOAT64, (run,))


@pytest.mark.parametrize(
    "change,time,packed,carried",
    [
        ({"chunk_size": 1, "order": "update_then_apply", "forget": "per_token"}, 37, True, True),
        ({"chunk_size": 16}, 40, True, True),
        ({"chunk_size": 16, "rate": "per_token", "direction": "ascent"}, 40, False, False),
        pytest.param(
            *({"chunk_size": 1, "order": "update_then_apply", "forget": 0.9}, 9, False, False),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *({"chunk_size": 8, "order": "update_then_apply"}, 19, True, False),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_kernel_is_recurrent(change, time, packed, carried):
    """One call of ``ttt_kernels.linear_attention``, in XLA; initial weights that are not zero."""
    spec = dataclasses.replace(SPECS["lact_v6"], **change)
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=time)
        ids = _segments(time) if packed else None
        state = None
        if carried:
            _, before = cases.arguments(spec, time=21, seed=1)
            _, state = cases.run(spec, weights, before)
        expected = cases.gradients(spec, weights, tokens, ids, state)
        found = cases.gradients(spec, weights, tokens, ids, state, "kernel", "xla")
        for (name, a), (_, b) in zip(
            cases.named_leaves(found), cases.named_leaves(expected), strict=True
        ):
            assert_close(a, b, 1e-10, name)


@pytest.mark.parametrize(
    "name,time,implementation",
    [
        ("lact_v6", 65, "triangular"),
        pytest.param("titans", 21, "associative_scan", marks=pytest.mark.exhaustive),
        pytest.param("lact_v2", 65, "associative_scan", marks=pytest.mark.exhaustive),
    ],
)
def test_parallel_is_recurrent_in_float32(name, time, implementation):
    _compare(SPECS[name], time, True, True, "float32", FLOAT32, (("parallel", implementation),))


SPANS = ((0, 5, True, False), (5, 7, True, True), (0, 5, False, True), (7, 9, True, False))


@pytest.mark.parametrize(
    "loss", [losses.DotProduct(), pytest.param(losses.Squared(), marks=pytest.mark.exhaustive)]
)
def test_updates_of_spans_at_once_are_the_spans_as_written(loss):
    """Three updates of unlike lengths, reads between and after them; from a carried state."""
    spec = dataclasses.replace(
        SPECS["forget_steps"],
        order=tuple(Span(*entry) for entry in SPANS),
        loss=loss,
        steps=2 if loss.state_free else 1,
        orthogonalise=NewtonSchulz() if loss.state_free else None,
    )
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=10)
        _, state = cases.run(spec, weights, tokens)
        expected = cases.gradients(spec, weights, tokens, None, state)
        found = cases.gradients(spec, weights, tokens, None, state, "parallel")
        for (name, a), (_, b) in zip(
            cases.named_leaves(found), cases.named_leaves(expected), strict=True
        ):
            assert_close(a, b, FLOAT64, name)


def test_one_update_is_parallel_and_more_of_a_trained_kernel_are_not():
    """LaCT-NVS: nothing waits for its one update; a second one reads the state of the first."""
    spec = presets.lact_nvs(((0, 6, True, False), (0, 9, False, True)))
    weights, tokens = cases.arguments(spec, time=9, dtype="float32")
    out, state = cases.run(spec, weights, tokens, mode="parallel")
    expected, _ = cases.run(spec, weights, tokens)
    assert np.array_equal(out, expected)
    twice = presets.lact_nvs(((0, 6, True, False), (0, 6, True, False), (0, 9, False, True)))
    with pytest.raises(ValueError, match="order has 2 updates"):
        cases.run(twice, weights, tokens, mode="parallel")
    out, _ = cases.run(spec, weights, tokens, mode="kernel", implementation="xla")
    assert np.array_equal(out, expected)
    assert state.norms.keys() == weights.keys()


def test_auto_leaves_the_affine_scan_to_those_who_ask(caplog):
    """It costs O(d³) a chunk; the log says why, and errors name what the affine scan needs."""
    spec, other = SPECS["titans"], dataclasses.replace(SPECS["titans"], clip=True)
    weights, tokens = cases.arguments(spec, time=3, dtype="float32")
    with caplog.at_level("INFO", "ttt_jax"):
        jax.eval_shape(lambda: cases.run(spec, weights, tokens, mode="auto"))
    assert "mode='recurrent' (the parallel form is an affine scan" in caplog.text
    assert "affine scan" in str(ttt_jax.explain(spec))
    for mode, implementation, words in (
        ("kernel", None, "affine scan, which no kernel runs"),
        ("parallel", "triangular", "use one of .'associative_scan',."),
    ):
        with pytest.raises(ValueError, match=words):
            cases.run(spec, weights, tokens, mode=mode, implementation=implementation)
    with pytest.raises(ValueError, match="clip is set: use clip=False"):
        cases.run(other, weights, tokens, mode="parallel")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("time", [1, 7, 63, 64, 65, 200])
@pytest.mark.parametrize("name", [f"lact_v{n}" for n in range(2, 7)])
def test_parallel_is_recurrent_everywhere(name, time, chunk, packed, carried, dtype):
    spec = dataclasses.replace(SPECS[name], chunk_size=chunk)
    _compare(spec, time, packed, carried, dtype, FLOAT64 if dtype == "float64" else FLOAT32)


@st.composite
def _specs(draw):
    swiglu = draw(st.booleans())
    norm = draw(st.sampled_from([None, WeightNorm(), WeightNorm(form="pre")]))
    order = draw(st.sampled_from(["apply_then_update", "update_then_apply"]))
    return ttt_jax.InnerLoop(
        fast_net=fast_nets.SwiGLU() if swiglu else fast_nets.Linear(),
        loss=draw(st.sampled_from([losses.DotProduct(), losses.Squared(scale=0.5)])),
        update=draw(st.sampled_from(["all", "last_layer"])),
        steps=draw(st.integers(1, 2)),
        direction=draw(st.sampled_from(["descent", "ascent"])),
        query=draw(st.sampled_from(["query", "key"])),
        chunk_size=draw(st.integers(1, 5)),
        order=order,
        rate=draw(st.sampled_from(["per_token", 0.3])),
        momentum=draw(st.sampled_from([None, 0.5, "per_token"])),
        orthogonalise=draw(st.sampled_from([None, NewtonSchulz()])),
        weight_norm=norm,
        forget=draw(st.sampled_from([None, 0.9, "per_token"])),
    )


_ANY = dict(spec=_specs(), time=st.integers(1, 9), packed=st.booleans())


@hypothesis.given(**_ANY)
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
def test_recurrent_is_the_reference(spec, time, packed):
    _assert_reference(spec, time, packed)


@pytest.mark.exhaustive
@hypothesis.given(**_ANY)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_recurrent_is_the_reference_everywhere(spec, time, packed):
    _assert_reference(spec, time, packed)


def _assert_reference(spec, time, packed):
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=time, batch=1, dim=3, value_dim=4)
        ids = None
        if packed:
            ids = jnp.asarray([([0] * 3 + [1] * 4 + [-1] + [2] * 9)[:time]], jnp.int32)
        out, state = cases.run(spec, weights, tokens, ids)
        arrays = {n: np.asarray(x) for n, x in tokens.items()}
        numpy_weights = {n: np.asarray(w) for n, w in weights.items()}
        expected, final = reference.run(spec, numpy_weights, **arrays, segment_ids=ids)
        assert_close(out, expected, 1e-9, "out")
        for name, weight in final.items():
            assert_close(state.weights[name], weight, 1e-9, name)


@pytest.mark.parametrize("name", ["lact_v0", "lact_v3", "linear_attention"])
def test_bfloat16_keeps_a_float32_state(name):
    """The same inputs, rounded to bfloat16: the output follows and the state stays float32."""
    spec = SPECS[name]
    weights, tokens = cases.arguments(spec, time=40, dtype="float32")
    rounded = {n: x.astype(jnp.bfloat16) for n, x in tokens.items()}
    out, state = cases.run(spec, weights, rounded, mode="auto")
    back = {n: x.astype(jnp.float32) for n, x in rounded.items()}
    expected, wide_state = cases.run(spec, weights, back, mode="auto")
    assert out.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for _, x in cases.named_leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(wide_state)
    error = np.linalg.norm(np.asarray(out, np.float64) - np.asarray(expected))
    assert error / np.linalg.norm(np.asarray(expected)) <= tolerance(jnp.bfloat16) / 4


@pytest.mark.parametrize(
    "mode", ["recurrent", pytest.param("parallel", marks=pytest.mark.exhaustive)]
)
def test_memory_of_training_grows_with_the_chunks(mode):
    """Twice the tokens, twice the memory: nothing of size time² and no state a token."""
    sizes = []
    for time in (512, 1024):
        spec = presets.lact_llm(2, chunk_size=64)
        weights, tokens = cases.arguments(spec, time=time, batch=1, dtype="float32")
        lowered = cases.gradients.lower(spec, weights, tokens, mode=mode)
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 2.2 * sizes[0], sizes
