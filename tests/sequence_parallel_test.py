"""A sequence cut over devices gives what one device gives: values, states and every gradient.

On one device ``jax.vmap`` with a named axis stands for the mesh axis; ``sequence_parallel_program``
runs on eight host devices in a process of its own.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases
from tests.tiny_run import program_environment
from tests.tolerances import assert_close, tolerance
from ttt_jax import presets
from ttt_jax.inner_loop import sequence_parallel
from ttt_jax.inner_loop.updates import initial_state

_ROOT = pathlib.Path(__file__).parent.parent
_DEVICES, _TIME = 4, 24


def _v(variant, **changes):
    spec = presets.lact_llm(variant, chunk_size=5)
    if spec.orthogonalise is not None:  # one iteration: less to compile
        changes["orthogonalise"] = ttt_jax.NewtonSchulz(coefficients=((2.0, -1.5, 0.5),))
    return dataclasses.replace(spec, **changes)


_NORMED = dataclasses.replace(presets.lact_llm(6), weight_norm=ttt_jax.WeightNorm())
SPECS = {
    "V2": (_v(2), {}),
    "V6, ring, chunk longer than a shard": (_v(6, chunk_size=8), {"exchange": "ring"}),
    "weight norm, pipeline": (dataclasses.replace(_NORMED, chunk_size=5), {}),
    "mamba2": (presets.mamba2(), {}),
}
MORE = {
    "V0, pipeline": (_v(0), {}),
    "V1, pipeline": (_v(1), {}),
    "V1, pipeline, groups": (_v(1), {"groups": 2}),
    "V3, ring": (_v(3), {"exchange": "ring"}),
    "V4": (_v(4), {}),
    "V5": (_v(5), {}),
    "V2, window": (_v(2, window=10), {}),
    "forget, steps": (_v(3, forget="per_token", steps=2), {}),
    "forget a head, pipeline": (_v(1, forget=(0.9, 0.7)), {}),
    "retnet": (presets.retnet(heads=2), {}),
    "linear_attention": (presets.linear_attention(), {}),
    "token by token with momentum": (_v(5, chunk_size=1, order="update_then_apply"), {}),
    "deltanet": (presets.deltanet(), {}),
    "gated_deltanet, ring": (presets.gated_deltanet(), {"exchange": "ring"}),
    "rwkv7": (presets.rwkv7(), {}),
    "gla, one gate a channel": (presets.gla(), {}),
    "deltanet, pipeline": (presets.deltanet(), {"mode": "recurrent"}),
    "ttt_linear, pipeline": (dataclasses.replace(presets.ttt_linear(), chunk_size=5), {}),
}


@functools.partial(jax.jit, static_argnames=("spec", "options"))
def _gradients(spec, options, weights, tokens, ids, state, devices):
    """Outputs, final state and gradients: of the whole sequence, or of ``devices`` parts of it."""

    def whole(weights, tokens, state):
        return cases.run(spec, weights, tokens, ids, state)

    def parts(weights, tokens, state):
        return _parts(spec, weights, tokens, ids, state, **dict(options))

    return _pull_back(whole if devices is None else parts, weights, tokens, state)


def _parts(spec, weights, tokens, ids, state, **options):
    """Outputs and final state of the parts, each in a place of its own along "seq"."""

    def part(tokens, ids):
        rest = {name: x for name, x in tokens.items() if name not in "qkv"}
        out, final = sequence_parallel.ttt(
            spec, weights, tokens["q"], tokens["k"], tokens["v"], axis_name="seq",
            segment_ids=ids, initial_state=state, **rest, **options,
        )  # fmt: skip
        return out, sequence_parallel.final_state(final, "seq")

    cut = jax.tree.map(_cut, (tokens, ids))
    outs, finals = jax.vmap(part, axis_name="seq")(*cut)
    return jnp.concatenate(list(outs), 1), jax.tree.map(lambda x: x[0], finals)


def _pull_back(run, weights, tokens, state):
    """Gradients of weights, tokens and carried state, with outputs and final state."""

    def loss(floats):
        weights, tokens, leaves = floats
        out, final = run(weights, tokens, jax.tree.unflatten(jax.tree.structure(state), leaves))
        leaves = [x for _, x in cases.named_leaves((out, final))]
        total = sum(
            jnp.sum(x * np.random.default_rng(n).normal(size=x.shape)) for n, x in enumerate(leaves)
        )
        return total, (out, final)

    gradient = jax.grad(loss, has_aux=True, allow_int=True)
    return gradient((weights, tokens, jax.tree.leaves(state)))


def _cut(x):
    return jnp.moveaxis(x.reshape(x.shape[0], _DEVICES, -1, *x.shape[2:]), 1, 0)


def _compare(spec, options, ids, carried):
    with jax.enable_x64(True):
        shapes = dict(dim=3, channel_gate=spec == presets.gla())
        weights, tokens = cases.arguments(spec, time=_TIME, **shapes)
        state = None
        if carried:
            _, before = cases.arguments(spec, time=8, seed=1, **shapes)
            earlier = None if ids is None else jnp.asarray([[1] * 3 + [0] * 5, [2] * 8])
            _, state = cases.run(spec, weights, before, earlier)
        ids = None if ids is None else jnp.asarray(ids, jnp.int32)
        arguments = (weights, tokens, ids, state)
        expected = _gradients(spec, (), *arguments, None)
        found = _gradients(spec, tuple(options.items()), *arguments, True)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), found, expected)
        for (name, a), (_, b) in zip(
            cases.named_leaves(found), cases.named_leaves(expected), strict=True
        ):
            assert_close(a, b, 1e-11, name)
        buffers = [x[1][1].buffer for x in (found, expected)]
        if buffers[0] is not None:
            np.testing.assert_array_equal(*(buffer.count for buffer in buffers))


@st.composite
def _documents(draw):
    """Two rows of runs of ids, padding anywhere, ids that come back."""
    rows = []
    for _ in range(2):
        row = []
        while len(row) < _TIME:
            row += [draw(st.integers(-1, 2))] * draw(st.integers(1, 11))
        rows.append(row[:_TIME])
    return rows


def _across_the_cuts(examples):
    """Runs a test on some random packings, and on rows whose first or middle shards are empty."""

    def decorate(test):
        test = hypothesis.example(ids=[[-1] * 7 + [0] * 17, [0] * 13 + [-1] * 11])(test)
        test = hypothesis.example(ids=[[-1] * _TIME, [0] * 5 + [-1] * 7 + [0] * 12])(test)
        test = hypothesis.given(ids=_documents())(test)
        settings = dict(max_examples=examples, deadline=None, derandomize=True)
        return hypothesis.settings(**settings)(test)

    return decorate


@pytest.mark.parametrize("name", SPECS)
@_across_the_cuts(examples=10)
def test_documents_across_the_cuts(name, ids):
    _compare(*SPECS[name], ids, carried=name == "V2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", SPECS | MORE)
@_across_the_cuts(examples=60)
def test_documents_across_the_cuts_everywhere(name, carried, ids):
    _compare(*(SPECS | MORE)[name], ids, carried)


@pytest.mark.exhaustive
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("name", SPECS | MORE)
def test_rows_of_one_document(name, carried):
    _compare(*(SPECS | MORE)[name], None, carried)


INCLUSIVE = _v(5, chunk_size=3, order="update_then_apply")


def test_chunks_that_end_at_the_cuts():
    _compare(INCLUSIVE, {}, None, carried=False)


def test_spans_are_the_union_of_what_the_devices_have_of_them():
    """Two updates of two steps, gates, means over tokens, from a carried state."""
    loss = dataclasses.replace(presets.lact_llm(0).loss, reduction="mean")
    # The weight norm is what makes an update no sum of the devices' own.
    fields = dict(chunk_size=None, forget="per_token", loss=loss, orthogonalise=None, steps=2)

    def spec(given, time):
        spans = (ttt_jax.Span(0, given, True, True), ttt_jax.Span(given, time, True, True))
        return _v(0, order=spans, **fields)

    # The whole has the first four tokens of every device, then the last two of each.
    first = np.arange(_TIME).reshape(_DEVICES, -1)[:, :4].ravel()
    order = np.concatenate([first, np.setdiff1d(np.arange(_TIME), first)])

    def whole(weights, tokens, state):
        tokens = jax.tree.map(lambda x: x[:, order], tokens)
        out, final = cases.run(spec(len(first), _TIME), weights, tokens, None, state)
        return out[:, np.argsort(order)], final

    def parts(weights, tokens, state):
        return _parts(spec(4, _TIME // _DEVICES), weights, tokens, None, state)

    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec(1, 2), time=_TIME, dim=3)
        state = jax.tree.map(lambda x: 1.1 * x + 0.1, initial_state(spec(1, 2), weights, 2))
        runs = (jax.jit(functools.partial(_pull_back, run)) for run in (parts, whole))
        found, expected = (run(weights, tokens, state) for run in runs)
        leaves = zip(*map(cases.named_leaves, (found, expected)), strict=True)
        for (name, a), (_, b) in leaves:
            assert_close(a, b, 1e-11, name)


@pytest.mark.parametrize(
    "spec, options, ids, message",
    [
        (presets.titans(depth=2), {"mode": "kernel"}, None, "momentum carries updates"),
        (_v(0), {"mode": "parallel"}, None, "update='all'"),
        (_v(2), {"exchange": "mail"}, None, "exchange='mail'"),
        (_v(0), {"groups": 3}, None, r"groups=3 must divide .* 2 \* 2"),
        (
            presets.titans(depth=1),
            {"mode": "parallel"},
            None,
            "mode='parallel' with .*loss=Squared.* use mode='recurrent'",
        ),
        (INCLUSIVE, {}, "packed", r"sequence_length=24 over mesh.seq=4: with packed"),
        (
            dataclasses.replace(INCLUSIVE, chunk_size=4),
            {},
            None,
            r"chunk_size=4 and sequence_length=24 over mesh.seq=4: with 6 tokens a device",
        ),
        (presets.vittt_glu(), {}, None, "one chunk of all tokens with sequence_length=24"),
    ],
)
def test_what_cannot_run_is_refused(spec, options, ids, message):
    weights, tokens = cases.arguments(spec, time=_TIME, dim=3, dtype="float32")
    ids = None if ids is None else jnp.zeros((2, _TIME), jnp.int32)
    with pytest.raises(ValueError, match=message):
        _gradients(spec, tuple(options.items()), weights, tokens, ids, None, True)


@pytest.fixture(scope="module", params=["", pytest.param("all", marks=pytest.mark.exhaustive)])
def eight_devices(request):
    """What tests/sequence_parallel_program.py prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "tests.sequence_parallel_program", *request.param.split()]
    done = subprocess.run(
        command, env=program_environment(XLA_FLAGS=flags), cwd=_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_eight_devices_are_one_device_and_bytes_moved_are_those_stated(eight_devices):
    for name, found in eight_devices.items():
        limit = tolerance(found["dtype"], found["time"])
        assert max(found["errors"].values()) <= limit, (name, found["errors"])
        assert found["stated"] == found["compiled"], name
        assert found["stated"] > 0, name
