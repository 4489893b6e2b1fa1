"""One battery for all implementations of the fast weight: values and second derivatives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import tpu
from tests.kernels.linear_attention_test import BF16_RMS, rms_error
from tests.tolerances import assert_close, tolerance
from ttt_jax.inner_loop.fast_nets import SwiGLU
from ttt_kernels import compat, fast_weight_apply, fast_weight_gradients, fast_weight_hidden
from ttt_kernels.fast_weight import api, mosaic_gpu, mosaic_tpu


def make(seed, batch, length, heads, key_dim, hidden, value_dim, *, rates, dtype=jnp.float32):
    """Random weights and tokens: dicts of arrays."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)

    shapes = dict(w0=(key_dim, hidden), w1=(hidden, value_dim), w2=(key_dim, hidden))
    weights = {
        n: normal(batch, heads, *s, scale=s[0] ** -0.5).astype(dtype).astype(jnp.float32)
        for n, s in shapes.items()
    }
    x = {n: normal(batch, heads, length, d).astype(dtype)
         for n, d in (("q", key_dim), ("k", key_dim), ("error", value_dim))}
    x["rates"] = jnp.abs(normal(batch, heads, length, rates))
    return weights, x


@functools.partial(jax.jit, static_argnums=(2, 3))
def results(weights, x, functions, trained):
    """Outputs, summed gradients, and the derivatives of both in every argument."""
    apply, gradients = functions
    out, apply_pullback = jax.vjp(apply, weights, x["q"])
    d_weights, dq = apply_pullback(jnp.cos(x["q"][..., :1] + out).astype(out.dtype))
    run = functools.partial(gradients, trained=trained)
    sums, pullback = jax.vjp(run, weights, x["k"], x["error"], x["rates"])
    found = dict(out=out, dq=dq, **{f"d_{n}": w for n, w in d_weights.items()})
    found |= {f"G_{n}": g for n, g in sums.items()}
    # A cotangent that is the same number in every program.
    found["second"] = pullback({n: jnp.ones_like(g).at[..., ::2, :].set(-1)
                                for n, g in sums.items()})
    leaves, _ = jax.tree_util.tree_flatten_with_path(found)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def named(implementation):
    return tuple(functools.partial(f, implementation=implementation)
                 for f in (fast_weight_apply, fast_weight_gradients))


def interpreted(**options):
    """The TPU kernels as the public functions, in the interpreter."""
    def apply(weights, q):
        return mosaic_tpu.apply(*api._check_weights(weights, q, "q"), q, **options)

    def gradients(weights, k, error, rates, trained):
        names = api.NAMES if trained == "all" else ("w1",)
        matrices = api._check_weights(weights, k, "k")
        made = mosaic_tpu.gradients(*matrices, k, error, rates, **options)
        return dict(zip(names, made, strict=True))

    return apply, gradients


def check(functions, case, run=lambda f, *x: f(*x)):
    seed, *shape, trained, dtype = case
    weights, x = make(seed, *shape, rates=3 if trained == "all" else 1, dtype=dtype)
    got = run(results, weights, x, functions, trained)
    exact = {n: a.astype(jnp.float32) for n, a in x.items()}
    want = results(weights, exact, named("reference"), trained)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        if dtype == jnp.float32:
            assert_close(got[name], expected, tolerance(dtype, shape[1]), name)
        else:
            assert rms_error(got[name], expected) < BF16_RMS, name


CASES = [
    # seed, batch, length, heads, key_dim, hidden, value_dim, trained, dtype
    (0, 2, 150, 1, 24, 40, 16, "all", jnp.float32),
    (1, 1, 140, 2, 64, 128, 24, "last", jnp.bfloat16),
]


@pytest.mark.parametrize("case", [*CASES, (3, 1, 1, 1, 8, 8, 8, "last", jnp.float32)], ids=str)
def test_xla_equals_reference(case):
    check(named("xla"), case)


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[1], marks=pytest.mark.exhaustive)], ids=str
)
def test_tpu_kernels_equal_reference(case):
    options = dict(interpret=compat.tpu_interpret_params(seed=case[0], cores=2), block=128)
    check(interpreted(**options), case, tpu.interpreted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", ["all", "last"])
@pytest.mark.parametrize("length", [1, 127, 300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_tpu_kernels_at_every_tail(trained, length, dtype):
    options = dict(interpret=compat.tpu_interpret_params(seed=length))
    check(interpreted(**options), (4, 1, length, 2, 64, 96, 72, trained, dtype), tpu.interpreted)


@functools.partial(jax.jit, static_argnums=(0,))
def hidden_results(function, w0, w2, x, rates):
    """Hidden activations, and the derivatives in every argument."""
    out, pullback = jax.vjp(function, w0, w2, x, rates)
    d = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return {n: x for n, x in zip(("out", "w0", "w2", "x", "rates"), (out, *pullback(d)),
                                 strict=True)}  # fmt: skip


def check_hidden(function, batch, length, heads, key_dim, hidden, dtype, *, rated=True):
    weights, x = make(7, batch, length, heads, key_dim, hidden, 8, rates=1, dtype=dtype)
    weights = [weights[n][:1].astype(dtype) for n in ("w0", "w2")]  # all rows share them
    tokens = jnp.swapaxes(x["q"], 1, 2)
    rates = jnp.swapaxes(x["rates"][..., 0], 1, 2) if rated else None
    got = hidden_results(function, *weights, tokens, rates)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (*weights, tokens, rates))
    want = hidden_results(hidden_by("reference"), *exact)
    for name, expected in want.items():
        if expected is None:
            continue
        if dtype == jnp.float32:
            assert_close(got[name], expected, tolerance(dtype, length), name)
        else:
            assert rms_error(got[name], expected) < BF16_RMS, name


def hidden_by(implementation):
    def run(w0, w2, x, rates):
        weights = dict(w0=w0, w2=w2)
        return fast_weight_hidden(weights, x, rates, implementation=implementation)

    return run


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_hidden_activations_by_xla(dtype):
    check_hidden(hidden_by("xla"), 2, 50, 2, 24, 40, dtype)


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="the GPU interpreter needs jax >= 0.11")
@pytest.mark.parametrize(
    "shape, rated",
    [((1, 72, 2, 40, 96), True), *(pytest.param(s, r, marks=pytest.mark.exhaustive) for s, r in (
        ((2, 136, 1, 128, 96), False), ((1, 5, 1, 64, 32), True), ((1, 300, 2, 64, 200), True)))],
    ids=str,
)  # fmt: skip
def test_hidden_activations_by_gpu_kernels(shape, rated):
    check_hidden(functools.partial(mosaic_gpu.hidden, interpret=True), *shape, jnp.bfloat16,
                 rated=rated)


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="the GPU interpreter needs jax >= 0.11")
@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", ["all", "last"])
def test_gpu_kernels_equal_reference(trained):
    def apply(weights, q):
        return mosaic_gpu.apply(*api._check_weights(weights, q, "q"), q, interpret=True)

    def gradients(weights, k, error, rates, trained):
        names = api.NAMES if trained == "all" else ("w1",)
        matrices = api._check_weights(weights, k, "k")
        made = mosaic_gpu.gradients(*matrices, k, error, rates, interpret=True)
        return dict(zip(names, made, strict=True))

    check((apply, gradients), (1, 1, 72, 2, 40, 48, 24, trained, jnp.bfloat16))


@pytest.mark.parametrize(
    "dims",
    [(384, 384), *(pytest.param(d, marks=pytest.mark.exhaustive)
                   for d in ((64, 32), (100, 200), (768, 384)))],
    ids=str,
)  # fmt: skip
def test_gpu_kernels_lower(dims):
    """Shared memory and layouts, which the interpreter does not see."""
    key_dim, hidden = dims
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weight, x = struct((1, 2, key_dim, hidden)), struct((1, 4096, 2, key_dim))
    rates = jax.ShapeDtypeStruct((1, 4096, 2), jnp.float32)
    one = struct((1, 2, hidden, key_dim))
    heads = struct((1, 2, 4096, key_dim))
    by_head = jax.ShapeDtypeStruct((1, 2, 4096, 3), jnp.float32)

    def learn(*arguments):
        sums, pullback = jax.vjp(mosaic_gpu.gradients, *arguments)
        return sums, pullback(sums)

    traced = [
        jax.jit(functools.partial(hidden_results.__wrapped__, mosaic_gpu.hidden)).trace(
            weight, weight, x, rates),
        jax.jit(learn).trace(weight, one, weight, heads, heads, by_head),
    ]  # fmt: skip
    programs = [t.lower(lowering_platforms=("cuda",)).as_text() for t in traced]
    made = (("hidden", "errors"), ("learn", "learn_errors"))
    for program, names in zip(programs, made, strict=True):
        for name in names:
            assert f"swiglu_{name}_mosaic_gpu" in program, name


@pytest.mark.parametrize("trained", ["all", "last"])
def test_equals_the_inner_loop_in_float64(trained):
    with jax.enable_x64(True):
        weights, x = make(5, 1, 9, 2, 4, 6, 3, rates=3 if trained == "all" else 1)
        weights, x = jax.tree.map(lambda a: a.astype(jnp.float64), (weights, x))
        names = api.NAMES if trained == "all" else ("w1",)
        rates = {n: x["rates"][..., i : i + 1] for i, n in enumerate(names)}
        want = SwiGLU().gradient(weights, x["k"], lambda f: x["error"], rates)
        got = fast_weight_gradients(weights, x["k"], x["error"], x["rates"], trained)
        out, plain = fast_weight_apply(weights, x["q"]), SwiGLU().apply(weights, x["q"])
    assert got.keys() == want.keys() and out.dtype == jnp.float64
    for n, expected in want.items():
        assert_close(got[n], expected, tolerance(jnp.float64, 9), n)
    assert_close(out, plain, tolerance(jnp.float64, 6))


def all_derivatives(weights, x, trained):
    return results.__wrapped__(weights, x, interpreted(), trained)  # compiled: no interpreter


def arguments(batch, length, heads, dim, trained, dtype):
    """Shapes and dtypes of `make`."""
    struct = jax.ShapeDtypeStruct
    weights = {n: struct((batch, heads, dim, dim), jnp.float32) for n in api.NAMES}
    x = {n: struct((batch, heads, length, dim), dtype) for n in ("q", "k", "error")}
    rates = 3 if trained == "all" else 1
    return weights, dict(x, rates=struct((batch, heads, length, rates), jnp.float32))


KERNELS = [f"fast_weight_{o}_{d}" for o in ("apply", "gradients") for d in ("forward", "backward")]


@pytest.mark.parametrize("trained", ["all", "last"])
@pytest.mark.parametrize("shape", [(1, 2048, 4, 384), (2, 1000, 3, 100), (1, 2048, 2, 768)],
                         ids=str)
def test_kernels_lower_for_a_tpu(shape, trained):
    run = functools.partial(all_derivatives, trained=trained)
    program = tpu.lowered(run, *arguments(*shape, trained, jnp.bfloat16))
    for name in KERNELS:
        assert program.count(f'kernel_name = "{name}"') == 1


@pytest.mark.parametrize("chip", tpu.TOPOLOGIES)
@pytest.mark.parametrize(
    "batch, length, heads, dim, dtype",
    [(8, 2048, 4, 384, jnp.bfloat16),  # LaCT-760M
     (64, 196, 12, 64, jnp.bfloat16),  # ViTTT-B
     pytest.param(8, 2048, 4, 768, jnp.bfloat16, marks=pytest.mark.exhaustive),
     pytest.param(8, 2048, 4, 256, jnp.float32, marks=pytest.mark.exhaustive)],
)
def test_kernels_compile_and_fit(chip, batch, length, heads, dim, dtype):
    weights, x = arguments(batch, length, heads, dim, "all", dtype)
    found = tpu.kernels(chip, functools.partial(all_derivatives, trained="all"), weights, x)
    q = x["q"]
    sizes = mosaic_tpu._sizes(weights["w0"], weights["w1"], q, None)
    for name in KERNELS:
        estimate = sizes.vmem_bytes(backward="backward" in name)
        assert found[name] <= estimate <= compat.TPU_VMEM_BYTES, name


def test_bad_arguments_are_named():
    weights, x = make(0, 2, 5, 1, 4, 6, 3, rates=3)
    k, error = x["k"], x["error"]
    with pytest.raises(ValueError, match=r"weights\['w1'\] has shape"):
        fast_weight_apply(dict(weights, w1=weights["w0"]), x["q"])
    with pytest.raises(ValueError, match="weights has no \\['w2'\\]"):
        fast_weight_apply({n: weights[n] for n in ("w0", "w1")}, x["q"])
    with pytest.raises(ValueError, match="q has shape"):
        fast_weight_apply(weights, x["q"][0])
    with pytest.raises(ValueError, match="trained='first'"):
        fast_weight_gradients(weights, k, error, trained="first")
    with pytest.raises(ValueError, match="rates has shape.*R"):
        fast_weight_gradients(weights, k, error, x["rates"], trained="last")
    with pytest.raises(ValueError, match="error"):
        fast_weight_gradients(weights, k, error[:, :, :3])
    with pytest.raises(ValueError, match="error has dtype int32; it must be a float"):
        fast_weight_gradients(weights, k, error.astype(int))
    with pytest.raises(ValueError, match=r"weights\['w1'\]=None must be an array"):
        fast_weight_apply(dict(weights, w1=None), x["q"])
    for bad in (None, [1.0], {}):
        with pytest.raises(ValueError, match=r"weights has no \['w0', 'w1', 'w2'\]"):
            fast_weight_apply(bad, x["q"])
    with pytest.raises(ValueError, match=r"weights\['w0'\] has shape \(\); it must be \[batch"):
        fast_weight_apply(dict(weights, w0=jnp.ones(())), x["q"])
    with pytest.raises(ValueError, match="rates=.* must be an array"):
        fast_weight_gradients(weights, k, error, [1.0])
    with pytest.raises(ValueError, match="implementation='cuda'"):
        fast_weight_apply(weights, x["q"], implementation="cuda")
    x_by_token = jnp.swapaxes(x["q"], 1, 2)
    with pytest.raises(ValueError, match=r"rates has shape .* = \[batch, time, heads\]"):
        fast_weight_hidden(weights, x_by_token, x["rates"])
    with pytest.raises(ValueError, match=r"weights\['w0'\]=None must be an array"):
        fast_weight_hidden(dict(weights, w0=None), x_by_token)
    with pytest.raises(ValueError, match=r"weights has no \['w2'\]"):
        fast_weight_hidden({"w0": weights["w0"]}, x_by_token)
    with pytest.raises(ValueError, match="implementation='mosaic_tpu' is unknown"):
        fast_weight_hidden(weights, x_by_token, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="block=100 must be a multiple of 128"):
        mosaic_tpu.apply(*api._check_weights(weights, x["q"], "q"), x["q"], block=100)


def test_choice_and_refusals(monkeypatch):
    weights, x = make(0, 1, 5, 1, 8, 8, 8, rates=1)
    with pytest.raises(NotImplementedError, match="for a CPU, not a TPU.*'xla' can"):
        fast_weight_apply(weights, x["q"], implementation="mosaic_tpu")
    weights_shape, wide = arguments(1, 5, 1, 4096, "all", jnp.float32)
    with pytest.raises(NotImplementedError, match="bytes of VMEM.*hidden_dim smaller"):
        jax.eval_shape(functools.partial(fast_weight_apply, implementation="mosaic_tpu"),
                       weights_shape, wide["q"])
    for function, message in (
        (functools.partial(fast_weight_apply, weights, x["q"]), "float32.*take bfloat16"),
        (functools.partial(fast_weight_hidden, weights, jnp.swapaxes(x["q"], 1, 2)), "bfloat16"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            function(implementation="mosaic_gpu")
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")
    program = tpu.lowered(lambda w, q: fast_weight_apply(w, q), weights, x["q"])
    assert 'kernel_name = "fast_weight_apply_forward"' in program


def test_gradients_of_xla_multiply_16_bits_on_a_gpu(monkeypatch):
    """Also what comes back to sums over tokens, which are float32."""
    monkeypatch.setattr(compat, "target_platform", lambda: "cuda")
    shapes = {"w0": (16, 32), "w1": (32, 16), "w2": (16, 32)}
    weights = {name: jax.ShapeDtypeStruct((1, 2, *s), jnp.float32) for name, s in shapes.items()}
    x = jax.ShapeDtypeStruct((1, 2, 64, 16), jnp.bfloat16)
    rates = jax.ShapeDtypeStruct((1, 2, 64, 3), jnp.float32)

    def back(weights, x, rates):
        def learn(*inputs):
            return fast_weight_gradients(*inputs, rates, implementation="xla")

        sums, vjp = jax.vjp(learn, weights, x, x)
        return vjp(sums)

    text = jax.jit(back).trace(weights, x, rates).lower(lowering_platforms=("cuda",)).as_text()
    operands = re.findall(r"dot_general.* : \((.*)\) ->", text)
    assert len(operands) == 12  # 4 forwards, gate and up and their errors at once, 8 backwards
    assert not any("f32" in pair for pair in operands)
