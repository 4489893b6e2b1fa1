"""Newton-Schulz by the Hopper kernels, in every layout that the tiling can choose."""

import functools

import jax
import jax.numpy as jnp

from tests.kernels import hopper
from tests.kernels.newton_schulz_tpu_test import both
from ttt_kernels import newton_schulz
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, MUON_COEFFICIENTS, mosaic_gpu
from ttt_kernels.newton_schulz.mosaic_gpu_step import BLOCK

EPS = 1e-7
CASES = {
    "LaCT, all chunks": dict(shape=(20, 384, 384)),
    "LaCT, one chunk": dict(shape=(3, 4, 384, 384)),
    "pairs of 128": dict(shape=(20, 128, 128)),
    "pairs of 256": dict(shape=(15, 256, 256)),
    "more than run at once": dict(shape=(70, 384, 384)),
    "few, wide": dict(shape=(2, 768, 768)),
    "few, 128 rows": dict(shape=(2, 128, 256)),
    "few, 256 rows": dict(shape=(2, 256, 512)),
    "one tile": dict(shape=(3, 64, 64)),
    "two tiles": dict(shape=(2, 64, 128)),
    "many, 128 rows": dict(shape=(20, 128, 256)),
    "many, 192 rows": dict(shape=(20, 192, 384)),
    "many, wide": dict(shape=(16, 768, 768)),
    "tall and ragged": dict(shape=(20, 320, 100)),
    "small and ragged": dict(shape=(3, 7, 5)),
    "large numbers": dict(shape=(20, 384, 384), scale=1e6),
    "small numbers": dict(shape=(20, 384, 384), scale=1e-4),
    "bfloat16": dict(shape=(20, 256, 256), dtype=jnp.bfloat16),
    "Muon's triple": dict(shape=(12, 384, 384), coefficients=MUON_COEFFICIENTS),
    "scattered": dict(shape=(20, 128, 128), between=True),
    "wider than one launch": dict(shape=(6, 768, 1536), form="symmetric"),
    "symmetric, tall": dict(shape=(3, 320, 256), form="symmetric"),
}  # fmt: skip


@hopper.ways(CASES, ordinary=("small and ragged",), xla=("two tiles",))
def test_newton_schulz(case, way):
    """Values, alone and with what gradients keep, and gradients; the last matrix is zero.

    Five iterations amplify bfloat16's roundings: the kernels are held to XLA's error.
    """
    shape, between = case["shape"], case.get("between", False)
    dtype = case.get("dtype", jnp.float32)
    x = (hopper.draw(0, *shape) * case.get("scale", 1.0)).astype(dtype)
    x = x.at[-1].set(0) if len(shape) == 3 else x
    cotangent = hopper.draw(1, *shape, dtype=dtype)
    iterate = functools.partial(
        newton_schulz, coefficients=case.get("coefficients", LACT_COEFFICIENTS), eps=EPS
    )

    def results(x, cotangent, **options):
        x = hopper.gathered(x) if between else x
        run = functools.partial(iterate, **options)
        y, dx = both(run, x, cotangent)
        return dict(alone=run(x), y=y, dx=dx)

    given = hopper.scattered(x) if between else x
    form, steps = case.get("form", "mosaic_gpu"), ("forward", "backward")
    if form == "symmetric":
        steps = ("gram", "polynomial", "outer", "gram_gradient")
    options = dict(dtype=jnp.bfloat16, implementation=hopper.implementation(way, form))
    names = {f"newton_schulz_{step}" for step in steps}
    got = hopper.run(way, functools.partial(results, **options), given, cotangent, kernels=names)
    if got is None:
        return
    options |= dict(implementation="xla")
    plain = jax.jit(functools.partial(results, **options))(given, cotangent)
    want = hopper.exact(functools.partial(results, implementation="xla"), given, cotangent)
    assert _along(x, got["dx"]) < 1e-4
    if len(shape) == 3:
        assert float(jnp.abs(got["y"][-1]).max()) == 0
        zero = ({"dx of zero": made["dx"][-1]} for made in (got, want))
        hopper.check(*zero, bound=0.02)  # a product of five coefficients, each rounded
        got, plain, want = ({n: a[:-1] for n, a in made.items()} for made in (got, plain, want))
    hopper.check(got, want, plain, bound=1e-3)


def _along(x, dx):
    """The gradient goes across the matrix, of whose length nothing depends: the cosine of both.

    Momentum's gradient is the product of dx with a matrix much like x.
    """
    x, dx = (a.astype(jnp.float32).reshape(-1, a.shape[-2] * a.shape[-1])[:-1] for a in (x, dx))
    squares = jnp.sum(x**2, 1) * jnp.sum(dx**2, 1)
    return float(jnp.sqrt(jnp.mean(jnp.sum(x * dx, 1) ** 2 / squares)))


def test_the_cases_have_every_layout():
    def layouts(sizes):
        return {mosaic_gpu.choose_layout(*s, backward=b) for s in sizes for b in (False, True)}

    taken = []
    for case in CASES.values():
        if "form" in case:
            continue
        *count, rows, columns = case["shape"]
        rows, columns = sorted(-(-size // BLOCK) * BLOCK for size in (rows, columns))
        number = functools.reduce(lambda a, b: a * b, count)
        taken.append((number, rows, columns))
    sizes = range(BLOCK, mosaic_gpu.LARGEST + 1, BLOCK)
    possible = [(n, r, c) for n in (1, 12, 14, 15, 64, 70) for r in sizes for c in sizes if r <= c]
    assert layouts(possible) <= layouts(taken)
