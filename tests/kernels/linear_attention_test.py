"""One battery for all implementations of linear attention: values, final state, gradients."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, linear_attention
from ttt_kernels.linear_attention import api, mosaic_gpu, segments, tiling, xla

BF16_RMS = 0.01
DECAYS = (0.0, -1e-3, -0.1, -0.5, -20.0, -80.0)


def naive(q, k, v, log_decay, initial_state, segment_ids, causal, chunk_size, include):
    """The definition in float64 NumPy, document by document, with states written out."""
    q, k, v, log_decay, state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, initial_state)
    )
    out = np.zeros_like(v)
    final = state.copy()
    for b in range(len(q)):
        documents, previous = [], -1
        for t, i in enumerate(segment_ids[b]):
            if i >= 0:
                if i != previous:
                    documents.append([])
                documents[-1].append(t)
            previous = i
        for number, tokens in enumerate(documents):
            s = state[b] if number == 0 else np.zeros_like(state[b])
            size = 1 if causal == "token" else chunk_size
            for start in range(0, len(tokens), size):
                chunk, before = tokens[start:start + size], s
                for t in chunk:
                    s = np.exp(log_decay[b, t])[:, None, None] * s
                    s = s + k[b, t][:, :, None] * v[b, t][:, None, :]
                read = s if causal == "token" or include else before
                for t in chunk:
                    out[b, t] = np.einsum("hd,hde->he", q[b, t], read)
            final[b] = s
    return out, final


def make(seed, batch, length, heads, key_dim, value_dim, *, decay, state, packed,
         dtype=jnp.float32):
    """Random arguments; packed rows have padding ahead, inside and behind."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads)
    x = {
        name: jnp.asarray(rng.standard_normal((*shape, dim)), dtype)
        for name, dim in (("q", key_dim), ("k", key_dim), ("v", value_dim))
    }
    if decay:
        x["log_decay"] = jnp.asarray(rng.choice(DECAYS, size=shape), jnp.float32)
    if state:
        s = rng.standard_normal((batch, heads, key_dim, value_dim))
        x["initial_state"] = jnp.asarray(s, jnp.float32)
    ids = None
    if packed:
        ids = np.cumsum(rng.random((batch, length)) < 0.06, axis=1)
        ids[rng.random((batch, length)) < 0.06] = -1
        ids[0, :2], ids[-1, -3:] = -1, -1
        ids = jnp.asarray(ids, jnp.int32)
    return x, ids


@functools.partial(jax.jit, static_argnums=(2,))
def results(x, segment_ids, function, cotangents):
    """(out, final state, gradients) of one implementation for random cotangents of both."""
    def loss(x):
        out, final = function(**x, segment_ids=segment_ids)
        value = jnp.sum(out * cotangents[0], dtype=final.dtype) + jnp.sum(final * cotangents[1])
        return value, (out, final)

    gradients, (out, final) = jax.grad(loss, has_aux=True)(x)
    return {"out": out, "final": final, **{f"d_{name}": g for name, g in gradients.items()}}


def cotangents(x, seed=7):
    rng = np.random.default_rng(seed)
    batch, _, heads, key_dim = x["q"].shape
    final = (batch, heads, key_dim, x["v"].shape[-1])
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (x["v"].shape, final))


def rms_error(value, reference):
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return np.sqrt(np.mean((value - reference) ** 2) / max(np.mean(reference**2), 1e-30))


CAUSAL = [
    dict(causal="token"),
    dict(causal="chunk", chunk_size=5),
    dict(causal="chunk", chunk_size=5, include_current_chunk=True),
    dict(causal="chunk", chunk_size=40),
    dict(causal="chunk", chunk_size=40, include_current_chunk=True),
]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


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
        run = [linear_attention(**x, segment_ids=ids, implementation=name)
               for name in ("reference", "xla")]
    assert run[1][1].dtype == jnp.float64
    for value, expected in zip(run[1], run[0], strict=True):
        assert_close(value, expected, tolerance(jnp.float64, 70))


def test_decay_of_minus_infinity_and_long_strong_decay():
    x, _ = make(5, 1, 60, 1, 4, 4, decay=True, state=True, packed=False)
    decay = x["log_decay"].at[0, 20].set(-jnp.inf)
    out, _ = linear_attention(**{**x, "log_decay": decay}, implementation="xla")
    tail = {name: x[name][:, 20:] for name in "qkv"}
    alone, _ = linear_attention(**tail, log_decay=decay[:, 20:].at[0, 0].set(0.0),
                                implementation="reference")
    assert_close(out[:, 20:], alone, tolerance(jnp.float32, 40))
    # After a long fall by 80 a token the weights of the last, undecayed tokens must stay exact.
    fall = jnp.full((1, 60, 1), -80.0).at[:, -8:].set(-1e-3)
    run = [linear_attention(**{**x, "log_decay": fall}, implementation=name)[0]
           for name in ("reference", "xla")]
    assert_close(run[1], run[0], tolerance(jnp.float32, 8))


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

    gradients, (out, final) = jax.grad(loss, has_aux=True)(dirty)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients.values())
    assert float(jnp.abs(out[:, -6:]).max()) == 0
    start = 0
    for n in lengths:
        one = {name: value[:, start:start + n] for name, value in x.items()}
        alone, last = linear_attention(**one, implementation="reference")
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
])
def test_bad_arguments_are_named(change, name):
    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ValueError, match=name):
        linear_attention(**{**dict(q=x, k=x, v=x), **change})


def test_named_kernel_never_falls_back_and_auto_says_what_it_took(caplog):
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
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="ttt_kernels"):
        linear_attention(x, x, x)
        linear_attention(x, x, x)
    assert sum("'xla'" in r.getMessage() for r in caplog.records) == 1
    assert api._choose({"mosaic_gpu": None}, None)[0] == "mosaic_gpu"
    assert api._choose({"mosaic_gpu": "not sm90"}, None) == ("xla", "not sm90")


INTERPRETED = [
    # length, heads, key_dim, value_dim, decay, state, packed, options
    (150, 1, 128, 128, False, True, False, dict(segments_per_row=2, stages=1)),
    (200, 1, 64, 48, True, True, True, dict(segments_per_row=2, stages=1)),
    (7, 1, 64, 128, True, False, False, dict(segments_per_row=1)),
    slow(200, 1, 128, 128, True, True, True, dict(segments_per_row=2, stages=1)),
    slow(200, 1, 192, 64, False, False, True, dict(segments_per_row=3)),
]


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11),
                    reason="the Mosaic GPU interpreter needs jax >= 0.11; lowering is tested")
@pytest.mark.parametrize("length, heads, key_dim, value_dim, decay, state, packed, options",
                         INTERPRETED, ids=str)
def test_mosaic_gpu_in_the_interpreter(
    length, heads, key_dim, value_dim, decay, state, packed, options, capfd
):
    x, ids = make(1, 1, length, heads, key_dim, value_dim, decay=decay, state=state,
                  packed=packed, dtype=jnp.bfloat16)
    exact = {n: v.astype(jnp.float32) for n, v in x.items()}
    if packed:  # the kernels zero padding themselves
        padding = (ids < 0)[..., None, None]
        x |= {n: jnp.where(padding, jnp.nan, x[n]) for n in "qkv"}
    kernel = functools.partial(mosaic_gpu.linear_attention, interpret=True, **options)
    try:
        got = results(x, ids, kernel, cotangents(x))
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    reference = functools.partial(linear_attention, implementation="reference")
    want = results(exact, ids, reference, cotangents(x))
    for name, expected in want.items():
        assert rms_error(got[name], expected) < BF16_RMS, name
    assert "RACE DETECTED" not in capfd.readouterr().out


LOWERED = [
    # batch, length, heads, key_dim, value_dim
    (1, 32768, 12, 128, 128),
    (2, 1, 1, 80, 128),
    (1, 4096, 3, 256, 256),
    slow((1, 32768, 24, 64, 64)),
    slow((40, 1000, 4, 128, 128)),
    slow((1, 4096, 3, 192, 192)),
]


@pytest.mark.parametrize("shape", LOWERED, ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
def test_mosaic_gpu_lowers_with_every_tiling(shape, decay):
    batch, length, heads, key_dim, value_dim = shape
    widths = (tiling.padded_dim(key_dim), tiling.padded_dim(value_dim))
    default = tiling.choose(batch, length, heads + heads % 2, *widths, decay=decay)
    for stages in tiling.stage_options(default, decay):
        lowered = _lower(shape, decay, grad=False, stages=stages).as_text()
        assert "linear_attention_outputs" in lowered
        assert ("linear_attention_summaries" in lowered) == (default.segments > 1)


def _lower(shape, decay, grad, **options):
    batch, length, heads, key_dim, value_dim = shape
    struct = jax.ShapeDtypeStruct
    x = {
        "q": struct((batch, length, heads, key_dim), jnp.bfloat16),
        "k": struct((batch, length, heads, key_dim), jnp.bfloat16),
        "v": struct((batch, length, heads, value_dim), jnp.bfloat16),
        "initial_state": struct((batch, heads, key_dim, value_dim), jnp.float32),
    }
    if decay:
        x["log_decay"] = struct((batch, length, heads), jnp.float32)

    def function(x):
        return mosaic_gpu.linear_attention(**x, **options)

    def gradient(x):
        return jax.grad(lambda x: sum(jnp.sum(y, dtype=jnp.float32) for y in function(x)))(x)

    return jax.jit(gradient if grad else function).trace(x).lower(lowering_platforms=("cuda",))


def test_mosaic_gpu_gradient_lowers_and_keeps_only_inputs_and_segment_states():
    lowered = _lower((1, 4096, 2, 128, 64), True, grad=True).as_text()
    # One forward pass of outputs, and one each for dq, dk and dv.
    assert lowered.count("linear_attention_outputs") >= 4
    x, _ = make(2, 1, 256, 2, 64, 64, decay=False, state=True, packed=False, dtype=jnp.bfloat16)
    _, pullback = jax.eval_shape(
        lambda x: jax.vjp(lambda x: mosaic_gpu.linear_attention(**x), x), x
    )
    kept = sum(math.prod(r.shape) * r.dtype.itemsize for r in jax.tree.leaves(pullback))
    inputs = sum(v.size * v.dtype.itemsize for v in x.values())
    states = 4 * 2 * 64 * 64 * 4  # segments, heads, widths, bytes
    assert kept <= inputs + states + 2 * 64 * 64 * 4


def test_mosaic_gpu_under_vmap_and_shard_map_adds_no_collective():
    x = jax.ShapeDtypeStruct((2, 300, 2, 128), jnp.bfloat16)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_batch = jax.sharding.PartitionSpec("data")

    def one(q, k, v):
        return mosaic_gpu.linear_attention(q, k, v)[0]

    mapped = jax.shard_map(one, mesh=mesh, in_specs=by_batch, out_specs=by_batch,
                           check_vma=False)
    batched = jax.vmap(lambda *row: one(*(r[None] for r in row)))
    for function in (mapped, batched):
        def loss(*arrays, function=function):
            return jnp.sum(function(*arrays), dtype=jnp.float32)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        lowered = gradient.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        # Summaries and prefix forwards (the outputs are not needed), dq; summaries and prefix
        # backwards, dk and dv.
        assert lowered.count("custom_call @mosaic_gpu") == 6
        if function is mapped:  # vmap hides the kernels' names
            assert "linear_attention_key_value" in lowered
        assert "all_gather" not in lowered and "all_reduce" not in lowered


def test_tiling_fits_and_refuses():
    for dims in ((64, 64), (128, 128), (192, 192), (256, 256), (256, 64)):
        for decay in (False, True):
            for portable in (False, True):
                plan = tiling.choose(1, 4096, 4, *dims, decay=decay, portable=portable)
                assert plan.shared_memory(decay) <= tiling.SHARED_MEMORY_BYTES
                beside = plan.with_beside()
                assert 1 <= beside.stages <= plan.stages
                assert beside.shared_memory(True, True) <= tiling.SHARED_MEMORY_BYTES
    with pytest.raises(ValueError, match="segments=0"):
        tiling.choose(1, 64, 2, 64, 64, decay=False, segments=0)
    with pytest.raises(ValueError, match="stages=9"):
        tiling.choose(1, 64, 2, 64, 64, decay=False, stages=9)
