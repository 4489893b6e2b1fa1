"""Small models for tests, with inner learning strong enough to be seen in the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttt_jax.models import LactLLMConfig, TransformerConfig, build

SIZES = dict(
    vocab_size=23,
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    intermediate_size=16,
    window_size=6,
    rope_theta=1e2,
    initializer_range=0.3,
)


def lact_config(**overrides):
    return LactLLMConfig(**SIZES | dict(num_fast_heads=2, chunk_size=8, low_rank=2) | overrides)


def transformer_config(**overrides):
    return TransformerConfig(**SIZES | overrides)


@functools.partial(jax.jit, static_argnums=(0, 1))
def small_model(config, seed=0):
    """The model with inner rates near 1 instead of 0.001, so that every update matters."""
    # The default generator takes two seconds to compile for so many parameters.
    model = build(config, nnx.Rngs(jax.random.key(seed, impl="rbg")))
    if isinstance(config, LactLLMConfig) and config.inner_loop().rate == "per_token":
        layers = [model.layers] if config.scan_layers else model.layers
        for layer in layers:
            bias = layer.mixer.branch.rate.bias
            bias[...] = bias[...] + 7.0
    return model


def tokens(batch, time, seed=0):
    key = jax.random.key(seed)
    return jax.random.randint(key, (batch, time), 0, SIZES["vocab_size"], jnp.int32)


# Jitted once, and called with few shapes: compiling takes nearly all of a test's time.


@jax.jit
def forward(model, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


@jax.jit
def decode(model, tokens, cache, segment_ids=None):
    return model.decode(tokens, cache, segment_ids=segment_ids)


@functools.partial(jax.jit, static_argnums=1)
def init_cache(model, batch):
    return model.init_cache(batch)


def logits_alone(model, rows, batch=4, time=32):
    """Logits of each row on its own, by one plain forward pass.

    The rows are filled up with zeros, which a causal model cannot see from the places before.
    """
    padded = np.zeros((batch, time), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    logits = forward(model, jnp.asarray(padded))
    return [logits[index, : len(row)] for index, row in enumerate(rows)]
