"""Random arguments of ``ttt`` for a specification, and what tests do with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import ttt_jax


def arguments(
    spec,
    *,
    time,
    batch=2,
    heads=2,
    dim=6,
    value_dim=None,
    dtype="float64",
    seed=0,
    channel_gate=False,
):
    """``(weights, tokens)``: initial weights, and q, k, v and the gates that ``spec`` needs."""
    rng = np.random.default_rng(seed)
    value_dim = value_dim or dim
    shapes = spec.fast_net.shapes(dim, value_dim, dim + 2)
    shapes |= spec.fast_net.static_shapes(dim, value_dim)
    if spec.order == "token_causal":
        shapes["position_rate"] = (spec.chunk_size, 1)
    weights = {
        n: jnp.asarray(rng.normal(size=(heads, *s)) * s[0] ** -0.5, dtype)
        for n, s in shapes.items()
    }
    lead = (batch, time, heads)
    tokens = {
        "q": rng.normal(size=(*lead, dim)),
        "k": rng.normal(size=(*lead, dim)) * dim**-0.5,
        "v": rng.normal(size=(*lead, value_dim)),
    }
    if spec.rate == "per_token":
        tokens["lr"] = rng.uniform(0.05, 0.5, (*lead, len(spec.trained)))
    if spec.momentum == "per_token":
        tokens["momentum"] = rng.uniform(0.1, 0.9, lead)
    if spec.forget == "per_token":
        tokens["forget"] = rng.uniform(0.5, 1.0, (*lead, dim) if channel_gate else lead)
    if spec.erase == "per_token":
        tokens["erase"] = tuple(rng.normal(size=(2, *lead, dim)) * 0.5 * dim**-0.5)
    return weights, jax.tree.map(lambda x: jnp.asarray(x, dtype), tokens)


def cut(tokens, begin, end):
    """The tokens ``begin:end`` of each array."""
    return jax.tree.map(lambda x: x[:, begin:end], tokens)


@functools.partial(jax.jit, static_argnames=("spec", "mode", "implementation"))
def run(spec, weights, tokens, segment_ids=None, state=None, mode="recurrent", implementation=None):
    """``ttt`` under ``jit``."""
    rest = {name: x for name, x in tokens.items() if name not in "qkv"}
    return ttt_jax.ttt(
        spec,
        weights,
        tokens["q"],
        tokens["k"],
        tokens["v"],
        segment_ids=segment_ids,
        initial_state=state,
        mode=mode,
        implementation=implementation,
        **rest,
    )


@functools.partial(jax.jit, static_argnames=("spec", "mode", "implementation"))
def gradients(
    spec, weights, tokens, segment_ids=None, state=None, mode="recurrent", implementation=None
):
    """Output, state, and gradients of weights, tokens and carried state; random cotangents."""

    def loss(weights, tokens, floats):
        carried = None if state is None else jax.tree.unflatten(jax.tree.structure(state), floats)
        out, final = run(spec, weights, tokens, segment_ids, carried, mode, implementation)
        total = _pair(out, 0)
        for index, leaf in enumerate(jax.tree.leaves(final)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                total += _pair(leaf, index + 1)
        return total, (out, final)

    floats = [] if state is None else jax.tree.leaves(state)
    differentiable = jax.grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    grads, (out, final) = differentiable(weights, tokens, floats)
    return out, final, grads


def _pair(x, seed):
    # Constants: drawn inside the program, they would round differently from mode to mode.
    return jnp.sum(x * np.random.default_rng(seed).normal(size=x.shape).astype(x.dtype))


def named_leaves(tree):
    """``(name, array)`` of the floating leaves of a pytree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(p), x) for p, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)
    ]
