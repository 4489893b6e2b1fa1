"""Attention on a cut sequence is attention on the whole one: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import assert_close
from ttt_jax.layers import attention_halo
from ttt_jax.layers.attention import causal_attention
from ttt_jax.layers.attention_blocks import KeyValue

_DEVICES, _LENGTH = 4, 6
_WINDOWS = (1, 2, 5, 7, 8, 13, 14, 18, 19, 40, None)
_MOST = pytest.mark.exhaustive


def _cut(x):
    return jnp.moveaxis(x.reshape(x.shape[0], _DEVICES, _LENGTH, *x.shape[2:]), 1, 0)


def _inputs():
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 2, _DEVICES * _LENGTH, 2, 4))
    lengths = [[3, 10, 1, 10], [17, 7]]
    documents = [np.repeat(np.arange(len(row)), row) for row in lengths]
    return (q, k, v), jnp.asarray(np.stack(documents), jnp.int32)


def _as_kernel(q, k, v, documents, window):
    """What a kernel without room for earlier keys does, with XLA in its place."""
    size = attention_halo.halo_length(_LENGTH, _DEVICES, window)
    own = KeyValue(k, v, documents)
    missing = size - jnp.minimum(size, jax.lax.axis_index("seq") * _LENGTH)
    before = attention_halo.halo(own, size, "seq")
    return attention_halo._extended(q, own, before, missing, window or 24, "xla")


def _by_xla(q, k, v, documents, window):
    return attention_halo.halo_attention(
        q, k, v, axis_name="seq", window=window, documents=documents, implementation="xla"
    )


@pytest.mark.parametrize(
    "packed, windows",
    [
        (True, (14,)),
        pytest.param(False, _WINDOWS, marks=_MOST),
        pytest.param(True, _WINDOWS, marks=_MOST),
    ],
    ids=["packed", "one document, all windows", "packed, all windows"],
)
def test_cut_attention_is_whole_attention(packed, windows):
    with jax.enable_x64(True):
        qkv, documents = _inputs()
        documents = documents if packed else None
        weight = np.random.default_rng(1).normal(size=qkv[0].shape)

        def whole(qkv, window):
            return causal_attention(
                *qkv, window=window, documents=documents, implementation="xla"
            )

        def cut(qkv, window, one):
            parts = jax.vmap(functools.partial(one, window=window), axis_name="seq")
            return jnp.concatenate(list(parts(*map(_cut, qkv), jax.tree.map(_cut, documents))), 1)

        @jax.jit
        def everything(qkv):
            def both(run):
                return run(qkv), jax.grad(lambda x: jnp.sum(run(x) * weight))(qkv)

            found = {}
            for window in windows:
                runs = {"whole": functools.partial(whole, window=window)}
                runs["xla"] = functools.partial(cut, window=window, one=_by_xla)
                if window != 1:  # nothing to fetch
                    runs["kernel"] = functools.partial(cut, window=window, one=_as_kernel)
                found[str(window)] = {name: both(run) for name, run in runs.items()}
            return found

        for window, found in everything(qkv).items():
            for name in set(found) - {"whole"}:
                pairs = zip(*map(jax.tree.leaves, (found[name], found["whole"])), strict=True)
                for a, b in pairs:
                    assert_close(a, b, 1e-12, f"{name}, {window=}")


def test_a_window_below_one_is_refused():
    x = jnp.ones((_DEVICES, 1, _LENGTH, 1, 2))
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        jax.vmap(functools.partial(_by_xla, documents=None, window=0), axis_name="seq")(x, x, x)
