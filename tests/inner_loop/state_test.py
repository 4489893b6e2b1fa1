"""Documents, carried states, decoding: packed = alone, split = whole, one by one = at once."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import WeightNorm, losses, presets

LIMIT = 1e-12
LACT = presets.lact_llm(0, chunk_size=4)
SPECS = {
    "lact_v0": LACT,
    "lact_prenorm": dataclasses.replace(LACT, weight_norm=WeightNorm(form="pre")),
    "lact_v2": presets.lact_llm(2, chunk_size=4),
    "linear_attention": presets.linear_attention(),
    "gated_delta": ttt_jax.InnerLoop(
        loss=losses.Squared(), rate="per_token", forget="per_token", chunk_size=1
    ),
}
TIME = 24


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _ids():
    """Documents of 1, 9, 9 and 3 tokens with padding inside and behind; one long document."""
    row = np.repeat(np.arange(4), [1, 9, 9, 3])
    row = np.concatenate([row[:8], [-1], row[8:], [-1]])
    return jnp.asarray(np.stack([row, np.full(TIME, 7)]), jnp.int32)


def _assert_same(found, expected, what):
    pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
    for (name, a), (_, b) in pairs:
        assert_close(a, b, LIMIT, what + name)


_OFTEN = ("lact_v0", "lact_v2", "linear_attention", "gated_delta")


@pytest.mark.parametrize(
    "name", [*_OFTEN, pytest.param("lact_prenorm", marks=pytest.mark.exhaustive)]
)
def test_packed_documents_are_documents_alone(name):
    """Outputs and gradients of each document, and the state of each row's last one."""
    spec, ids = SPECS[name], _ids()
    weights, tokens = cases.arguments(spec, time=TIME)
    mode = "parallel" if ttt_jax.explain(spec).parallel else "recurrent"
    poisoned = {
        n: jnp.where((ids >= 0).reshape(ids.shape + (1,) * (x.ndim - 2)), x, jnp.nan)
        for n, x in tokens.items()
    }
    out, state, (_, by_token, _) = cases.gradients(spec, weights, poisoned, ids, mode=mode)
    assert not np.any(np.asarray(out)[np.asarray(ids) < 0])
    for n, gradient in by_token.items():
        assert np.all(np.isfinite(gradient)), n
    for row, document in ((0, 1), (0, 2), (1, 7)):
        where = np.flatnonzero(np.asarray(ids[row]) == document)
        alone = {n: x[row : row + 1, where] for n, x in tokens.items()}
        expected, final = cases.run(spec, weights, alone)
        assert_close(out[row, where], expected[0], LIMIT, f"document {document}")
    last = jax.tree.map(lambda x: x[1:], state)
    assert (int(last.document[0]), int(final.document[0])) == (7, -1)
    _assert_same(last._replace(document=final.document), final, "state")


def test_rows_do_not_see_each_other():
    spec = SPECS["lact_v0"]
    weights, tokens = cases.arguments(spec, time=TIME, batch=3)
    out, _ = cases.run(spec, weights, tokens)
    single, _ = cases.run(spec, weights, {n: x[1:2] for n, x in tokens.items()})
    assert_close(out[1:2], single, LIMIT)


@pytest.mark.parametrize("name", SPECS)
def test_split_is_whole(name):
    """Inside a chunk, in mixed modes, with the gradient of the first half through the state."""
    spec, point = SPECS[name], 7
    weights, tokens = cases.arguments(spec, time=TIME)
    other = "parallel" if ttt_jax.explain(spec).parallel else "recurrent"

    def loss(tokens, split):
        if split:
            first, state = cases.run(spec, weights, cases.cut(tokens, 0, point), mode=other)
            rest = cases.cut(tokens, point, TIME)
            second, state = cases.run(spec, weights, rest, None, state, mode="recurrent")
            out = jnp.concatenate([first, second], 1)
        else:
            out, state = cases.run(spec, weights, tokens)
        return jnp.sum(out[:, -3:] ** 2), (out, state)

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    _assert_same(run(tokens, True), run(tokens, False), "")


@pytest.mark.parametrize(
    "name", ["lact_v0", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(SPECS)[1:])]
)
def test_split_is_whole_at_the_edges(name):
    """After the first token, at a chunk's edge, before the last token."""
    spec = SPECS[name]
    weights, tokens = cases.arguments(spec, time=TIME)
    expected = cases.run(spec, weights, tokens)
    for point in (1, 8, 23):
        first, state = cases.run(spec, weights, cases.cut(tokens, 0, point))
        second, state = cases.run(spec, weights, cases.cut(tokens, point, TIME), None, state)
        _assert_same((jnp.concatenate([first, second], 1), state), expected, f"{point} ")


_SELDOM = [pytest.param(n, marks=pytest.mark.exhaustive) for n in ("gated_delta", "lact_prenorm")]


@pytest.mark.parametrize("name", ["lact_v0", "lact_v2", "linear_attention", *_SELDOM])
def test_packed_rows_are_split_anywhere(name):
    """Inside a document, between two of them, at padding; a row of padding alone stands still."""
    spec, ids = SPECS[name], _ids()
    weights, tokens = cases.arguments(spec, time=TIME)
    mode = "parallel" if ttt_jax.explain(spec).parallel else "recurrent"
    expected = cases.run(spec, weights, tokens, ids)
    assert expected[1].document.tolist() == [3, 7]
    # Row 0 has edges at 1, 11 and 20 and padding at 8 and 23, row 1 is one document.
    for points in ((1, 8, 9, 11, 23), (10, 20), (11, 12)):
        outs, state = [], None
        for begin, end in itertools.pairwise((0, *points, TIME)):
            part, here = cases.cut(tokens, begin, end), ids[:, begin:end]
            out, state = cases.run(spec, weights, part, here, state, mode=mode)
            outs.append(out)
        _assert_same((jnp.concatenate(outs, 1), state), expected, f"{points} ")


def test_calls_without_ids_go_on():
    """With the last document, whatever its id; and ids after a call without go on, too."""
    spec = SPECS["lact_v0"]
    weights, tokens = cases.arguments(spec, time=TIME)
    expected, _ = cases.run(spec, weights, tokens)
    threes = jnp.full((2, 8), 3, jnp.int32)
    orders = ((None, threes, None), (-1, 3, 3)), ((threes, None, threes), (3, 3, 3))
    for parts, documents in orders:
        outs, state = [], None
        for n, (ids, document) in enumerate(zip(parts, documents, strict=True)):
            part = cases.cut(tokens, 8 * n, 8 * n + 8)
            out, state = cases.run(spec, weights, part, ids, state)
            assert state.document.tolist() == [document] * 2
            outs.append(out)
        assert_close(jnp.concatenate(outs, 1), expected, LIMIT, str(documents))


@pytest.mark.parametrize(
    "name", ["lact_v0", "lact_prenorm", pytest.param("lact_v2", marks=pytest.mark.exhaustive)]
)
def test_decoding_keeps_learning(name):
    """One token a call equals the whole; the weights change exactly where a chunk is complete."""
    spec = SPECS[name]
    weights, tokens = cases.arguments(spec, time=TIME)
    expected, final = cases.run(spec, weights, tokens)
    _, state = cases.run(spec, weights, cases.cut(tokens, 0, 6))
    for t in range(6, TIME):
        before = state.weights["w1"]
        out, state = cases.run(spec, weights, cases.cut(tokens, t, t + 1), None, state, mode="auto")
        assert_close(out, expected[:, t : t + 1], LIMIT, f"token {t}")
        assert bool(jnp.any(before != state.weights["w1"])) == ((t + 1) % spec.chunk_size == 0)
    _assert_same(state, final, "state")


def test_prompts_of_different_lengths():
    """Padding behind the shorter prompt; rows then go on one token a call, or stand still."""
    spec = SPECS["lact_v0"]
    weights, tokens = cases.arguments(spec, time=16)
    lengths = np.array([5, 11])
    ids = jnp.asarray(np.where(np.arange(11) < lengths[:, None], 0, -1), jnp.int32)
    whole, _ = cases.run(spec, weights, tokens)
    _, state = cases.run(spec, weights, cases.cut(tokens, 0, 11), ids)
    for step in range(3):
        row = jnp.arange(2)
        one = {n: x[row, lengths + step][:, None] for n, x in tokens.items()}
        out, state = cases.run(spec, weights, one, jnp.zeros((2, 1), jnp.int32), state)
        for b, length in enumerate(lengths):  # causal: a token's output is that of the whole row
            assert_close(out[b, 0], whole[b, length + step], LIMIT, f"row {b} step {step}")
    still = jnp.asarray([[-1], [0]], jnp.int32)
    _, after = cases.run(spec, weights, cases.cut(tokens, 0, 1), still, state)
    _assert_same(
        jax.tree.map(lambda x: x[:1], after), jax.tree.map(lambda x: x[:1], state), "idle row"
    )
    assert int(after.buffer.count[0]) == int(state.buffer.count[0])


def test_state_has_one_structure():
    """The same parts, shapes and dtypes whatever the length, the mode and the documents."""
    spec = SPECS["lact_v2"]
    shapes = set()
    for time, mode, packed in ((1, "recurrent", False), (9, "parallel", True), (4, "auto", False)):
        weights, tokens = cases.arguments(spec, time=time)
        ids = jnp.zeros((2, time), jnp.int32) if packed else None
        _, state = jax.eval_shape(
            lambda t, mode=mode, ids=ids, w=weights: cases.run(spec, w, t, ids, mode=mode), tokens
        )
        shapes.add(str(jax.tree.map(lambda x: (x.shape, str(x.dtype)), state)))
    assert len(shapes) == 1, shapes
