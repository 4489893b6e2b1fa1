"""residual_norm: gradients against autodiff of the definition, the kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, row_walk
from ttt_kernels.residual_norm import add_branch, mosaic_gpu, residual_norm, xla

BF16_RMS = 0.01
VECTORS = ("branch_bias", "scale", "bias")
CASES = {  # which of the arrays there are
    "all": ("branch", "branch_bias", "factor", "scale", "bias"),
    "no factor": ("branch", "branch_bias", "scale", "bias"),
    "no bias": ("branch", "factor", "scale", "bias"),
    "norm alone": ("scale", "bias"),
    "no norm": ("branch", "branch_bias", "factor"),
}


def make(names, features, dtype, tokens=4):
    random = np.random.default_rng(0)
    shape = (4, 2, tokens, features)
    arrays = {"x": jnp.asarray(random.normal(size=shape), dtype)}
    for name in names:
        size = features if name in VECTORS else shape
        wide = jnp.float32 if name in VECTORS else dtype
        arrays[name] = jnp.asarray(random.normal(size=size), wide)
    if "factor" in names:
        arrays["factor"] = jnp.array([0.0, 1.25, 1.25, 0.0])
    return arrays


def plain(x, branch=None, branch_bias=None, factor=None, scale=None, bias=None):
    if branch is not None:
        branch = branch if branch_bias is None else branch + branch_bias
        x = x + (branch if factor is None else branch * factor[:, None, None, None])
    if scale is None:
        return (x,)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return x, centred / jnp.sqrt(variance + 1e-5) * scale + bias


def run(module, x, branch=None, branch_bias=None, factor=None, scale=None, bias=None, **options):
    if scale is None:
        return (module.add_branch(x, branch, branch_bias, factor, **options),)
    return module.residual_norm(x, branch, branch_bias, factor, scale, bias, 1e-5, **options)


@functools.partial(jax.jit, static_argnums=1)
def results(arrays, function):
    """Values and gradients by name; of the factor none is promised."""
    fixed = {name: a for name, a in arrays.items() if name == "factor"}
    free = {name: a for name, a in arrays.items() if name != "factor"}
    random = np.random.default_rng(1)
    out, pullback = jax.vjp(lambda free: function(**free, **fixed), free)
    errors = tuple(jnp.asarray(random.normal(size=y.shape), y.dtype) for y in out)
    return dict(zip("sy", out, strict=False)) | pullback(errors)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_plain_form_is_the_definition(case):
    arrays = make(CASES[case], 6, jnp.float32)
    got = results(arrays, functools.partial(run, xla))
    for name, value in results(arrays, plain).items():
        assert_close(got[name], value, tolerance(jnp.float32, 24), name)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize(
    "case",
    ["all", "norm alone"]
    + [pytest.param(c, marks=pytest.mark.exhaustive) for c in ("no factor", "no bias", "no norm")],
)
@pytest.mark.parametrize(
    ("features", "tokens"),
    [(64, 10), pytest.param(384, 1, marks=pytest.mark.exhaustive)],  # two images in a step
)
def test_the_kernels_in_the_interpreter(case, features, tokens, monkeypatch, capfd):
    """With race detection; rings that go round, and shares of uneven size."""
    monkeypatch.setattr(row_walk, "CTAS", 1)
    jax.clear_caches()  # of programs that were made with another number
    arrays = make(CASES[case], features, jnp.bfloat16, tokens)
    try:
        got = results(arrays, functools.partial(run, mosaic_gpu, interpret=True))
    except Exception:
        compat.reset_gpu_interpreter()
        raise
    assert "RACE" not in "".join(capfd.readouterr())
    wide = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    for name, value in results(wide, plain).items():
        value = np.asarray(value)
        error = np.asarray(got[name], np.float32) - value
        assert np.sqrt(np.mean(error**2) / np.mean(value**2)) < BF16_RMS, name


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernels need jax >= 0.11")
@pytest.mark.parametrize(
    ("case", "features"),
    [("all", 768)]
    + [
        pytest.param(case, features, marks=pytest.mark.exhaustive)
        for case in CASES
        for features in (64, 192, 320, 384, 1024)
    ],
)
def test_the_kernels_lower(case, features):
    arrays = make(CASES[case], features, jnp.bfloat16)
    traced = results.trace(arrays, functools.partial(run, mosaic_gpu))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=None), "x=None must be an array"),
        (dict(factor=0.5), "factor=0.5 must be an array"),
        (dict(x=jnp.ones(6)), "x has shape \\(6,\\)"),
        (dict(branch=jnp.ones((4, 2, 4, 5))), "branch has shape \\(4, 2, 4, 5\\)"),
        (dict(branch=None), "branch is None, so"),
        (dict(factor=jnp.ones(2)), "factor has shape \\(2,\\); it must be \\(4,\\)"),
        (dict(branch_bias=jnp.ones(5)), "branch_bias has shape \\(5,\\)"),
        (dict(scale=jnp.ones(5)), "scale has shape \\(5,\\)"),
        (dict(epsilon=10**40), "epsilon=10*0 must be a finite float32 number, 0 or more"),
        (dict(implementation="cuda"), "implementation='cuda' is unknown"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arrays = make(CASES["all"], 6, jnp.float32)
    with pytest.raises(ValueError, match=message):
        residual_norm(**arrays | dict(epsilon=1e-5) | change)


def test_a_sum_needs_a_branch():
    with pytest.raises(ValueError, match="branch is None; add_branch needs one"):
        add_branch(jnp.ones((2, 3)), None, None, None)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 64), jnp.float32, "float32"),
        ((5, 64), jnp.bfloat16, "5 rows"),
        ((4, 96), jnp.bfloat16, "96 features"),
        ((4, 2048), jnp.bfloat16, "2048 features"),
    ],
)
def test_the_kernel_names_what_it_cannot(shape, dtype, message):
    x = jnp.ones(shape, dtype)
    assert message in mosaic_gpu.unsupported(x)
    with pytest.raises(NotImplementedError, match=message):
        add_branch(x, x, None, None, implementation="mosaic_gpu")
