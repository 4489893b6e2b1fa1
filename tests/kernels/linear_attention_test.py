"""One battery for all implementations of linear attention: values, final state, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_battery import (
    BF16_RMS,
    cotangents,
    make,
    naive,
    results,
    rms_error,
    slow,
)
from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, linear_attention
from ttt_kernels.linear_attention import segments, xla

CAUSAL = [
    dict(causal="token"),
    dict(causal="chunk", chunk_size=5),
    dict(causal="chunk", chunk_size=5, include_current_chunk=True),
    dict(causal="chunk", chunk_size=40),
    dict(causal="chunk", chunk_size=40, include_current_chunk=True),
]


@pytest.mark.parametrize(
    "causal", [CAUSAL[0], CAUSAL[1], CAUSAL[4], slow(CAUSAL[2]), slow(CAUSAL[3])], ids=str
)
def test_reference_is_the_definition(causal):
    x, ids = make(0, 2, 47, 2, 4, 3, decay=True, state=True, packed=True)
    out, final = linear_attention(**x, segment_ids=ids, implementation="reference", **causal)
    expected = naive(x["q"], x["k"], x["v"], x["log_decay"], x["initial_state"], np.asarray(ids),
                     causal["causal"], causal.get("chunk_size"),
                     causal.get("include_current_chunk", False))
    assert_close(out, expected[0], tolerance(jnp.float32, 47), "out")
    assert_close(final, expected[1], tolerance(jnp.float32, 47), "final")


@pytest.mark.parametrize(
    "causal, length, packed",
    [(CAUSAL[0], 1, False), *((CAUSAL[i], 100, True) for i in (0, 2, 3)),
     *(slow(c, 1, False) for c in CAUSAL[1:]), *(slow(CAUSAL[i], 100, True) for i in (1, 4))],
    ids=str,
)
def test_xla_equals_reference(monkeypatch, causal, length, packed):
    monkeypatch.setattr(xla, "BLOCK", 16)  # several blocks and groups of blocks in a short row
    monkeypatch.setattr(xla, "MAX_GROUP", 3)
    x, ids = make(length, 2, length, 2, 8, 6, decay=True, state=True, packed=packed)
    run = {
        name: results(x, ids, functools.partial(linear_attention, implementation=name, **causal),
                      cotangents(x))
        for name in ("reference", "xla")
    }
    for name, expected in run["reference"].items():
        assert_close(run["xla"][name], expected, tolerance(jnp.float32, length), name)


def test_xla_plain_bf16_and_optional_arguments():
    x, _ = make(3, 2, 150, 3, 16, 24, decay=False, state=False, packed=False, dtype=jnp.bfloat16)
    exact = {name: value.astype(jnp.float32) for name, value in x.items()}
    got = results(x, None, functools.partial(linear_attention, implementation="xla"),
                  cotangents(x))
    want = results(exact, None, functools.partial(linear_attention, implementation="reference"),
                   cotangents(x))
    assert got["out"].dtype == jnp.bfloat16 and got["final"].dtype == jnp.float32
    assert got["d_q"].dtype == jnp.bfloat16
    for name, expected in want.items():
        assert rms_error(got[name], expected) < BF16_RMS, name


def test_float64_to_rounding():
    with jax.enable_x64(True):
        x, ids = make(4, 1, 70, 2, 4, 4, decay=True, state=True, packed=True, dtype=jnp.float64)
        x = {name: value.astype(jnp.float64) for name, value in x.items()}
        run = jax.jit(lambda x: [linear_attention(**x, segment_ids=ids, implementation=name)
                                 for name in ("reference", "xla")])(x)
    assert run[1][1].dtype == jnp.float64
    for value, expected in zip(run[1], run[0], strict=True):
        assert_close(value, expected, tolerance(jnp.float64, 70))


def test_decay_of_minus_infinity_and_long_strong_decay():
    x, _ = make(5, 1, 60, 1, 4, 4, decay=True, state=True, packed=False)
    ids = np.zeros((1, 60), int)
    run = jax.jit(functools.partial(linear_attention, implementation="xla"))
    wiped = x["log_decay"].at[0, 20].set(-jnp.inf)
    # After a long fall by 80 a token the weights of the last, undecayed tokens must stay exact.
    fall = jnp.full((1, 60, 1), -80.0).at[:, -8:].set(-1e-3)
    for decay in (wiped, fall):
        y = {**x, "log_decay": decay}
        arrays = [y[n] for n in ("q", "k", "v", "log_decay", "initial_state")]
        expected = naive(*arrays, ids, "token", None, False)
        for value, exact in zip(run(**y), expected, strict=True):
            assert_close(value, exact, tolerance(jnp.float32, 60))


@settings(deadline=None, max_examples=2)
@given(split=st.integers(1, 39), implementation=st.sampled_from(["reference", "xla"]))
def test_split_equals_whole(split, implementation):
    x, _ = make(6, 1, 40, 2, 4, 4, decay=True, state=True, packed=False)
    run = jax.jit(functools.partial(linear_attention, implementation=implementation))
    whole, final = run(**x)
    first = {n: v if n == "initial_state" else v[:, :split] for n, v in x.items()}
    second = {n: v[:, split:] for n, v in x.items() if n != "initial_state"}
    out_1, state = run(**first)
    out_2, last = run(**second, initial_state=state)
    assert_close(jnp.concatenate([out_1, out_2], 1), whole, tolerance(jnp.float32, 40))
    assert_close(last, final, tolerance(jnp.float32, 40))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padding_may_hold_nan_and_packed_equals_alone(implementation):
    lengths = (1, 5, 20, 3)
    x, _ = make(8, 1, sum(lengths) + 6, 2, 4, 4, decay=True, state=False, packed=False)
    ids = jnp.asarray([sum([[i] * n for i, n in enumerate(lengths)], []) + [-1] * 6])
    dirty = {n: v.at[:, -6:].set(jnp.nan) for n, v in x.items()}

    def loss(x):
        out, final = linear_attention(**x, segment_ids=ids, implementation=implementation)
        return jnp.sum(out**2) + jnp.sum(final**2), (out, final)

    gradients, (out, final) = jax.jit(jax.grad(loss, has_aux=True))(dirty)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients.values())
    assert float(jnp.abs(out[:, -6:]).max()) == 0
    start = 0
    for n in lengths:
        one = [x[name][:, start:start + n] for name in ("q", "k", "v", "log_decay")]
        alone, last = naive(*one, np.zeros((1, 2, 4, 4)), np.zeros((1, n)), "token", None, False)
        assert_close(out[:, start:start + n], alone, tolerance(jnp.float32, n))
        start += n
    assert_close(final, last, tolerance(jnp.float32, n))


def test_backward_memory_grows_linearly():
    def temporary(length):
        x, _ = make(9, 1, length, 1, 8, 8, decay=True, state=False, packed=False)
        loss = jax.grad(lambda x: jnp.sum(linear_attention(**x, implementation="xla")[0]))
        return jax.jit(loss).lower(x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 4.5 * short


def test_read_index_counts_chunks_from_each_document():
    ids = jnp.asarray([[-1, 3, 3, 3, 7, 7, -1, 7]])
    tokens = (1, 2, 3, 4, 5, 7)  # padding reads nothing, whatever its index
    exclusive, inclusive = (segments.read_index(8, 2, i, ids)[0].tolist() for i in (False, True))
    assert [exclusive[t] for t in tokens] == [0, 0, 2, 3, 3, 6]
    assert [inclusive[t] for t in tokens] == [2, 2, 3, 5, 5, 7]


@pytest.mark.parametrize("change, name", [
    (dict(q=jnp.ones((1, 4, 2))), "q"),
    (dict(k=jnp.ones((1, 5, 1, 2))), "k"),
    (dict(v=jnp.ones((1, 4, 2, 2))), "v"),
    (dict(v=jnp.ones((1, 4, 1, 2), jnp.int32)), "v"),
    (dict(log_decay=jnp.ones((1, 4))), "log_decay"),
    (dict(initial_state=jnp.ones((1, 1, 2, 3))), "initial_state"),
    (dict(segment_ids=jnp.ones((1, 4))), "segment_ids"),
    (dict(causal="row"), "causal"),
    (dict(causal="chunk"), "chunk_size"),
    (dict(chunk_size=4), "chunk_size"),
    (dict(causal="chunk", chunk_size=0), "chunk_size"),
    (dict(implementation="triton"), "implementation"),
    (dict(q=None), "q=None must be an array"),
    (dict(k=[1.0, 2.0]), "k="),
    (dict(v=3), "v=3"),
    (dict(log_decay=-1.0), "log_decay=-1.0 must be an array"),
    (dict(initial_state=0.0), "initial_state=0.0"),
    (dict(segment_ids=[[0, 0, 0, 0]]), "segment_ids="),
    (dict(causal="chunk", chunk_size=2, include_current_chunk="no"), "include_current_chunk='no'"),
])
def test_bad_arguments_are_named(change, name):
    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ValueError, match=name):
        linear_attention(**{**dict(q=x, k=x, v=x), **change})


def test_named_kernel_never_falls_back():
    x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    if compat.hopper_problem() is None:
        pytest.skip("a Hopper GPU is here: the kernel runs")
    with pytest.raises(NotImplementedError, match="CPU.*'xla' can"):
        linear_attention(x, x, x, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="bfloat16"):
        linear_attention(*[x.astype(jnp.float32)] * 3, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="256"):
        linear_attention(*[jnp.ones((1, 4, 1, 257), jnp.bfloat16)] * 3,
                         implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="segment_ids.*chunk"):
        linear_attention(x, x, x, segment_ids=jnp.zeros((1, 4), int), causal="chunk", chunk_size=2,
                         implementation="mosaic_gpu")
