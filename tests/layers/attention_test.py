"""Attention against the definition, written as one masked product over all pairs."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close, tolerance
from ttt_jax.layers import attention as attention_module
from ttt_jax.layers import attention_cudnn
from ttt_jax.layers.attention import (
    causal_attention,
    document_indices,
    document_positions,
    visible_pairs,
)
from ttt_jax.layers.attention_blocks import KeyValue
from ttt_jax.layers.attention_cache import cached_attention, init_attention_cache
from ttt_jax.layers.attention_cudnn import packed_attention


def reference(q, k, v, window, segment_ids=None):
    """Token by token, in float64 numpy: a key is seen if it is near and in the same run of ids."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        first = 0 if window is None else max(0, t - window + 1)
        if segment_ids is not None:
            while not all(segment_ids[b, s] == segment_ids[b, t] for s in range(first, t)):
                first += 1
        scores = k[b, first : t + 1, h] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, first : t + 1, h]
    return out


def qkv(key, batch, time, heads=2, dim=4):
    keys = jax.random.split(jax.random.key(key), 3)
    return [jax.random.normal(k, (batch, time, heads, dim), jnp.float32) for k in keys]


@pytest.mark.parametrize("piece", [3, 512])
@pytest.mark.parametrize("window", [1, 4, 7, 13, 40, None])
def test_equals_the_definition(window, piece, monkeypatch):
    """Every shape of the blocks: shorter than, equal to and off the window and the piece."""
    monkeypatch.setattr(attention_module, "_QUERY_BLOCK", piece)
    for time in (1, 7, 13):
        q, k, v = qkv(time, 2, time)
        out = causal_attention(q, k, v, window=window)
        assert_close(out, reference(q, k, v, window), tolerance("float32", 16), f"T={time}")


@settings(max_examples=15, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    window=st.integers(1, 14),
)
def test_packed_documents_do_not_see_each_other(ids, window):
    """A document is a run of ids, even when an id comes back."""
    q, k, v = qkv(1, 1, 12)
    ids = np.array([ids])
    documents = document_indices(jnp.asarray(ids))
    out = causal_attention(q, k, v, window=window, documents=documents)
    assert_close(out, reference(q, k, v, window, ids), tolerance("float32", 16))


def test_gradients_equal_those_of_the_plain_product(monkeypatch):
    """The backward pass through the blocks, against one masked product over all pairs."""
    monkeypatch.setattr(attention_module, "_QUERY_BLOCK", 3)
    q, k, v = qkv(2, 2, 14)
    documents = document_indices(jnp.array([[0] * 5 + [1] * 9, [0] * 14]))
    distance = jnp.arange(14)[:, None] - jnp.arange(14)
    visible = (distance >= 0) & (distance < 6)
    visible = (visible & (documents[:, :, None] == documents[:, None]))[:, None]

    def blocks(q, k, v):
        return jnp.sum(jnp.sin(causal_attention(q, k, v, window=6, documents=documents)))

    def plain(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), -1)
        return jnp.sum(jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", weights, v)))

    found = jax.jit(jax.grad(blocks, (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(q, k, v)
    for name, a, b in zip("qkv", found, expected, strict=True):
        assert_close(a, b, tolerance("float32", 16), name)


@pytest.mark.parametrize("window", [5, 64, 70])
def test_masked_blocks_equal_the_definition(window):
    """The blocks and masks that go to cuDNN for packed documents, here through XLA."""
    q, k, v = qkv(7, 2, 150, heads=1)
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, 150)))
    documents = document_indices(jnp.asarray(ids, jnp.int32))
    out = packed_attention(q, KeyValue(k, v, documents), window, "xla")
    assert_close(out, reference(q, k, v, window, ids), tolerance("float32", 64))


def test_agrees_with_the_library_attention():
    """`jax.nn.dot_product_attention` counts its local window in the same way."""
    q, k, v = qkv(3, 1, 20)
    out = causal_attention(q, k, v, window=5, implementation="xla")
    library = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0))
    assert_close(out, library, tolerance("float32", 16))


def test_memory_is_linear_in_the_length():
    """Four times the tokens: at most some four times the temporaries, forward and backward."""

    def bytes_of(time):
        shape = jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)

        def loss(q, k, v):
            return jnp.sum(causal_attention(q, k, v, window=64) ** 2)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = bytes_of(1024), bytes_of(4096)
    assert large <= 4.5 * small
    assert large < 4096 * 4096 * 4 / 8  # far from the square


@pytest.mark.parametrize("splits", [[14], [5, 9], [1] * 14, [3, 1, 1, 9]])
def test_cache_continues_the_sequence(splits):
    """Any split of a row into calls gives the outputs of the whole."""
    q, k, v = qkv(4, 2, 14)
    expected = causal_attention(q, k, v, window=6)
    cache = init_attention_cache(2, 6, 2, 4, "float32")
    out, start = [], 0
    for size in splits:
        part = [x[:, start : start + size] for x in (q, k, v)]
        ones = jnp.ones(2, jnp.int32)
        piece, cache = cached_attention(*part, cache, start * ones, size * ones)
        out.append(piece)
        start += size
    assert_close(jnp.concatenate(out, 1), expected, tolerance("float32", 16))


def test_rows_of_different_lengths_share_a_cache():
    """Padding at the end of a call neither enters the ring nor moves the row's place."""
    q, k, v = qkv(5, 2, 12)
    cache = init_attention_cache(2, 5, 2, 4, "float32")
    lengths = jnp.array([3, 8], jnp.int32)
    _, cache = cached_attention(*[x[:, :8] for x in (q, k, v)], cache, 0 * lengths, lengths)
    last = [jnp.stack([x[0, 3:4], x[1, 8:9]]) for x in (q, k, v)]
    out, _ = cached_attention(*last, cache, lengths, jnp.ones(2, jnp.int32))
    for row, length in enumerate((4, 9)):
        whole = reference(*[x[row : row + 1, :length] for x in (q, k, v)], 5)
        assert_close(out[row, 0], whole[0, -1], tolerance("float32", 16), f"row {row}")


def test_positions_restart_with_every_document():
    ids = jnp.array([[0, 0, 3, 3, 3, -1], [5, 4, 5, 5, -1, -1]])
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 1]]


@given(time=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 50)))
def test_visible_pairs_counts_the_mask(time, window):
    distance = np.arange(time)[:, None] - np.arange(time)
    visible = (distance >= 0) & (distance < (window or time))
    assert visible_pairs(time, window) == visible.sum()


def test_refusals_name_the_argument_and_the_way_out():
    q, k, v = qkv(6, 1, 4)
    with pytest.raises(ValueError, match="implementation='flash' must be one of"):
        causal_attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        causal_attention(q, k, v, window=0)
    documents = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="set window, leave segment_ids out"):
        causal_attention(q, k, v, documents=documents, implementation="cudnn")
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="needs a GPU"):
            causal_attention(q, k, v, implementation="cudnn")


def test_cudnn_has_a_gradient_at_odd_lengths(monkeypatch):
    """A halo of window - 1 tokens makes them; cuDNN refuses them itself."""
    fused = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    x = jax.ShapeDtypeStruct((1, 95, 2, 64), jnp.bfloat16)

    def total(q, k, v):
        out = attention_cudnn.attention(q, k, v, 32, None)
        assert out.shape == q.shape
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(x, x, x)
    assert "cudnn" in traced.lower(lowering_platforms=("cuda",)).as_text()
