"""norm_parts: values and gradients against the definition, the kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, row_walk
from ttt_kernels.norm_parts import mosaic_gpu, norm_parts, xla

BF16_RMS = 0.01
CASES = {  # kinds, size of a group, groups of a part
    "attention": (("rms", "rms"), 64, 12),
    "out": (("rms",), 768, 1),
    "query": (("unit",), 192, 1),
    "key and value": (("unit", "silu"), 64, 3),
    "wide key and value": (("unit", "silu"), 768, 1),
    "key": (("rms",), 64, 6),
    "mixed": (("silu", "rms", "unit"), 128, 2),
}


def make(case, dtype, rows=24):
    kinds, size, groups = CASES[case]
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, len(kinds) * groups * size)), dtype)
    shape = (len(kinds), size)
    return x, jnp.asarray(random.normal(size=shape), jnp.float32) if "rms" in kinds else None


def plain(x, scales, kinds, size, epsilon):
    made = []
    for n, part in enumerate(jnp.split(x, len(kinds), axis=1)):
        y = part.reshape(len(x), -1, size)
        if kinds[n] == "rms":
            y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + epsilon) * scales[n]
        else:
            y = y / (1 + jnp.exp(-y))
        if kinds[n] == "unit":
            y = y / (jnp.sqrt(jnp.sum(y**2, axis=-1, keepdims=True)) + epsilon)
        made.append(y.reshape(part.shape))
    return tuple(made)


@functools.partial(jax.jit, static_argnums=(2, 3))
def results(x, scales, function, case):
    kinds, size, _ = CASES[case]
    out, pullback = jax.vjp(lambda *a: function(*a, kinds, size, 1e-5), x, scales)
    random = np.random.default_rng(1)
    errors = tuple(jnp.asarray(random.normal(size=y.shape), y.dtype) for y in out)
    return [*out, *(g for g in pullback(errors) if g is not None)]


@pytest.mark.parametrize("case", CASES)
def test_the_plain_form_is_the_definition(case):
    x, scales = make(case, jnp.float32)
    pairs = zip(*(results(x, scales, f, case) for f in (xla.norm_parts, plain)), strict=True)
    for got, want in pairs:
        assert_close(got, want, tolerance(jnp.float32, 24), case)


def interpreted(*arguments):
    try:
        return mosaic_gpu.norm_parts(*arguments, interpret=True)
    except Exception:
        compat.reset_gpu_interpreter()
        raise


needs_layouts = pytest.mark.skipif(
    compat.layout_problem() is not None, reason="the kernels need jax >= 0.11"
)


@needs_layouts
@pytest.mark.parametrize(
    "case",
    ["attention", "key and value"]
    + [pytest.param(c, marks=pytest.mark.exhaustive)
       for c in CASES if c not in ("attention", "key and value")],
)  # fmt: skip
def test_the_kernels_in_the_interpreter(case, monkeypatch, capfd):
    """With race detection; rings that go round, and shares of uneven size."""
    monkeypatch.setattr(row_walk, "CTAS", 1)
    jax.clear_caches()  # of programs that were made with another number
    x, scales = make(case, jnp.bfloat16, rows=76)
    found = results(x, scales, interpreted, case)
    assert "RACE" not in "".join(capfd.readouterr())
    for got, want in zip(found, results(x.astype(jnp.float32), scales, plain, case), strict=True):
        error = np.asarray(got, np.float64) - np.asarray(want)
        assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)) < BF16_RMS, got.shape


@pytest.mark.parametrize("name", ["xla", pytest.param("mosaic_gpu", marks=needs_layouts)])
def test_zero_rows_have_finite_gradients(name):
    function = {"xla": xla.norm_parts, "mosaic_gpu": interpreted}[name]
    for array in results(jnp.zeros((4, 192), "bfloat16"), None, function, "query"):
        assert np.isfinite(np.asarray(array, np.float32)).all()


@needs_layouts
@pytest.mark.parametrize(
    ("kinds", "size", "groups"),
    [(("rms", "rms"), 64, 12)]
    + [
        pytest.param(kinds, size, groups, marks=pytest.mark.exhaustive)
        for kinds in (("rms",), ("unit", "silu"))
        for size, groups in (
            (64, 1), (64, 2), (64, 3), (64, 4), (64, 6), (64, 16), (128, 1), (128, 3), (128, 6),
            (192, 1), (192, 2), (192, 4), (256, 1), (256, 3), (320, 3), (384, 1), (384, 2),
            (512, 2), (576, 1), (768, 1), (1024, 1),
        )
    ],
)  # fmt: skip
def test_the_kernels_lower(kinds, size, groups):
    x = jax.ShapeDtypeStruct((4096, len(kinds) * groups * size), jnp.bfloat16)
    scales = jax.ShapeDtypeStruct((len(kinds), size), jnp.float32) if "rms" in kinds else None

    def both(x, scales):
        out, pullback = jax.vjp(lambda *a: mosaic_gpu.norm_parts(*a, kinds, size, 1e-5), x, scales)
        return pullback(out)

    text = jax.jit(both).trace(x, scales).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=None), "x=None must be an array"),
        (dict(x=jnp.ones(6)), "x has shape \\(6,\\)"),
        (dict(kinds=("l2", "rms")), "kinds=\\('l2', 'rms'\\) must be a tuple of"),
        (dict(kinds=()), "kinds=\\(\\) must be"),
        (dict(size=5), "size=5 must divide each of the 2 parts of the 12 features"),
        (dict(scales=None), "scales=None with"),
        (dict(kinds=("unit", "silu")), "it alone"),
        (dict(scales=jnp.ones(3)), "scales has shape \\(3,\\); it must be \\(2, 3\\)"),
        (dict(implementation="triton"), "implementation='triton' is unknown"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = dict(x=jnp.ones((2, 12)), scales=jnp.ones((2, 3)), kinds=("rms", "rms"), size=3)
    with pytest.raises(ValueError, match=message):
        norm_parts(**given | dict(epsilon=0.0) | change)


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "message"),
    [
        ((4, 64), jnp.float32, 64, "float32"),
        ((5, 64), jnp.bfloat16, 64, "5 rows"),
        ((4, 96), jnp.bfloat16, 96, "groups of 96"),
        ((4, 1536), jnp.bfloat16, 64, "parts of 1536"),
    ],
)
def test_the_kernel_names_what_it_cannot(shape, dtype, size, message):
    x = jnp.ones(shape, dtype)
    options = dict(kinds=("unit",), size=size, epsilon=0.0)
    with pytest.raises(NotImplementedError, match=message):
        norm_parts(x, **options, implementation="mosaic_gpu")
