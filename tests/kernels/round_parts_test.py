"""round_parts: the kernel interpreted and lowered beside plain JAX, gradients, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttt_kernels import compat
from ttt_kernels.round_parts import mosaic_gpu, round_parts, xla

PARTS = ((2, 1), (1,), (1,))


def matrices(*shapes):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernel needs jax >= 0.11")
def test_the_kernel_in_the_interpreter(capfd):
    given = matrices((32, 3, 256), (16, 512), (16, 768))
    shapes = (32, 512), (32, 256), (16, 512), (16, 768)
    errors = tuple(x.astype(jnp.bfloat16) for x in matrices(*shapes))

    def results(function):
        made, pullback = jax.vjp(lambda x: function(x, PARTS), given)
        return made, pullback(errors)

    got = jax.jit(results, static_argnums=0)(
        functools.partial(mosaic_gpu.round_parts, interpret=True)
    )
    assert "RACE" not in "".join(capfd.readouterr())
    for a, b in zip(*map(jax.tree.leaves, (got, results(xla.round_parts))), strict=True):
        assert a.dtype == b.dtype
        assert jnp.array_equal(a, b)


@pytest.mark.skipif(compat.layout_problem() is not None, reason="the kernel needs jax >= 0.11")
def test_one_launch_for_all(monkeypatch):
    monkeypatch.setattr(compat, "hopper_problem", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "TIMED", True)
    shapes = (768, 3, 768), (768, 768), (3072, 768)
    given = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    step = jax.jit(lambda x: (round_parts(x, PARTS), round_parts(x, PARTS)))
    program = step.trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") == 1  # lowered once


def test_refusals():
    with pytest.raises(NotImplementedError, match="'xla' can"):
        round_parts(matrices((16, 256)), [(1,)], implementation="mosaic_gpu")
    for given, parts, words in (
        (matrices((4, 3, 2)), [(2,)], "add up to 3"), (matrices((4, 2)), [()], "add up to 1"),
        (matrices((4, 2)), [(1,), (1,)], "parts for each"), ((), [], "0 matrices"),
        (matrices((4,)), [(1,)], "has shape"), (([1.0],), [(1,)], "array"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            round_parts(given, parts)
