"""One battery for all implementations of the chunk products: values and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import chunk_outputs, chunk_states, chunk_summaries, compat
from ttt_kernels.chunk_products import mosaic_gpu, vjp
from ttt_kernels.chunk_products import tiling as tilings
from ttt_kernels.chunk_products.tiling import OutputTiling, RegisterTiling, SummaryTiling

BF16_RMS = 0.01

def slow(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


CASES = [
    # batch, time, heads, key_dim, value_dim, chunk_size
    (2, 23, 3, 5, 4, 7),
    slow((1, 12, 2, 4, 6, 12)),
    (1, 1, 1, 2, 3, 4),
]


def make(case, dtype, seed=0):
    """Random q, k, v, rates, states and cotangents of all results."""
    batch, time, heads, key_dim, value_dim, chunk_size = case
    rng = np.random.default_rng(seed)
    tokens, chunks = (batch, time, heads), -(-time // chunk_size)
    shapes = dict(
        q=(*tokens, key_dim), k=(*tokens, key_dim), v=(*tokens, value_dim),
        states=(batch, heads, chunks, key_dim, value_dim),
    )
    made = {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items()}
    made["d_out"] = jnp.asarray(rng.standard_normal((*tokens, value_dim)), dtype)
    made["d_summaries"] = jnp.asarray(rng.standard_normal(shapes["states"]), jnp.float32)
    made["rates"] = jnp.asarray(rng.uniform(-1, 1, tokens), jnp.float32)
    made["decay"] = jnp.asarray(rng.uniform(0, 1, (batch, heads, chunks)), jnp.float32)
    edge = (batch, heads, key_dim, value_dim)
    made["initial"], made["d_final"] = jnp.asarray(rng.standard_normal((2, *edge)), jnp.float32)
    return made


def products(x, summaries, outputs, states, every=True):
    """The operations and all gradients; without `every`, none that runs no other kernel."""
    made = {}
    made["summaries"], pullback = jax.vjp(summaries, x["k"], x["v"])
    d_summaries = x["d_summaries"].astype(made["summaries"].dtype)
    made["dk"], made["dv"] = pullback(d_summaries)
    made["rated"], pullback = jax.vjp(summaries, x["k"], x["v"], x["rates"])
    made["dk_rated"], made["dv_rated"], made["d_rates"] = pullback(d_summaries)
    for include in (False, True) if every else (False,):
        both, pullback = jax.vjp(
            functools.partial(states, include), x["states"], x["decay"], x["initial"]
        )
        gradients = pullback((x["d_summaries"].astype(both[0].dtype), x["d_final"]))
        names = ("prefix", "final", "d_parts", "d_decay", "d_initial")
        made |= {f"{n}{include:d}": y for n, y in zip(names, (*both, *gradients), strict=True)}
    made["out"], pullback = jax.vjp(outputs, x["q"], x["states"])
    made["dq"], made["d_states"] = pullback(x["d_out"])
    if not every:  # dq is a transposed one already
        return made
    made["out_t"], pullback = jax.vjp(
        functools.partial(outputs, transposed=True), x["q"], jnp.swapaxes(x["states"], -1, -2)
    )
    made["dq_t"], made["d_states_t"] = pullback(x["d_out"])
    return made


@functools.partial(jax.jit, static_argnums=(1, 2))
def by_name(x, chunk_size, name):
    return products(
        x,
        lambda k, v, r=None: chunk_summaries(k, v, chunk_size, rates=r, implementation=name),
        lambda q, s, **how: chunk_outputs(q, s, chunk_size, implementation=name, **how),
        lambda include, s, decay, initial: chunk_states(
            s, initial, decay=decay, include_own=include, dtype=s.dtype, implementation=name
        ),
    )


def definition(x, chunk_size):
    """The values in float64 NumPy."""
    names = ("q", "k", "v", "states", "rates", "decay", "initial")
    q, k, v, states, rates, decay, state = (np.asarray(x[n], np.float64) for n in names)
    sums, rated, out = np.zeros_like(states), np.zeros_like(states), np.zeros_like(v)
    for t in range(q.shape[1]):
        c, new = t // chunk_size, np.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
        sums[:, :, c] += new
        rated[:, :, c] += rates[:, t, :, None, None] * new
        out[:, t] = np.einsum("bhd,bhde->bhe", q[:, t], states[:, :, c])
    prefix = [state]
    for c in range(states.shape[2]):
        prefix.append(decay[:, :, c, None, None] * prefix[-1] + states[:, :, c])
    ahead, behind = np.stack(prefix[:-1], 2), np.stack(prefix[1:], 2)
    return {
        "summaries": sums, "rated": rated, "out": out, "out_t": out, "prefix0": ahead,
        "prefix1": behind, "final0": prefix[-1], "final1": prefix[-1],
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_equals_reference_and_reference_is_the_definition(case):
    x, chunk_size = make(case, jnp.float32), case[-1]
    want, got = (by_name(x, chunk_size, name) for name in ("reference", "xla"))
    for name, expected in definition(x, chunk_size).items():
        assert_close(want[name], expected, tolerance(jnp.float32, chunk_size), name)
    for name, expected in want.items():
        assert_close(got[name], expected, tolerance(jnp.float32, max(case)), name)


@functools.partial(jax.jit, static_argnums=(1, 2))
def by_backend(x, chunk_size, backend):
    dtype = jnp.dtype(jnp.float32)
    return products(
        x,
        lambda k, v, r=None: vjp.summaries(k, v, chunk_size, dtype, backend, r),
        lambda q, s: vjp.outputs(q, s, chunk_size, False, backend),
        lambda include, s, decay, initial: vjp.states(
            s, decay, initial, include, False, s.dtype, backend
        ),
        every=False,
    )


def rms_error(value, reference):
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return np.sqrt(np.mean((value - reference) ** 2) / np.mean(reference**2))


def interpreted(function, *arguments):
    try:
        return jax.block_until_ready(function(*arguments))
    except Exception:
        compat.reset_gpu_interpreter()
        raise


needs_interpreter = pytest.mark.skipif(
    compat.JAX_VERSION < (0, 11),
    reason="the Mosaic GPU interpreter needs jax >= 0.11; lowering is tested",
)


@needs_interpreter
@pytest.mark.parametrize("case", [
    slow((2, 300, 1, 128, 192, 128)),
    (1, 70, 1, 64, 128, 64),
    slow((1, 90, 2, 72, 24, 20)),  # chunks and widths that are not multiples of 64
    slow((3, 64, 1, 64, 64, 100)),
], ids=str)
def test_mosaic_gpu_in_the_interpreter(case):
    x, chunk_size = make(case, jnp.bfloat16), case[-1]
    got = interpreted(by_backend, x, chunk_size, mosaic_gpu.Kernels(interpret=True))
    want = by_name(jax.tree.map(lambda a: a.astype(jnp.float32), x), chunk_size, "reference")
    for name in got:
        expected = want[name]
        wide = ("summaries", "rated", "d_rates", "final", "d_decay", "d_initial")
        assert got[name].dtype == (jnp.float32 if name.strip("01") in wide else jnp.bfloat16), name
        assert rms_error(got[name], expected) < BF16_RMS, name


@needs_interpreter
@pytest.mark.parametrize(
    "tiling", [SummaryTiling(2, 64, 3), slow(SummaryTiling(1, 128, 2))], ids=str
)
def test_summaries_in_bf16_in_the_interpreter(tiling):
    x = make((1, 136, 1, 256, 128, 128), jnp.bfloat16)
    kernels = mosaic_gpu.Kernels(interpret=True, summary_tiling=tiling)
    dtype = jnp.dtype(jnp.bfloat16)
    got = interpreted(jax.jit(lambda k, v: kernels.summaries(k, v, 128, dtype)), x["k"], x["v"])
    want = chunk_summaries(x["k"], x["v"], 128, dtype=dtype, implementation="xla")
    assert got.dtype == jnp.bfloat16 and rms_error(got, want) < BF16_RMS


@needs_interpreter
@pytest.mark.parametrize(
    "tiling, transposed",
    [(RegisterTiling(128, 2, 3, 2), False), slow(RegisterTiling(128, 1, 4, 1), True),
     slow(OutputTiling(128, 128, 3, 2), False)],
    ids=str,
)
def test_forms_of_the_outputs_in_the_interpreter(tiling, transposed):
    x = make((1, 392, 1, 128, 128, 256), jnp.bfloat16)
    kernels = mosaic_gpu.Kernels(interpret=True, output_tiling=tiling)
    run = jax.jit(lambda q, s, r: kernels.rated_outputs(q, s, r, None, 256, transposed)[0])
    got = interpreted(run, x["q"], x["states"], x["rates"])
    plain = chunk_outputs(x["q"], x["states"], 256, transposed=transposed, implementation="xla")
    assert rms_error(got, plain * x["rates"][..., None]) < BF16_RMS


def lower(function, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(function).trace(*structs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


WIDTHS = [(384, 384), (128, 128), (768, 768), (256, 256), (64, 64), (192, 192), (384, 128),
          (128, 384), (512, 640)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("key_dim, value_dim", WIDTHS)
def test_every_tiling_lowers(key_dim, value_dim):
    tokens = (1, 32768, 4)
    keys, values, states = (*tokens, key_dim), (*tokens, value_dim), (1, 4, 16, key_dim, value_dim)
    for tiling in tilings.summary_options(key_dim, value_dim):
        kernels = mosaic_gpu.Kernels(summary_tiling=tiling)
        for dtype in (jnp.float32, jnp.bfloat16):
            run = functools.partial(kernels.summaries, chunk_size=2048, dtype=jnp.dtype(dtype))
            assert "chunk_summaries" in lower(lambda k, v, run=run: run(k, v), keys, values)
    options = tilings.output_options(key_dim, value_dim, 64, 32)
    if compat.layout_problem() is None:
        options += tilings.register_options(key_dim, value_dim, 64, 32)
    for tiling in options:
        kernels = mosaic_gpu.Kernels(output_tiling=tiling)
        for transposed in (False, True):
            shape = (*states[:3], value_dim, key_dim) if transposed else states
            run = functools.partial(kernels.outputs, chunk_size=2048, transposed=transposed)
            assert "chunk_outputs" in lower(lambda q, s, run=run: run(q, s), keys, shape)


def test_gradients_are_the_two_kernels_and_nothing_else():
    tokens, states = (2, 600, 2, 128), (2, 2, 3, 128, 128)
    backend = mosaic_gpu.Kernels()

    def gradients(q, k, v, states):
        def loss(q, k, v, states):
            sums = vjp.summaries(k, v, 256, jnp.dtype(jnp.float32), backend)
            out = vjp.outputs(q, states, 256, False, backend)
            return jnp.sum(sums**2) + jnp.sum(out**2, dtype=jnp.float32)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, states)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    lowered = lower(mapped, tokens, tokens, tokens, states)
    # One of each forwards; dq, dk, dv and the states' gradient backwards.
    assert lowered.count("custom_call @mosaic_gpu") == 6
    for unwanted in ("stablehlo.transpose", "all_reduce", "all_gather"):
        assert unwanted not in lowered


X, STATES = np.ones((1, 4, 1, 64), np.float32), np.ones((1, 1, 2, 64, 64), np.float32)
WHOLE, INITIAL = np.ones((1, 1, 2, 64, 64), np.int32), STATES[:, :, 0]


@pytest.mark.parametrize("call, words", [
    (lambda: chunk_summaries(None, X, 2), "k=None must be an array"),
    (lambda: chunk_summaries(X, [1.0], 2), "v=.* must be an array"),
    (lambda: chunk_summaries(X.astype(int), X, 2), "k has dtype int.*cast"),
    (lambda: chunk_summaries(X[0], X, 2), "k has shape"),
    (lambda: chunk_summaries(X, X[:, :3], 2), "v has shape"),
    (lambda: chunk_summaries(X, X, 0), "chunk_size=0"),
    (lambda: chunk_summaries(X, X, 2.5), "chunk_size=2.5"),
    (lambda: chunk_summaries(X, X, 2, dtype=jnp.int32), "dtype=int32 must be a floating dtype"),
    (lambda: chunk_summaries(X, X, 2, dtype="zz"), "dtype='zz' must be a floating dtype"),
    (lambda: chunk_summaries(X, X, 2, implementation="triton"), "implementation='triton'"),
    (lambda: chunk_summaries(X, X, 2, rates=X[0]), "rates has shape"),
    (lambda: chunk_summaries(X, X, 2, rates=1.0), "rates=1.0 must be an array"),
    (lambda: chunk_states(None, INITIAL), "summaries=None must be an array"),
    (lambda: chunk_states(WHOLE, INITIAL), "summaries has dtype int32.*cast"),
    (lambda: chunk_states(STATES[0], INITIAL), "summaries has shape"),
    (lambda: chunk_states(STATES[:, :, :0], INITIAL), "summaries has shape.*no axis empty"),
    (lambda: chunk_states(STATES, None), "initial=None must be an array"),
    (lambda: chunk_states(STATES, INITIAL[:, :, :8]), "initial has shape"),
    (lambda: chunk_states(STATES, INITIAL.astype(jnp.bfloat16)), "initial has dtype"),
    (lambda: chunk_states(STATES, INITIAL, decay=STATES[..., 0]), "decay has shape"),
    (lambda: chunk_states(STATES, INITIAL, decay=0.5), "decay=0.5 must be an array"),
    (lambda: chunk_states(STATES, INITIAL, decay=WHOLE[..., 0, 0]), "decay has dtype int32.*cast"),
    (lambda: chunk_states(STATES, INITIAL, include_own="no"), "include_own='no'"),
    (lambda: chunk_states(STATES, INITIAL, dtype=int), "dtype=int.* must be a floating dtype"),
    (lambda: chunk_outputs(X, None, 2), "states=None must be an array"),
    (lambda: chunk_outputs(X, STATES[:, :, :1], 2), "states has shape"),
    (lambda: chunk_outputs(X, STATES[..., :32], 2, transposed=True), "states has shape"),
    (lambda: chunk_outputs(X, WHOLE, 2), "states has dtype"),
    (lambda: chunk_outputs(X, STATES, 2, transposed="no"), "transposed='no'"),
])
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_named_kernel_never_falls_back():
    x, states = jnp.asarray(X), jnp.asarray(STATES)
    wide = jnp.ones((1, 4, 1, 800), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16.*'xla' can"):
        chunk_summaries(x, x, 2, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="key_dim=800"):
        chunk_summaries(wide, wide, 2, implementation="mosaic_gpu")
    if compat.hopper_problem() is not None:
        with pytest.raises(NotImplementedError, match="CPU"):
            chunk_outputs(x.astype(jnp.bfloat16), states, 2, implementation="mosaic_gpu")


def test_none_takes_the_kernels_where_they_have_been_timed(monkeypatch):
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    wide, narrow = (jax.ShapeDtypeStruct((1, 4096, 2, d), jnp.bfloat16) for d in (384, 64))
    for x, chunk_size, kernels in [
        (wide, 2048, 1), (wide, 4096, 1), (wide, 1000, 0), (wide, 64, 0), (narrow, 2048, 0)
    ]:
        run = jax.jit(functools.partial(chunk_summaries, chunk_size=chunk_size))
        lowered = run.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("custom_call @mosaic_gpu") == kernels, (x, chunk_size)
