"""Linear attention by the Hopper kernels against the token-by-token reference in float32."""

import functools

import jax.numpy as jnp
import pytest

from tests.kernels import hopper
from tests.kernels.attention_battery import cotangents, make, results
from ttt_kernels import linear_attention
from ttt_kernels.linear_attention import mosaic_gpu, tiling

FULL = dict(decay=True, state=True, packed=True)
PLAIN = dict(decay=False, state=True, packed=False)
DECAY = dict(decay=True, state=True, packed=False)
TOKEN = {  # batch, length, heads, key_dim, value_dim; what there is; options of the launch
    "128 all": ((2, 700, 3, 128, 128), FULL, {}),
    "64 all": ((2, 500, 3, 64, 64), FULL, {}),
    "256 all": ((1, 500, 2, 256, 256), FULL, {}),
    "192 all": ((1, 500, 2, 192, 192), FULL, {}),
    "128 plain": ((1, 1003, 2, 128, 128), PLAIN, {}),
    "64 plain": ((1, 1003, 3, 64, 64), PLAIN, {}),
    "192 plain": ((1, 403, 2, 192, 192), PLAIN, {}),
    "256 plain": ((1, 403, 2, 256, 256), PLAIN, {}),
    "128 documents": ((1, 600, 2, 128, 128), PLAIN | dict(packed=True), {}),
    "no state": ((1, 300, 2, 128, 128), dict(decay=True, state=False, packed=False), {}),
    "one token": ((2, 1, 2, 128, 128), DECAY, {}),
    "seven tokens": ((2, 7, 1, 64, 128), FULL, {}),
    "48 x 100": ((1, 270, 3, 48, 100), FULL, {}),
    "160 x 256": ((1, 270, 1, 160, 256), FULL, {}),
    "many rows": ((70, 130, 2, 128, 128), DECAY, {}),
    "long": ((1, 4100, 1, 128, 128), DECAY, {}),
    "portable": ((1, 300, 2, 128, 128), FULL, dict(portable=True)),
}
TOKEN |= {f"{n} segments": ((1, 650, 2, 128, 128), DECAY, dict(segments_per_row=n))
          for n in (1, 2, 3, 5, 9, 10, 11)}  # fmt: skip


def _rings():
    """Every ring length that the tiling can choose for widths of each kind."""
    made = {}
    for key_dim, value_dim in ((128, 128), (64, 64), (256, 256), (192, 192), (64, 128), (128, 64),
                               (192, 128), (128, 192)):  # fmt: skip
        for decay in (True, False):
            sizes = (1, 330, 2, key_dim, value_dim)
            plan = tiling.choose(*sizes, decay=decay)
            options = tiling.stage_options(plan, decay)
            made |= {
                f"{key_dim} x {value_dim} {'decays' if decay else 'plain'}, ring of {n}":
                (sizes, DECAY if decay else PLAIN, dict(stages=n))
                for n in options if n != plan.stages
            }  # fmt: skip
    return made


CHUNK = {  # as above; options of the operation
    "384": ((1, 1100, 2, 384, 384), DECAY, dict(chunk_size=256)),
    "384, own chunk": ((1, 1100, 2, 384, 384), PLAIN,
                       dict(chunk_size=256, include_current_chunk=True)),
    "768": ((1, 300, 1, 768, 768), DECAY, dict(chunk_size=128)),
    "128": ((2, 500, 3, 128, 128), DECAY, dict(chunk_size=100, include_current_chunk=True)),
    "padded": ((1, 300, 2, 72, 100), DECAY, dict(chunk_size=64)),
    "one token": ((1, 1, 2, 128, 128), DECAY, dict(chunk_size=64)),
    "no state": ((1, 300, 2, 192, 64), dict(decay=False, state=False, packed=False),
                 dict(chunk_size=64)),
    "chunks of one": ((1, 20, 1, 64, 64), PLAIN, dict(chunk_size=1)),
}  # fmt: skip


def check(sizes, what, way, kernels, function, options, change=lambda x: x, between=False):
    """Values, final state and every gradient; NaN in the padding.

    Gradients of decays are differences of large sums, in which XLA in bfloat16 is as far off.
    """
    x, ids = make(1, *sizes, **what, dtype=jnp.bfloat16)
    x = change(x)
    given = x if ids is None else x | hopper.with_nan({n: x[n] for n in "qkv"}, ids)
    gather = hopper.gathered if between else lambda x: x
    if between:
        state = {n: x[n] for n in ("initial_state",) if n in x}
        given, x = (hopper.scattered({n: a for n, a in y.items() if n not in state}) | state
                    for y in (given, x))  # fmt: skip
    some = cotangents(gather({n: x[n] for n in ("q", "v")}))

    def program(function, x, ids):
        tokens = gather({n: a for n, a in x.items() if n != "initial_state"})
        return results(x | tokens, ids, function, some)

    got = hopper.run(way, functools.partial(program, function), given, ids, kernels=kernels)
    if got is None:
        return
    named = functools.partial(linear_attention, **options)
    reference = functools.partial(named, implementation="reference")
    want = hopper.exact(functools.partial(program, reference), x, ids)
    loose, plain = {}, None
    if "d_log_decay" in got:
        xla = functools.partial(named, implementation="xla")
        plain = {"d_log_decay": program(xla, given, ids)["d_log_decay"]}
        loose = {"d_log_decay": got.pop("d_log_decay")}
    hopper.check(got, {n: want[n] for n in got})
    if loose:
        hopper.check(loose, {"d_log_decay": want["d_log_decay"]}, plain, bound=0.005)


def by_token(way, options):
    if way == "xla":
        return functools.partial(linear_attention, implementation="xla")
    if options:
        return functools.partial(mosaic_gpu.linear_attention, **options)
    return functools.partial(linear_attention, implementation="mosaic_gpu")


@hopper.ways(TOKEN | _rings(), ordinary=("seven tokens",), xla=("48 x 100", "one token"))
def test_causal_by_token(case, way):
    sizes, what, options = case
    names = {"linear_attention_outputs"}
    if {tiling.padded_dim(width) for width in sizes[3:]} in ({64}, {128}):
        names |= {"linear_attention_key_value"}
    if sizes[1] > 64 and options.get("segments_per_row", 2) > 1 and sizes[0] < 64:
        names |= {"linear_attention_summaries", "linear_attention_prefix"}
    check(sizes, what, way, names, by_token(way, options), {})


@hopper.ways(CHUNK, xla=("padded", "chunks of one"))
def test_causal_by_chunk(case, way):
    sizes, what, options = case
    options = dict(options, causal="chunk")
    function = functools.partial(
        linear_attention, implementation=hopper.implementation(way), **options
    )
    names = {"chunk_summaries", "chunk_states", "chunk_outputs"}
    check(sizes, what, way, names, function, options)


ODD = {
    "zeros": dict(change=lambda x: {n: jnp.zeros_like(a) for n, a in x.items()}),
    "rows that lie apart": dict(between=True),
    "no decay is left": dict(change=lambda x: x | dict(log_decay=x["log_decay"] * 0 - 80)),
    "slow decays": dict(change=lambda x: x | dict(log_decay=x["log_decay"] * 1e-4)),
}


@pytest.mark.parametrize("causal", ["token", "chunk"])
@hopper.ways(ODD, xla=tuple(ODD))
def test_odd_arguments(case, way, causal):
    options = dict(causal="chunk", chunk_size=64) if causal == "chunk" else {}
    function = functools.partial(
        linear_attention, implementation=hopper.implementation(way), **options
    )
    check((2, 150, 2, 64, 128), DECAY, way, (), function, options, **case)
