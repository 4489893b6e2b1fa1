"""Delta rules: chunks against the token-by-token reference, a numpy loop and fla's numbers."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.golden_cases import Golden
from tests.tolerances import assert_close, tolerance
from ttt_kernels import delta_rule

HEADS, KEY, VALUE = 2, 5, 3
LENGTH = 37  # of the shared cases: two whole chunks of 16 and a rest
RULES = {  # arguments beside q, k, v
    "gated_deltanet": ("beta", "head_decay"),
    "kda": ("beta", "channel_decay"),
    "rwkv7": ("erase", "channel_decay"),
    "mamba2": ("head_decay",),
}
DECAYS = (0.0, -1e-3, -0.1, -20.0, -80.0)


def make_case(rule, length=LENGTH, batch=2, seed=0, decays=DECAYS, key=KEY, value=VALUE):
    """Float64 arguments of one rule: unit keys, decays drawn from a list for every entry."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, HEADS)
    k = rng.normal(size=(*shape, key))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": rng.normal(size=(*shape, key)), "k": k, "v": rng.normal(size=(*shape, value))}
    x["initial_state"] = rng.normal(size=(batch, HEADS, key, value))
    x["reset_state"] = rng.normal(size=(HEADS, key, value))
    if "beta" in RULES[rule]:
        x["beta"] = rng.uniform(0, 1, shape)
    if "erase" in RULES[rule]:
        x["erase_read"], x["erase_write"] = -k, k * rng.uniform(0, 1, (*shape, key))
    if "head_decay" in RULES[rule]:
        x["log_decay"] = rng.choice(decays, shape)
    if "channel_decay" in RULES[rule]:
        x["log_decay"] = rng.choice(decays, (*shape, key))
    return x


def _token_names(x):
    return [name for name in x if not name.endswith("_state")]


@functools.cache
def _compiled(implementation, chunk_size):
    def loss(x, segment_ids):
        out, final = delta_rule(
            **x, segment_ids=segment_ids, chunk_size=chunk_size, implementation=implementation
        )
        # Smooth, and its cotangents of out and of the final state differ everywhere.
        wave = out.astype(final.dtype)
        total = jnp.sum(jnp.sin(wave + jnp.arange(wave.shape[-1])))
        return total + jnp.sum(jnp.cos(final)), (out, final)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(x, segment_ids=None, implementation="xla", chunk_size=None, dtype="float64"):
    """{"out", "final", "grad/<argument>", ...} of one compiled call."""
    with jax.enable_x64(dtype == "float64"):
        x = {name: jnp.asarray(value, dtype) for name, value in x.items()}
        if segment_ids is not None:
            segment_ids = jnp.asarray(segment_ids, jnp.int32)
        (_, (out, final)), grads = _compiled(implementation, chunk_size)(x, segment_ids)
        arrays = {"out": out, "final": final} | {f"grad/{n}": g for n, g in grads.items()}
        return jax.tree.map(lambda y: np.asarray(y.astype(final.dtype)), arrays)


def assert_same(value, reference, tol):
    assert value.keys() == reference.keys()
    for name in reference:
        assert_close(value[name], reference[name], tol, name)


def numpy_loop(x, segment_ids=None):
    """Values by a plain loop over rows, documents and tokens; knows no mask."""
    out = np.zeros((*x["q"].shape[:3], x["v"].shape[-1]))
    final = np.array(x["initial_state"])
    decay = x.get("log_decay", np.zeros(x["q"].shape[:3]))
    decay = np.broadcast_to(decay.reshape(*decay.shape[:3], -1), x["q"].shape)
    for b, h in np.ndindex(out.shape[0], HEADS):
        state, previous, started = final[b, h], -1, False
        for t in range(out.shape[1]):
            document = 0 if segment_ids is None else segment_ids[b][t]
            if document >= 0:
                if document != previous and started:
                    state = x["reset_state"][h]
                started = True
                q, k, v = (x[n][b, t, h] for n in "qkv")
                decayed = np.diag(np.exp(decay[b, t, h])) @ state
                if "beta" in x:
                    state = decayed - x["beta"][b, t, h] * np.outer(k, k @ decayed - v)
                elif "erase_read" in x:
                    erased = x["erase_read"][b, t, h] @ state
                    state = decayed + np.outer(x["erase_write"][b, t, h], erased) + np.outer(k, v)
                else:
                    state = decayed + np.outer(k, v)
                out[b, t, h] = q @ state
            previous = document
        final[b, h] = state
    return {"out": out, "final": final}


GOLDEN = {  # case: its names of our arguments, and whether it is [batch, heads, time, ...]
    "linattn_delta_rule": ({"beta": "beta"}, True),
    "linattn_gated_delta_rule": ({"beta": "beta", "log_decay": "g"}, False),
    "linattn_gla": ({"log_decay": "gk"}, False),
    "linattn_kda": ({"beta": "beta", "log_decay": "g"}, False),
    "linattn_iplr": ({"erase_read": "alpha", "erase_write": "beta"}, True),
    "linattn_rwkv7_dplr": (
        {"erase_read": "alpha", "erase_write": "beta", "log_decay": "gk"}, True
    ),
}


@pytest.mark.parametrize(
    ("name", "implementation", "chunk_size", "tag"),
    [(name, "xla", 8, tag) for name in GOLDEN for tag in ("f64", "f32")]
    + [(name, "reference", None, "f64") for name in ("linattn_kda", "linattn_rwkv7_dplr")],
)
def test_equals_the_published_reference(name, implementation, chunk_size, tag):
    case = Golden(name)
    names, head_first = GOLDEN[name]
    names = {n: n for n in ("q", "k", "v", "initial_state")} | names
    dtype = {"f64": "float64", "f32": "float32"}[tag]

    def layout(y):
        return jnp.swapaxes(y, 1, 2) if head_first else y

    def loss(inputs):
        x = {n: inputs[m] if n == "initial_state" else layout(inputs[m]) for n, m in names.items()}
        x["q"] = x["q"] * x["q"].shape[-1] ** -0.5  # the scale that the source applies to q
        out, final = delta_rule(**x, implementation=implementation, chunk_size=chunk_size)
        out = layout(out)
        total = jnp.sum(out * case.arrays["cot/out"].astype(dtype))
        return total + jnp.sum(final * case.arrays["cot/final_state"].astype(dtype)), (out, final)

    with jax.enable_x64(dtype == "float64"):
        inputs = {m: jnp.asarray(case.arrays[f"in/{m}"], dtype) for m in names.values()}
        (_, (out, final)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
        assert out.dtype == final.dtype == dtype
    case.check(f"{tag}/out", out)
    case.check(f"{tag}/final_state", final)
    for m, grad in grads.items():
        case.check(f"{tag}/grad/{m}", grad)


@st.composite
def packings(draw):
    """Ids of a row: runs of documents (ids may repeat) and padding, of any length."""
    runs = draw(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 20)), min_size=1))
    row = [i for i, count in runs for _ in range(count)][:LENGTH]
    return row + [draw(st.integers(-1, 3))] * (LENGTH - len(row))


@pytest.mark.parametrize("rule", ["gated_deltanet", "kda", "rwkv7"])
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.tuples(packings(), packings()),
    decays=st.lists(st.sampled_from(DECAYS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_packed_documents_and_mixed_decays(rule, rows, decays, seed):
    x, rows = make_case(rule, seed=seed, decays=decays), np.asarray(rows)
    expected = run(x, rows, "reference")
    tol = tolerance("float64", LENGTH)
    assert_same({n: expected[n] for n in ("out", "final")}, numpy_loop(x, rows), tol)
    assert_same(run(x, rows, "xla", 16), expected, tol)


def test_one_decay_a_head_without_erase_equals_a_plain_loop():
    x = make_case("mamba2", length=21)
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, x)
        out, final = jax.jit(functools.partial(delta_rule, chunk_size=8))(**arrays)
    assert_same({"out": out, "final": final}, numpy_loop(x), tolerance("float64", 21))


@pytest.mark.parametrize(("rule", "length"), [("rwkv7", 1), ("rwkv7", 17)])
def test_any_length(rule, length):
    """The reference runs the same tokens with a padded tail, so that it is compiled once."""
    x = make_case(rule)
    tokens = _token_names(x)
    rows = np.where(np.arange(LENGTH) < length, 0, -1)[None].repeat(2, 0)
    expected = run(x, rows, "reference")
    expected = {
        n: y[:, :length] if n == "out" or n.removeprefix("grad/") in tokens else y
        for n, y in expected.items()
    }
    short = {n: y[:, :length] if n in tokens else y for n, y in x.items()}
    value = run(short, None, "xla", 16)
    assert_same(value, expected, tolerance("float64", LENGTH))


@pytest.mark.parametrize(("rule", "chunk_sizes"), [("kda", (16, 64, 256)), ("rwkv7", (64,))])
def test_float32_equal_across_chunk_sizes_with_decays_to_minus_80(rule, chunk_sizes):
    x = make_case(rule, length=260, batch=1, decays=(0.0, -1e-3, -20.0, -80.0))
    x = {n: np.float32(y) for n, y in x.items()}
    expected = run(x, None, "reference")
    for chunk_size in chunk_sizes:
        value = run(x, None, "xla", chunk_size, "float32")
        assert all(np.isfinite(y).all() for y in value.values())
        assert_same(value, expected, tolerance("float32", 260))


@pytest.mark.parametrize("rate", [1.0, 1.5])
def test_repeated_keys_do_not_break_the_solve(rate):
    """A system of ones: its powers reach 1e18 at 64 tokens, its inverse only 2."""
    x = make_case("kda", length=260, batch=1, decays=(0.0,))
    x["k"] = np.broadcast_to(x["k"][:, :1], x["k"].shape)
    x["beta"] = np.full_like(x["beta"], rate)
    x = {n: np.float32(y) for n, y in x.items()}
    value = run(x, None, "xla", 64, "float32")
    assert_same(value, run(x, None, "reference"), tolerance("float32", 260))


def test_documents_start_from_zero_without_a_reset_state():
    x = make_case("kda")
    rows = (np.arange(LENGTH) // 7)[None].repeat(2, 0)
    zero = run(x | {"reset_state": np.zeros_like(x["reset_state"])}, rows, "xla", 16)
    del x["reset_state"], zero["grad/reset_state"]
    assert_same(run(x, rows, "xla", 16), zero, tolerance("float64", LENGTH))


@pytest.mark.parametrize("rule", ["kda", "rwkv7"])
def test_padding_may_hold_nan_and_zero_tokens_have_finite_gradients(rule):
    x = make_case(rule, decays=(0.0, -1e-3))
    rows = np.zeros((2, LENGTH), int)
    rows[0, :4] = rows[1, 20:] = -1
    clean = run(x, rows, "xla", 16)
    tokens = _token_names(x)
    for n in tokens:
        x[n] = np.where((rows < 0).reshape(2, LENGTH, *(1,) * (x[n].ndim - 2)), np.nan, x[n])
    dirty = run(x, rows, "xla", 16)
    for n in clean:
        np.testing.assert_array_equal(dirty[n], clean[n], err_msg=n)
    assert not dirty["out"][rows < 0].any()
    for n in tokens:
        assert not dirty[f"grad/{n}"][rows < 0].any()
        x[n] = np.zeros_like(x[n])
    zero = run(x, rows, "xla", 16)
    assert all(np.isfinite(y).all() for y in zero.values())


def test_a_decay_of_minus_infinity_starts_afresh():
    x = make_case("gated_deltanet", decays=(0.0,))
    x["reset_state"] = np.zeros_like(x["reset_state"])
    rows = np.repeat([0, 1], [9, LENGTH - 9])[None].repeat(2, 0)
    fresh = run(x, rows, "xla", 16)
    x["log_decay"][:, 9] = -np.inf
    value = run(x, np.zeros_like(rows), "xla", 16)
    for n in ("grad/log_decay", "grad/reset_state"):  # the reset state is not read, the decay is
        del value[n], fresh[n]
    assert_same(value, fresh, tolerance("float64", LENGTH))


def test_two_halves_equal_the_whole_with_gradients():
    x = make_case("rwkv7", length=30)
    initial = x.pop("initial_state")
    del x["reset_state"]

    def whole(x, initial):
        return delta_rule(**x, initial_state=initial, chunk_size=16)

    def halves(x, initial, cut):
        first, state = delta_rule(
            **{n: y[:, :cut] for n, y in x.items()}, initial_state=initial, chunk_size=16
        )
        second, state = delta_rule(
            **{n: y[:, cut:] for n, y in x.items()}, initial_state=state, chunk_size=8
        )
        return jnp.concatenate([first, second], 1), state

    def grads(function, *args):
        def loss(x, initial):
            out, final = function(x, initial, *args)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final)), (out, final)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, initial)

    with jax.enable_x64(True):
        x, initial = jax.tree.map(jnp.asarray, (x, initial))
        expected, value = grads(whole), grads(halves, 17)
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance("float64", 30)), value, expected)


def test_bfloat16_keeps_a_float32_state_close_to_float64():
    x = make_case("gated_deltanet", length=2048, batch=1, decays=(-1e-4, 0.0))
    with jax.enable_x64(True):
        x = {n: np.asarray(jnp.asarray(y, jnp.bfloat16).astype(jnp.float64)) for n, y in x.items()}
    value = run(x, None, "xla", 64, "bfloat16")
    expected = run(x, None, "reference")
    for n in ("final", "grad/initial_state", "grad/beta"):
        rms = np.sqrt(np.mean((value[n] - expected[n]) ** 2) / np.mean(expected[n] ** 2))
        assert rms < 0.01, (n, rms)
    low = {n: jnp.asarray(y, jnp.bfloat16) for n, y in x.items()}
    out, final = jax.eval_shape(lambda x: delta_rule(**x), low)
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)


def test_gradient_memory_is_linear_in_time():
    def temp(length):
        x = {n: jnp.float32(y) for n, y in make_case("kda", length, 1, key=32, value=32).items()}
        compiled = _compiled("xla", 64).lower(x, None).compile()
        inputs = sum(y.nbytes for y in x.values())
        return compiled.memory_analysis().temp_size_in_bytes, inputs

    (short, _), (long, inputs) = temp(4096), temp(16384)
    assert long < 4.2 * short
    # Far below one state a token, which is key_dim = 32 times an input each.
    assert long < 12 * inputs


def test_refused_arguments_name_the_way_out():
    x = {n: jnp.float32(y) for n, y in make_case("kda").items()}
    pair = {"erase_read": x["k"], "erase_write": x["k"]}
    for change, words in (
        (pair, "two erase rules"),
        ({"beta": None, "erase_read": x["k"]}, "erase_write=None"),
        ({"beta": None, "erase_write": x["k"]}, "erase_read=None"),
        ({"beta": x["k"]}, r"beta has shape .* \[batch, time, heads\]"),
        ({"beta": jnp.ones((2, LENGTH, HEADS), int)}, "beta has dtype int32"),
        ({"log_decay": x["v"]}, r"log_decay has shape .* or .*key_dim"),
        ({"v": x["v"][:, :-1]}, "v has shape"),
        ({"initial_state": x["q"]}, "initial_state has shape"),
        ({"reset_state": x["q"]}, "reset_state has shape"),
        ({"segment_ids": jnp.zeros((2, LENGTH))}, "segment_ids has dtype"),
        ({"chunk_size": 24}, "try 32"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"chunk_size": 16, "implementation": "reference"}, "token by token"),
        ({"implementation": "triton"}, "implementation='triton'"),
        ({"k": None}, "k=None must be an array"),
        ({"log_decay": -1.0}, "log_decay=-1.0 must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            delta_rule(**x | change)
