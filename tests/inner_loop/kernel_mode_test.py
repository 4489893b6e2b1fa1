"""``mode="kernel"``: the kernels that a program holds, and that they give what recurrence does.

``tests/inner_loop/modes_test.py`` compares the same paths with XLA's operations in them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases
from tests.kernels import tpu
from tests.tolerances import assert_close, tolerance
from ttt_jax import presets
from ttt_jax.inner_loop import api
from ttt_kernels import compat

FUSED = {"fast_weight_gradients", "fast_weight_apply", "newton_schulz"}
PRODUCTS = {"chunk_summaries", "chunk_outputs"}
PREFIX = {*PRODUCTS, "chunk_states"}
EXPECTED = {
    ("tpu", 0): FUSED,
    ("tpu", 1): FUSED,
    ("tpu", 2): FUSED,
    ("tpu", 4): {"newton_schulz"},
    ("tpu", 6): {"linear_attention"},
    ("cuda", 0): {"swiglu_hidden", "swiglu_learn", *PRODUCTS, "newton_schulz_forward"},
    ("cuda", 1): {"swiglu_hidden", *PRODUCTS, "newton_schulz_forward"},
    ("cuda", 2): {"swiglu_hidden", *PREFIX, "newton_schulz_forward"},
    ("cuda", 3): {*PREFIX, "newton_schulz_forward"},
    ("cuda", 6): PREFIX,
}


def _lowered(variant, platform, backend):
    """The program of a layer of heads of 64 for a platform."""
    spec = presets.lact_llm(variant, chunk_size=128)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = jax.eval_shape(lambda: spec.init(jax.random.key(0), 2, 64))
    gates = {"lr": (1, 384, 2, len(spec.trained)), "momentum": (1, 384, 2)}
    tokens = {n: struct((1, 384, 2, 64)) for n in "qkv"}
    used = {"lr": spec.rate, "momentum": spec.momentum}
    tokens |= {n: struct(s) for n, s in gates.items() if used[n] == "per_token"}
    run = functools.partial(ttt_jax.ttt, spec, mode="kernel", implementation=backend)
    traced = jax.jit(lambda weights, tokens: run(weights, **tokens)[0]).trace(weights, tokens)
    return traced.lower(lowering_platforms=(platform,)).as_text()


SLOW = {("cuda", 0), ("cuda", 1)}


@pytest.mark.parametrize(
    "platform, variant",
    [pytest.param(*c, marks=[pytest.mark.exhaustive] if c in SLOW else []) for c in EXPECTED],
)
def test_the_program_holds_the_kernels(platform, variant, monkeypatch):
    if platform == "tpu":
        backend, pattern = "mosaic_tpu", r'kernel_name = "(\w+?)(?:_forward|_chunk\w*)?"'
    else:
        backend, pattern = "mosaic_gpu", r"00(\w+)_mosaic_gpu"
    monkeypatch.setattr(compat, "target_platform", lambda: platform.replace("cuda", "gpu"))
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    program = _lowered(variant, platform, backend)
    found = set(re.findall(pattern, program))
    assert EXPECTED[platform, variant] <= found, found
    if backend == "mosaic_gpu" and 2 <= variant < 6:  # whole rows stay as they come
        passes = re.findall(r"stablehlo.(?:transpose|multiply).*tensor<1x384x2x64x.*", program)
        assert not passes, passes


@pytest.mark.parametrize(
    "mode, dtype, hidden, kernels",
    [("auto", "bfloat16", 1024, True), ("auto", "float32", 1024, False),
     ("auto", "bfloat16", 896, False), ("recurrent", "bfloat16", 1024, False)],
)  # fmt: skip
def test_spans_of_a_wide_network_have_kernels_between_its_products(
    mode, dtype, hidden, kernels, monkeypatch
):
    monkeypatch.setattr(compat, "target_platform", lambda: "gpu")
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    spec = presets.lact_nvs([(0, 8, True, False), (0, 16, False, True)])
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    weights = jax.eval_shape(lambda: spec.init(jax.random.key(0), 1, 8, hidden_dim=hidden))
    tokens = {n: struct((1, 16, 1, 8)) for n in "qkv"}
    tokens["lr"] = jax.ShapeDtypeStruct((1, 16, 1, 3), jnp.float32)
    run = functools.partial(ttt_jax.ttt, spec, mode=mode)
    traced = jax.jit(lambda weights, tokens: run(weights, **tokens)[0]).trace(weights, tokens)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = kernels and compat.layout_problem() is None
    assert ("mosaic_gpu" in program) == kernels


def test_auto_takes_kernels_on_hopper_where_they_were_seen_to_win(monkeypatch):
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    views = presets.lact_nvs([(0, 2048, True, False), (0, 4096, False, True)])
    for spec, form, backend in (
        (presets.lact_llm(0, chunk_size=2048), "recurrent", None),
        (presets.lact_llm(1, chunk_size=2048), "recurrent", None),
        (presets.lact_llm(0, chunk_size=256), "recurrent", "xla"),
        (presets.lact_llm(2, chunk_size=256), "parallel", None),
        (views, "parallel", "xla"),
    ):
        chosen = api.choose(spec, "auto", None, False)
        assert (chosen.form, chosen.backend) == (form, backend), spec


def _in_the_interpreter(monkeypatch, backend):
    """Makes the kernels of a backend run on this machine, as if its devices were here."""
    launch, problem, params = {
        "mosaic_tpu": ("tpu_kernel", "tpu_problem", compat.tpu_interpret_params),
        "mosaic_gpu": ("gpu_kernel", "hopper_problem", compat.gpu_interpret_params),
    }[backend]
    real, params = getattr(compat, launch), params()
    monkeypatch.setattr(
        compat, launch, lambda body, **options: real(body, **(options | {"interpret": params}))
    )
    monkeypatch.setattr(compat, problem, lambda: None)


def _check_in_the_interpreter(monkeypatch, backend, variant, packed, dtype, run, limit):
    spec = presets.lact_llm(variant, chunk_size=16)
    weights, tokens = cases.arguments(spec, time=40, batch=1, heads=1, dim=8, dtype="float32")
    tokens = jax.tree.map(lambda x: x.astype(dtype), tokens)
    ids = jnp.asarray([[0] * 18 + [-1] * 2 + [1] * 20]) if packed else None
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), tokens)
    # JAX does not differentiate the interpreter inside a checkpointed scan.
    function = cases.run if ttt_jax.explain(spec).not_parallel else cases.gradients
    expected = function(spec, weights, wide, ids)
    _in_the_interpreter(monkeypatch, backend)
    try:
        found = run(function, spec, weights, tokens, ids, None, "kernel", backend)
    finally:
        jax.clear_caches()  # the programs hold the interpreter
    pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
    for (name, a), (_, b) in pairs:
        if dtype == jnp.float32:
            assert_close(a, b, limit, name)
        else:
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), name


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "variant, packed",
    [(2, False), *(pytest.param(n, p, marks=MORE) for n in range(7) for p in (False, True))],
)
def test_tpu_kernels_in_the_layer(variant, packed, monkeypatch):
    _check_in_the_interpreter(
        monkeypatch, "mosaic_tpu", variant, packed, jnp.float32, tpu.interpreted,
        tolerance(jnp.float32, 40),
    )  # fmt: skip


@pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="the GPU interpreter needs jax >= 0.11")
@MORE  # minutes: every kernel of a layer and its gradient
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", range(7))
def test_gpu_kernels_in_the_layer(variant, packed, monkeypatch):
    _check_in_the_interpreter(
        monkeypatch, "mosaic_gpu", variant, packed, jnp.bfloat16, lambda f, *x: f(*x),
        tolerance(jnp.bfloat16) / 4,
    )  # fmt: skip
