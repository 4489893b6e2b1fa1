"""The fast weight by the Hopper kernels: values, sums and second derivatives in every plan."""

import functools

import jax.numpy as jnp

from tests.kernels import hopper
from tests.kernels.fast_weight_test import hidden_by, hidden_results, make, named, results
from ttt_kernels.fast_weight import mosaic_gpu_plan as plans

SIZES = {  # batch, length, heads, key_dim, hidden, value_dim
    "LaCT": (1, 1500, 4, 384, 384, 384),
    "padded": (2, 270, 3, 100, 200, 72),
    "small": (1, 5, 2, 64, 64, 64),
    "one token": (4, 1, 4, 64, 96, 64),
    "a few": (2, 7, 1, 24, 40, 16),
    "widest": (1, 300, 2, 768, 384, 768),
    "many rows": (70, 65, 2, 64, 64, 64),
}
SMALL = ("a few", "one token")


def _plans(parts, results):
    """Sizes that have each plan that can be chosen, the narrowest."""
    found = {}
    for key_dim in range(64, 769, 64):
        for hidden in range(32, 385, 32):
            p = plans.choose(1, 200, 1, key_dim, hidden, parts=parts, results=results)
            name = f"slabs of {p.slab}, {p.stages} slots, {p.buffers} to store"
            found.setdefault(name, (1, 200, 2, key_dim, hidden, 64))
    return found


HIDDEN = SIZES | _plans(2, 1)
LEARN = SIZES | _plans(4, 6)
LAST = SIZES | _plans(2, 2)


def prepared(sizes, rates):
    return make(11, *sizes, rates=rates, dtype=jnp.bfloat16)


@hopper.ways({n: (s, True) for n, s in HIDDEN.items()} | {
    "no rates": (SIZES["padded"], False)}, xla=SMALL)  # fmt: skip
def test_hidden(case, way):
    """Hidden activations and their gradients; all rows share the matrices."""
    sizes, rated = case
    weights, x = prepared(sizes, 1)
    weights = [weights[n][:1].astype(jnp.bfloat16) for n in ("w0", "w2")]
    tokens, rates = jnp.swapaxes(x["q"], 1, 2), jnp.swapaxes(x["rates"][..., 0], 1, 2)
    arguments = (*weights, tokens, rates if rated else None)

    def program(name, *arguments):
        made = hidden_results.__wrapped__(hidden_by(name), *arguments)
        return {n: a for n, a in made.items() if a is not None}

    kernels = {"swiglu_hidden", "swiglu_errors"}
    by_kernels = functools.partial(program, hopper.implementation(way))
    got = hopper.run(way, by_kernels, *arguments, kernels=kernels)
    if got is not None:
        hopper.check(got, hopper.exact(functools.partial(program, "reference"), *arguments))


def check(way, weights, x, trained, kernels, between=False):
    given = hopper.scattered(x) if between else x

    def program(name, weights, x):
        x = hopper.gathered(x) if between else x
        return results.__wrapped__(weights, x, named(name), trained)

    by_kernels = functools.partial(program, hopper.implementation(way))
    got = hopper.run(way, by_kernels, weights, given, kernels=kernels)
    if got is not None:
        want = hopper.exact(functools.partial(program, "reference"), weights, given)
        hopper.check(got, want)


@hopper.ways(LEARN, xla=SMALL)
def test_all_gradients(case, way):
    """Applied, the sums of all three gradients, and every derivative of both."""
    kernels = {"swiglu_hidden", "swiglu_errors", "swiglu_learn", "swiglu_learn_errors"}
    check(way, *prepared(case, 3), "all", kernels)


@hopper.ways(LAST, xla=SMALL)
def test_gradient_of_the_last(case, way):
    kernels = {"swiglu_hidden", "swiglu_errors"}
    check(way, *prepared(case, 1), "last", kernels)


WIDE = {
    "LaCT-NVS": (1, 60, 1, 768, 1536, 768),  # the reference has every token's outer products
    "small": (2, 8, 1, 64, 1024, 64),
    "two tokens": (2, 2, 1, 64, 512, 64),
    "pieces of 128": (3, 44, 1, 64, 1152, 64),
}


@hopper.ways(WIDE, xla=("small",))
def test_between_the_products_of_xla(case, way):
    kernels = {f"glu_{what}_{pass_}" for what in ("errors", "hidden")
               for pass_ in ("forward", "backward")}  # fmt: skip
    check(way, *prepared(case, 3), "all", kernels)


ODD = {f"{what}, {trained}": (what, trained)
       for what in ("zeros", "rows that lie apart") for trained in ("all", "last")}


@hopper.ways(ODD, ordinary=("zeros, all",), xla=tuple(ODD)[1:])
def test_odd_arguments(case, way):
    what, trained = case
    sizes = (2, 40, 2, 64, 32, 64)
    weights, x = prepared(sizes, 3 if trained == "all" else 1)
    if what == "zeros":
        x = {n: jnp.zeros_like(a) for n, a in x.items()}
    check(way, weights, x, trained, {"swiglu_hidden"}, between=what != "zeros")


def test_plans_of_every_kind():
    assert len(_plans(2, 1)) == 9 and len(_plans(4, 6)) == 4
