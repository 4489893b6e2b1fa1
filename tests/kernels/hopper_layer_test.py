"""LaCT's whole layer with the Hopper kernels against recurrence in float32: all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.inner_loop import cases
from tests.inner_loop.kernel_mode_test import EXPECTED
from tests.kernels import hopper
from tests.tolerances import tolerance
from ttt_jax import presets
from ttt_kernels.newton_schulz import mosaic_gpu as newton_schulz
from ttt_kernels.newton_schulz.mosaic_gpu_pair import Pair

# Kernels of the gradients alone, and of what is not in every program of a variant.
_BACKWARD = {
    0: {"newton_schulz_backward", "swiglu_learn_errors"},
    1: {"newton_schulz_backward", "swiglu_errors"},
    2: {"newton_schulz_backward", "swiglu_errors"},
    3: {"newton_schulz_backward"},
    6: set(),
}
WIDE = dict(heads=4, dim=384, time=1300, chunk=512)  # LaCT-760M's heads; chunks by a ring of six
PAIRS = dict(heads=6, dim=128, time=700, chunk=256)  # 18 matrices likewise
SMALL = dict(heads=2, dim=64, time=200, chunk=64)
ODD = dict(heads=3, dim=100, time=270, chunk=100, batch=2)
APART = SMALL | dict(time=150, batch=2)
FULL = WIDE | dict(time=2300)  # 20 matrices: a pair of thread blocks each


def _cases():
    made = {f"V{v} wide": dict(variant=v, **WIDE) for v in (0, 2, 1, 3, 4, 5, 6)}
    made |= {"V2 five chunks": dict(variant=2, **FULL)}
    made |= {f"V{v} pairs": dict(variant=v, **PAIRS) for v in (2, 0, 3)}
    made |= {f"V{v} documents": dict(variant=v, **ODD, packed=True) for v in (0, 2, 6, 3, 1, 5)}
    made |= {f"V{v} one token": dict(variant=v, **SMALL | dict(time=1)) for v in (0, 2, 6)}
    made |= {f"V{v} zeros": dict(variant=v, **SMALL, zero=True) for v in (0, 2, 6)}
    made |= {f"V{v} carried": dict(variant=v, **SMALL, carried=77) for v in (0, 2, 6)}
    made |= {f"V{v} scattered": dict(variant=v, **APART, between=True) for v in (0, 2)}
    made |= {f"V{v} odd": dict(variant=v, **ODD) for v in (0, 2, 1, 3, 4, 5, 6)}
    return made


CASES = _cases()
IN_XLA = ("V2 documents", "V0 zeros", "V2 scattered", "V0 one token")


def make(spec, heads, dim, time, batch=1, packed=False, zero=False, carried=0):
    """(weights, tokens, ids, state) with tokens that are exact in bfloat16."""
    weights = spec.init(jax.random.key(3), heads, dim)
    total = carried + time
    _, tokens = cases.arguments(spec, time=total, batch=batch, heads=heads, dim=dim,
                                dtype="float32")  # fmt: skip
    tokens = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tokens)
    if zero:
        tokens |= {n: jnp.zeros_like(tokens[n]) for n in "qkv"}
    ids = state = None
    if packed:
        ids = np.zeros((batch, total), np.int32)
        ids[:, total // 2 :], ids[:, total // 3 : total // 3 + 5], ids[-1, -30:] = 1, -1, -1
        ids = jnp.asarray(ids)
    if carried:
        before, tokens = cases.cut(tokens, 0, carried), cases.cut(tokens, carried, total)
        _, state = cases.run(spec, weights, before)
    return weights, tokens, ids, state


@hopper.ways(CASES, ordinary=("V6 carried",), xla=IN_XLA)
def test_the_layer(case, way):
    """Output, final state and the gradients of weights, tokens and carried state.

    Newton-Schulz amplifies bfloat16's roundings, so what contains it is held to XLA's error.
    """
    options = dict(case)
    variant, between = options.pop("variant"), options.pop("between", False)
    spec = presets.lact_llm(variant, chunk_size=options.pop("chunk"))
    weights, tokens, ids, state = make(spec, **options)

    def results(mode, implementation, weights, tokens, ids, state):
        tokens = hopper.gathered(tokens) if between else tokens
        out, final, gradients = cases.gradients(
            spec, weights, tokens, ids, state, mode, implementation
        )
        parts = ("d_weights", "d_tokens", "d_state")
        return dict(out=out, final=final, **dict(zip(parts, gradients, strict=True)))

    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tokens)
    given = given if ids is None else hopper.with_nan(given, ids)
    given, tokens = (hopper.scattered(t) if between else t for t in (given, tokens))
    by_kernels = functools.partial(results, "kernel", hopper.implementation(way))
    names = EXPECTED["cuda", {4: 3, 5: 3}.get(variant, variant)]
    whole = options["time"] > spec.chunk_size  # else no update is ever read
    names = names | _BACKWARD[{4: 3, 5: 3}.get(variant, variant)] if whole else ()
    got = hopper.run(way, by_kernels, weights, given, ids, state, kernels=names)
    if got is None:
        return
    want = hopper.exact(
        functools.partial(results, "recurrent", None), weights, tokens, ids, state
    )
    plain = None
    if spec.orthogonalise is not None:
        by_xla = jax.jit(functools.partial(results, "kernel", "xla"))
        plain = by_xla(weights, given, ids, state)
        hopper.check(plain, want, bound=tolerance(jnp.bfloat16) / 4)
    hopper.check(got, want, plain)


def test_the_cases_take_pairs_and_rings():
    layouts = [newton_schulz.choose_layout(n, 384, 384) for n in (4, 12, 20)]
    assert [isinstance(x, Pair) for x in layouts] == [False, False, True]
    assert isinstance(newton_schulz.choose_layout(18, 128, 128), Pair)

