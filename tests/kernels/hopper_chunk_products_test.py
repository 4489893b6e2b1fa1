"""The chunk products by the Hopper kernels: every gradient, and every tiling that can be chosen."""

import functools

import jax.numpy as jnp

from tests.kernels import hopper
from tests.kernels.chunk_products_test import by_name, make
from ttt_kernels import chunk_outputs, chunk_summaries, compat
from ttt_kernels.chunk_products import mosaic_gpu
from ttt_kernels.chunk_products import tiling as tilings
from ttt_kernels.chunk_products.tiling import BLOCK

CASES = {  # batch, time, heads, key_dim, value_dim, chunk_size
    "LaCT": (1, 2100, 4, 384, 384, 512),
    "768": (1, 700, 2, 768, 768, 256),
    "padded widths": (2, 300, 3, 100, 72, 128),
    "128": (2, 900, 2, 128, 128, 256),
    "chunks of 100": (1, 777, 2, 192, 64, 100),
    "chunks of 7": (2, 50, 1, 64, 128, 7),
    "one token": (1, 1, 1, 64, 64, 64),
    "odd widths": (1, 500, 2, 512, 640, 320),
    "many rows": (64, 70, 1, 256, 256, 64),
    "narrow": (1, 23, 3, 5, 4, 7),
}


def check_products(case, way, change=lambda x: x, gather=None):
    x = change(make(case, jnp.bfloat16))
    given = hopper.scattered(x) if gather else x

    def results(name, x):
        return by_name.__wrapped__(hopper.gathered(x) if gather else x, case[-1], name)

    names = {"chunk_summaries", "chunk_states", "chunk_outputs"}
    kernels = functools.partial(results, hopper.implementation(way))
    got = hopper.run(way, kernels, given, kernels=names)
    if got is not None:
        hopper.check(got, hopper.exact(functools.partial(results, "reference"), given))


@hopper.ways(CASES, ordinary=("narrow",), xla=("one token",))
def test_operations_and_gradients(case, way):
    check_products(case, way)


@hopper.ways({"128": (2, 200, 2, 128, 128, 64)}, xla=("128",))
def test_rows_that_lie_apart(case, way):
    check_products(case, way, gather=True)


@hopper.ways({"128": (1, 200, 2, 128, 128, 64)}, xla=("128",))
def test_zeros(case, way):
    check_products(case, way, lambda x: {n: jnp.zeros_like(a) for n, a in x.items()})


def _summaries_tilings():
    """Each one at the narrowest widths that have it, and the widths of models."""
    found, sizes = {}, [BLOCK * i for i in range(1, tilings.MAX_HEAD_DIM // BLOCK + 1)]
    pairs = [(k, v) for k in sizes for v in sizes]
    for rated in (False, True):
        for widths in pairs:
            for t in tilings.summary_options(*widths, rated):
                found.setdefault(t, widths)
    made = {f"{t.warpgroups} x {t.columns}, {t.stages} slots": (w, t) for t, w in found.items()}
    for width in (384, 768):
        made |= {f"{width} wide, {t.stages} slots": ((width, width), t)
                 for t in tilings.summary_options(width, width, True)}  # fmt: skip
    return dict(reversed(made.items()))


@hopper.ways(_summaries_tilings(), ordinary=("1 x 64, 8 slots",))
def test_every_tiling_of_summaries(case, way):
    """float32 and bfloat16 results, with rates and without; two tiles of each, ragged chunks."""
    (key_dim, value_dim), tiling = case
    check_summaries(way, (1, 300, 2, key_dim, value_dim, 192), tiling)


def check_summaries(way, case, tiling):
    x, chunk_size = make(case, jnp.bfloat16), case[-1]
    rated = (False, True)
    if tiling is not None and tiling not in tilings.summary_options(*case[3:5], True):
        rated = (False,)  # with rates it does not fit
    kernels = mosaic_gpu.Kernels(summary_tiling=tiling)

    def results(x, run):
        return {
            f"{dtype} {'rated' if rate else 'plain'}": run(
                x["k"], x["v"], chunk_size, dtype=jnp.dtype(dtype),
                rates=x["rates"] if rate else None,
            )
            for dtype in ("float32", "bfloat16") for rate in rated
        }  # fmt: skip

    run = functools.partial(chunk_summaries, implementation="xla")
    program = functools.partial(results, run=run if way == "xla" else kernels.summaries)
    got = hopper.run(way, program, x, kernels={"chunk_summaries"})
    if got is not None:
        run = functools.partial(chunk_summaries, implementation="reference")
        hopper.check(got, hopper.exact(functools.partial(results, run=run), x))


@hopper.ways({"64": (64, 64), "384": (384, 384), "768": (768, 768)}, xla=("64",))
def test_keys_rated_in_place(case, way, monkeypatch):
    """The form for versions of JAX that do not infer layouts of registers."""
    monkeypatch.setattr(compat, "layout_problem", lambda: "as of jax 0.10")
    check_summaries(way, (1, 300, 2, *case, 192), None)


def _outputs_tilings():
    """Each one, with two slabs of value columns where that is possible."""
    found, sizes = {}, [BLOCK * i for i in range(1, tilings.MAX_HEAD_DIM // BLOCK + 1)]
    for key_dim in sizes:
        for value_dim in sizes:
            options = tilings.output_options(key_dim, value_dim, 4, 3)
            options += tilings.register_options(key_dim, value_dim, 4, 3)
            for t in options:
                name = f"{type(t).__name__} {key_dim} x {t.columns}, {t.stages} slots"
                if name not in found or value_dim == 2 * t.columns:
                    found[name] = (value_dim, t)
    return found


@hopper.ways(_outputs_tilings(), ordinary=("OutputTiling 64 x 64, 8 slots",))
def test_every_tiling_of_outputs(case, way):
    """Transposed and not, with rates and products with another array, ragged chunks."""
    value_dim, tiling = case
    case = (1, 300, 2, tiling.key_dim, value_dim, 192)
    x = make(case, jnp.bfloat16)
    kernels = mosaic_gpu.Kernels(output_tiling=tiling)

    def by_kernels(q, states, rates, other, transposed):
        return kernels.rated_outputs(q, states, rates, other, 192, transposed)

    def plainly(q, states, rates, other, transposed, name="reference"):
        out = chunk_outputs(q, states, 192, transposed=transposed, implementation=name)
        rated = out if rates is None else (out * rates[..., None]).astype(out.dtype)
        return rated, None if other is None else jnp.sum(out * other, -1, dtype=jnp.float32)

    def results(x, run):
        turned, rates = jnp.swapaxes(x["states"], -1, -2), x["rates"]
        made = dict(out=run(x["q"], x["states"], None, None, False)[0])
        made["turned"] = run(x["q"], turned, rates, None, True)[0]
        if isinstance(tiling, tilings.OutputTiling):  # the other form leaves products to this one
            made["rated"], made["dots"] = run(x["q"], turned, rates, x["v"], True)
        return made

    xla = functools.partial(plainly, name="xla")
    program = functools.partial(results, run=xla if way == "xla" else by_kernels)
    got = hopper.run(way, program, x, kernels={"chunk_outputs"})
    if got is not None:
        hopper.check(got, hopper.exact(functools.partial(results, run=plainly), x))


def test_there_are_tilings_of_both_forms():
    names = list(_outputs_tilings())
    assert any("Register" in n for n in names) and any("768" in n for n in names)
