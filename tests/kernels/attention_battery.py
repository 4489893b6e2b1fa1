"""What the tests of linear attention share: the definition, random arguments, results, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BF16_RMS = 0.01
DECAYS = (0.0, -1e-3, -0.1, -0.5, -20.0, -80.0)


def naive(q, k, v, log_decay, initial_state, segment_ids, causal, chunk_size, include):
    """The definition in float64 NumPy, document by document, with states written out."""
    q, k, v, log_decay, state = (
        np.asarray(x, np.float64) for x in (q, k, v, log_decay, initial_state)
    )
    out = np.zeros_like(v)
    final = state.copy()
    for b in range(len(q)):
        documents, previous = [], -1
        for t, i in enumerate(segment_ids[b]):
            if i >= 0:
                if i != previous:
                    documents.append([])
                documents[-1].append(t)
            previous = i
        for number, tokens in enumerate(documents):
            s = state[b] if number == 0 else np.zeros_like(state[b])
            size = 1 if causal == "token" else chunk_size
            for start in range(0, len(tokens), size):
                chunk, before = tokens[start:start + size], s
                for t in chunk:
                    s = np.exp(log_decay[b, t])[:, None, None] * s
                    s = s + k[b, t][:, :, None] * v[b, t][:, None, :]
                read = s if causal == "token" or include else before
                for t in chunk:
                    out[b, t] = np.einsum("hd,hde->he", q[b, t], read)
            final[b] = s
    return out, final


def make(seed, batch, length, heads, key_dim, value_dim, *, decay, state, packed,
         dtype=jnp.float32):
    """Random arguments; packed rows have padding ahead, inside and behind."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads)
    x = {
        name: jnp.asarray(rng.standard_normal((*shape, dim)), dtype)
        for name, dim in (("q", key_dim), ("k", key_dim), ("v", value_dim))
    }
    if decay:
        x["log_decay"] = jnp.asarray(rng.choice(DECAYS, size=shape), jnp.float32)
    if state:
        s = rng.standard_normal((batch, heads, key_dim, value_dim))
        x["initial_state"] = jnp.asarray(s, jnp.float32)
    ids = None
    if packed:
        ids = np.cumsum(rng.random((batch, length)) < 0.06, axis=1)
        ids[rng.random((batch, length)) < 0.06] = -1
        ids[0, :2], ids[-1, -3:] = -1, -1
        ids = jnp.asarray(ids, jnp.int32)
    return x, ids


@functools.partial(jax.jit, static_argnums=(2,))
def results(x, segment_ids, function, cotangents):
    """(out, final state, gradients) of one implementation for random cotangents of both."""
    def loss(x):
        out, final = function(**x, segment_ids=segment_ids)
        value = jnp.sum(out * cotangents[0], dtype=final.dtype) + jnp.sum(final * cotangents[1])
        return value, (out, final)

    gradients, (out, final) = jax.grad(loss, has_aux=True)(x)
    return {"out": out, "final": final, **{f"d_{name}": g for name, g in gradients.items()}}


def cotangents(x, seed=7):
    rng = np.random.default_rng(seed)
    batch, _, heads, key_dim = x["q"].shape
    final = (batch, heads, key_dim, x["v"].shape[-1])
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (x["v"].shape, final))


def rms_error(value, reference):
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return np.sqrt(np.mean((value - reference) ** 2) / max(np.mean(reference**2), 1e-30))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)
