"""Newton-Schulz by XLA and by the Hopper kernels: values, gradients, lowering, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention_test import rms_error
from tests.kernels.newton_schulz_tpu_test import both, reference
from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, mosaic_gpu, symmetric, xla
from ttt_kernels.newton_schulz.mosaic_gpu_pair import Pair
from ttt_kernels.newton_schulz.mosaic_gpu_ring import Layout

EPS = 1e-7
BF16 = jnp.dtype(jnp.bfloat16)
interpreted = pytest.mark.skipif(
    compat.JAX_VERSION < (0, 11),
    reason="the Mosaic GPU interpreter needs jax >= 0.11; lowering is tested",
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def draw(shape, seed=0):
    """Matrices that are exact in bfloat16, and a cotangent."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)
    return x, jnp.asarray(rng.standard_normal(shape), jnp.float32)


def with_reset(function, *arguments):
    try:
        return jax.block_until_ready(function(*arguments))
    except Exception:
        compat.reset_gpu_interpreter()
        raise


def use(monkeypatch, layout):
    """Makes the kernels take a layout; backwards a ring."""
    backwards = Layout(64, 64, 2, 3) if isinstance(layout, Pair) else layout
    monkeypatch.setattr(mosaic_gpu, "choose_layout",
                        lambda *_, backward=False: backwards if backward else layout)


@pytest.mark.parametrize("shape", [(2, 6, 9), slow((3, 1, 7, 5))], ids=str)
def test_xla_equals_the_definition(shape):
    x, cotangent = draw(shape)
    xla_form = functools.partial(newton_schulz, coefficients=LACT_COEFFICIENTS,
                                 implementation="xla")
    transposed = x.shape[-2] > x.shape[-1]

    def definition(x):
        y = reference(x.mT if transposed else x, LACT_COEFFICIENTS)
        return y.mT if transposed else y

    for name, got, want in zip(("y", "dx"), jax.jit(functools.partial(both, xla_form))(
            x, cotangent), both(definition, x, cotangent), strict=True):
        assert_close(got, want, tolerance(jnp.float32, 5 * max(shape)), name)


def test_xla_gradient_is_that_of_its_forward_pass():
    x, cotangent = draw((2, 5, 8))
    with jax.enable_x64(True):
        x, cotangent = x.astype(jnp.float64) / 8, cotangent.astype(jnp.float64)
        by_rule = both(lambda x: xla._iterate(x, LACT_COEFFICIENTS), x, cotangent)[1]
        by_jax = both(lambda x: xla._forward(x, LACT_COEFFICIENTS)[0], x, cotangent)[1]
        assert_close(by_rule, by_jax, tolerance(jnp.float64, 64), "dx")


@interpreted
@pytest.mark.parametrize(
    "shape, layout",
    [((2, 128, 128), Pair(1)),
     slow((1, 64, 128), Layout(64, 64, 2, 3)),  # one tile of a symmetric step for two CTAs
     slow((1, 256, 256), Pair(2)), slow((1, 384, 384), Pair(3)),
     slow((2, 128, 128), Layout(64, 64, 4, 3)), slow((1, 100, 130), None),
     slow((2, 128, 256), Layout(128, 128, 2, 2)), slow((1, 192, 192), Layout(192, 192, 1, 4)),
     slow((1, 192, 128), Layout(64, 64, 2, 8)), slow((1, 128, 192), Layout(64, 192, 2, 3))],
    ids=str,
)
def test_hopper_kernels_equal_the_definition(monkeypatch, capfd, shape, layout):
    if layout is not None:
        use(monkeypatch, layout)
    x, cotangent = draw(shape)
    x = x.at[1:].set(0)  # the last matrix is zero
    coefficients = LACT_COEFFICIENTS[:2]
    kernel = functools.partial(mosaic_gpu.newton_schulz, coefficients=coefficients, eps=EPS,
                               dtype=BF16, interpret=compat.gpu_interpret_params())

    def results(x, cotangent):
        return kernel(x), *both(kernel, x, cotangent)

    alone, y, dx = with_reset(jax.jit(results), x, cotangent)
    assert "RACE" not in "".join(capfd.readouterr())
    assert jnp.array_equal(alone, y)  # nothing kept, and everything kept
    want = both(functools.partial(reference, coefficients=coefficients), x[:1], cotangent[:1])
    plain = both(functools.partial(newton_schulz, coefficients=coefficients, dtype=BF16,
                                   implementation="xla"), x[:1], cotangent[:1])
    for name, got, expected, other in zip(("y", "dx"), (y, dx), want, plain, strict=True):
        assert rms_error(got[:1], expected) < 1.1 * rms_error(other, expected), name
    if shape[0] > 1:
        slope = coefficients[0][0] * coefficients[1][0] / EPS
        assert float(jnp.abs(y[1:]).max()) == 0
        assert_close(dx[1:], slope * cotangent[1:], tolerance(BF16), "zero matrix")


@interpreted
@pytest.mark.parametrize("shape", [(1, 128, 192), slow((2, 1, 320, 256))], ids=str)
def test_symmetric_products_equal_the_definition(capfd, shape):
    x, cotangent = (y.astype(BF16) for y in draw(shape))
    coefficients = LACT_COEFFICIENTS[: 1 + (shape[0] > 1)]
    options = dict(coefficients=coefficients, eps=EPS, dtype=BF16)
    kernels = functools.partial(symmetric.newton_schulz, interpret=compat.gpu_interpret_params(),
                                **options)  # fmt: skip
    got = with_reset(jax.jit(functools.partial(both, kernels)), x, cotangent)
    assert "RACE" not in "".join(capfd.readouterr())
    plain = both(functools.partial(xla.newton_schulz, **options), x, cotangent)
    options["dtype"] = jnp.dtype(jnp.float32)
    wide = (y.astype(jnp.float32) for y in (x, cotangent))
    want = both(functools.partial(xla.newton_schulz, **options), *wide)
    for name, *values in zip(("y", "dx"), got, plain, want, strict=True):
        by_kernels, by_xla, expected = (y.astype(jnp.float32) for y in values)
        assert rms_error(by_kernels, expected) < 1.1 * rms_error(by_xla, expected), name


def test_symmetric_products_lower():
    def kernels(x):
        return symmetric.newton_schulz(x, LACT_COEFFICIENTS, EPS, BF16)

    shape = (6, 256, 512)
    program = lowered(functools.partial(both, kernels), shape, shape, dtype=BF16)
    for name in ("gram", "polynomial", "outer", "gram_gradient"):
        assert f"newton_schulz_{name}" in program
    assert program.count("custom_call @mosaic_gpu") == 4  # each kernel once, for all iterations


def test_rounding_by_place_keeps_what_is_no_number():
    nans = np.array([0x7FFFFFFF, 2**32 - 1], np.uint32).view(np.float32)
    odd = [np.inf, -np.inf, 0.0, -0.0, *nans]
    x = jnp.broadcast_to(jnp.asarray(odd, jnp.float32), (1, 64, 6))
    rounded = np.asarray(mosaic_gpu._dithered(x, BF16), np.float32)
    np.testing.assert_array_equal(rounded, np.asarray(x))


def lowered(function, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "shape, layouts",
    [((64, 384, 384), [None]), slow((48, 256, 256), [None]), slow((64, 128, 128), [None]),
     slow((12, 384, 384), [None, *(Layout(*numbers) for numbers in (
         (192, 192, 2, 4), (192, 192, 4, 4), (64, 64, 8, 8), (128, 192, 6, 5)))]),
     slow((2, 3, 768, 768), [None]), slow((128, 320, 100), [None]), slow((1, 64, 64), [None])],
    ids=str,
)
def test_every_layout_lowers(monkeypatch, shape, layouts):
    def kernel(x):
        return mosaic_gpu.newton_schulz(x, LACT_COEFFICIENTS, EPS, BF16)

    for layout in layouts:
        if layout is not None:
            use(monkeypatch, layout)
        program = lowered(kernel, shape)
        assert program.count("custom_call @mosaic_gpu") == 1
        assert "newton_schulz_forward" in program
        program = lowered(functools.partial(both, kernel), shape, shape)
        assert program.count("custom_call @mosaic_gpu") == 2
        assert "newton_schulz_forward" in program and "newton_schulz_backward" in program


def test_layouts_are_legal():
    for matrices in (1, 12, 14, 15, 28, 64, 66, 67, 500):
        for rows in range(64, 769, 64):
            for columns in (rows, 768):
                at_once = min(matrices, 66)
                layout = mosaic_gpu.choose_layout(matrices, rows, columns)
                if isinstance(layout, Pair):
                    assert rows == columns == 128 * layout.strips and 1 <= layout.strips <= 3
                    assert matrices > 14
                    layout = mosaic_gpu.choose_layout(matrices, rows, columns, backward=True)
                assert rows % layout.tile == 0 and columns % layout.tile == 0
                assert columns % layout.width == 0
                assert layout.cluster * at_once <= 132
                assert 1 <= layout.cluster <= (rows // layout.tile) * (columns // layout.width)


def test_choice_and_refusals(monkeypatch):
    x = jnp.ones((1, 64, 64))
    with pytest.raises(NotImplementedError, match="for a CPU, not a Hopper GPU.*'xla' can"):
        newton_schulz(x, dtype=BF16, implementation="mosaic_gpu")
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    for argument, dtype, words in (
        (x, jnp.float32, "dtype=float32"), (x.astype(jnp.float16), BF16, "x.dtype=float16"),
        (jnp.ones((1, 64, 832)), BF16, "768"), (jnp.ones((0, 64, 64)), BF16, "nothing to do"),
    ):
        with pytest.raises(NotImplementedError, match=f"{words}.*'xla' can"):
            newton_schulz(argument, dtype=dtype, implementation="mosaic_gpu")
    orthogonalise = functools.partial(newton_schulz, dtype=BF16)
    assert "newton_schulz_forward" in lowered(orthogonalise, (1, 64, 64))
    assert "mosaic_gpu" not in lowered(functools.partial(newton_schulz, dtype=jnp.float32),
                                       (1, 64, 64))
    assert "newton_schulz_gram" in lowered(orthogonalise, (6, 768, 832))
    assert "mosaic_gpu" not in lowered(orthogonalise, (5, 768, 832))  # too few tiles


@pytest.mark.parametrize(
    "arguments, words",
    [({"x": None}, "x=None.*array"), ({"x": [[1.0]]}, "x=.*array"),
     ({"x": jnp.ones(3)}, "matrices"), ({"x": jnp.ones((2, 2), int)}, "x has dtype.*cast it"),
     *(({"coefficients": bad}, "coefficients=.*finite")
       for bad in ((1.0, 2.0, 3.0), 5, "abc", ((1.0, 2.0),), ((1.0, float("nan"), 2.0),), None, {},
                   "", jnp.ones(4), ((10**400, 1, 1),))),
     *(({"eps": bad}, "eps=.*, 0 or more")
       for bad in ("a", -1.0, float("inf"), None, 1e39, 10**400)),
     ({"dtype": int}, "dtype=.*floating"), ({"dtype": "foo"}, "dtype='foo' must be"),
     ({"implementation": "foo"}, "implementation='foo' is unknown")],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        newton_schulz(**{"x": jnp.ones((2, 2)), **arguments})


def test_a_whole_number_beyond_int32_is_a_number():
    assert not newton_schulz(jnp.ones((2, 2)), (), eps=10**30).round(3).any()
