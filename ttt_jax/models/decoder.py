"""The stack that the language models share: embedding, blocks, head, and decoding."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers.attention import document_indices, document_positions
from ttt_jax.layers.linear import Embedding, Linear
from ttt_jax.layers.mixers import TokenInfo
from ttt_jax.layers.mlp import SwigluMLP
from ttt_jax.layers.rms_norm import RMSNorm, at_least_float32
from ttt_jax.layers.rotary import rotary_tables
from ttt_jax.sharding import constrain

_STACK = {nnx.PARTITION_NAME: "layers"}


class DecodeCache(NamedTuple):
    """What decoding carries; its size does not depend on the number of tokens seen.

    Attributes:
      position: [batch], int32: tokens that each row has seen.
      layers: caches of the layers, stacked along a first axis when the layers are scanned, else
        a tuple.
    """

    position: jax.Array
    layers: Any


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, mixer, rngs: nnx.Rngs):
        """Makes a block.

        Args:
          config: a model configuration.
          mixer: a layer from `layers.mixers`.
          rngs: random streams; "params" is used.
        """
        self.mixer_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = SwigluMLP(
            config.hidden_size,
            config.mlp_size(),
            stddev=config.initializer_range,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x, cache, info: TokenInfo):
        """Runs the block, over a whole batch (cache None) or over new tokens.

        Args:
          x: [batch, time, hidden].
          cache: of the mixer, or None.
          info: places and documents of the tokens.

        Returns:
          ([batch, time, hidden], statistics of the mixer or its new cache).
        """
        normed = self.mixer_norm(x)
        if cache is None:
            mixed, aux = self.mixer(normed, info)
        else:
            mixed, aux = self.mixer.decode(normed, cache, info)
        x = constrain(x + mixed, ("batch", "seq", None))
        return constrain(x + self.mlp(self.mlp_norm(x)), ("batch", "seq", None)), aux


class Decoder(nnx.Module):
    """A causal language model; subclasses say what mixes the tokens of a layer.

    With `config.scan_layers` the blocks' parameters are stacked along a first axis named "layers"
    and run under `nnx.scan`, so that compile time does not depend on the number of layers. The
    initial weights do not depend on that choice.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        """Makes the model.

        Args:
          config: a validated model configuration.
          rngs: random streams; "params" is used.

        Raises:
          ValueError: from `config.validate()`.
        """
        config.validate()
        self.config = dataclasses.replace(config)
        options = dict(stddev=config.initializer_range, dtype=config.dtype, rngs=rngs)
        size = (config.vocab_size, config.hidden_size)
        self.embedding = Embedding(*size, **options)
        make_mixer = type(self).make_mixer

        def make_block(key):
            layer_rngs = nnx.Rngs(params=key)
            return Block(config, make_mixer(config, layer_rngs), layer_rngs)

        keys = jax.random.split(rngs.params(), config.num_layers)
        if config.scan_layers:
            self.layers = nnx.vmap(make_block, transform_metadata=_STACK)(keys)
        else:
            self.layers = nnx.List([make_block(key) for key in keys])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.norm_epsilon)
        tied = config.tie_embeddings
        self.head = None if tied else Linear(*size[::-1], names=("embed", "vocab"), **options)

    def features(self, tokens, *, segment_ids=None):
        """Everything but the output head.

        Args:
          tokens: [batch, time], integers below the vocabulary size.
          segment_ids: [batch, time], int32: a document is a run of equal ids >= 0 and is treated
            as if it were alone; -1 is padding. None: every row is one document.

        Returns:
          (features [batch, time, hidden] in the compute dtype, statistics: name -> [layers]).

        Raises:
          ValueError: if the shapes do not fit, or the inner loop forbids the configured mode.
        """
        _check_tokens(tokens, segment_ids)
        if segment_ids is None:
            positions, documents = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], None
        else:
            positions = document_positions(segment_ids)
            documents = document_indices(segment_ids)
        info = TokenInfo(self._tables(positions), segment_ids, documents)
        x = constrain(self.embedding(tokens), ("batch", "seq", None))
        x, stats = self._run(x, None, info)
        return self.norm(x), stats

    def probe(self, tokens):
        """What the mixer of each layer compares.

        Args:
          tokens: [batch, time], one document a row.

        Returns:
          A list with the `compared` of each layer's mixer: q, k, v and, for a TTT branch, gates.

        Raises:
          ValueError: the layers are scanned.
        """
        if self.config.scan_layers:
            raise ValueError("scan_layers=True: probe needs layers one by one (`unstack_layers`)")
        _check_tokens(tokens, None)
        info = TokenInfo(self._tables(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]))
        x, found = self.embedding(tokens), []
        for layer in self.layers:
            found.append(layer.mixer.compared(layer.mixer_norm(x), info))
            x, _ = layer(x, None, info)
        return found

    def logits(self, features):
        """Scores of the vocabulary.

        Args:
          features: [..., hidden].

        Returns:
          [..., vocab_size], float32 (float64 for float64).
        """
        dtype = at_least_float32(self.config.dtype)
        with jax.named_scope("head"):
            if self.head is None:
                return self.embedding.attend(features, dtype)
            return self.head(features, out_dtype=dtype)

    def __call__(self, tokens, *, segment_ids=None):
        """Logits of the next token at every place; arguments as in `features`.

        Args:
          tokens: [batch, time].
          segment_ids: [batch, time] or None.

        Returns:
          [batch, time, vocab_size], float32.
        """
        return self.logits(self.features(tokens, segment_ids=segment_ids)[0])

    def init_cache(self, batch: int) -> DecodeCache:
        """The cache before the first token.

        Args:
          batch: number of rows.

        Returns:
          The cache; its size is fixed.
        """
        length = self.config.cache_length()

        def init(layer):
            return layer.mixer.init_cache(batch, length)

        if self.config.scan_layers:
            layers = nnx.vmap(init)(self.layers)
        else:
            layers = tuple(init(layer) for layer in self.layers)
        return DecodeCache(jnp.zeros(batch, jnp.int32), layers)

    def reset_cache(self, cache: DecodeCache, rows) -> DecodeCache:
        """Empties some rows, so that another request can use them.

        Args:
          cache: any cache of this model.
          rows: [batch], bool: the rows to empty.

        Returns:
          The cache, in the given rows as `init_cache` makes it.
        """
        axis = 1 if self.config.scan_layers else 0

        def pick(new, old, at):
            shape = [1] * new.ndim
            shape[at] = rows.shape[0]
            return jnp.where(rows.reshape(shape), new, old)

        fresh = self.init_cache(rows.shape[0])
        layers = jax.tree.map(lambda a, b: pick(a, b, axis), fresh.layers, cache.layers)
        return DecodeCache(pick(fresh.position, cache.position, 0), layers)

    def decode_features(self, tokens, cache: DecodeCache, *, segment_ids=None):
        """`features` of new tokens that continue those in the cache.

        Args:
          tokens: [batch, time], time >= 1: a prompt, a part of one, or one token.
          cache: of the tokens before.
          segment_ids: [batch, time], int32: -1 for padding, which may stand anywhere; all other
            tokens of a row continue one document. None: no padding.

        Returns:
          ([batch, time, hidden], the cache after the new tokens). At padding the features are
          finite and meaningless.

        Raises:
          ValueError: if the shapes do not fit.
        """
        _check_tokens(tokens, segment_ids)
        batch, time = tokens.shape
        lengths, order = jnp.full(batch, time, jnp.int32), None
        if segment_ids is not None:
            lengths = jnp.sum(segment_ids >= 0, axis=1, dtype=jnp.int32)
            # Layers want the real tokens first; a stable sort keeps their order.
            order = jnp.argsort(segment_ids < 0, axis=1, stable=True)
            tokens = jnp.take_along_axis(tokens, order, axis=1)
            segment_ids = jnp.where(jnp.arange(time) < lengths[:, None], 0, -1)
        positions = cache.position[:, None] + jnp.arange(time, dtype=jnp.int32)
        tables = self._tables(positions)
        info = TokenInfo(tables, segment_ids, None, cache.position, lengths)
        x, layers = self._run(self.embedding(tokens), cache.layers, info)
        x = self.norm(x)
        if order is not None:
            x = jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
        return x, DecodeCache(cache.position + lengths, layers)

    def decode(self, tokens, cache: DecodeCache, *, segment_ids=None):
        """Logits of new tokens that continue those in the cache; see `decode_features`.

        Args:
          tokens: [batch, time].
          cache: of the tokens before.
          segment_ids: [batch, time] or None.

        Returns:
          ([batch, time, vocab_size] float32, the new cache).
        """
        x, cache = self.decode_features(tokens, cache, segment_ids=segment_ids)
        return self.logits(x), cache

    def num_params(self) -> int:
        """Number of parameters, embedding and head included.

        Returns:
          The sum of the sizes of all `nnx.Param`s.
        """
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs):
        """The token mixer of one layer; every subclass has its own.

        Args:
          config: the model's configuration.
          rngs: random streams of that layer.
        """
        raise NotImplementedError("a subclass of Decoder must define make_mixer")

    def _tables(self, positions):
        config = self.config
        head_dim = config.hidden_size // config.num_attention_heads
        return rotary_tables(positions, head_dim, config.rope_theta, config.dtype)

    def _run(self, x, caches, info: TokenInfo):
        """All blocks; returns x and the stacked statistics, or the new caches."""

        def body(x, layer, cache, info):
            return layer(x, cache, info)

        if caches is None and self.config.remat != "none":
            policies = jax.checkpoint_policies
            keep = {"full": None, "dots": policies.dots_with_no_batch_dims_saveable}
            body = nnx.remat(body, policy=keep[self.config.remat], graph=False)
        if self.config.scan_layers:
            # As a plain pytree (no graph) a model can be used inside any loop of the caller's.
            axes = dict(in_axes=(nnx.Carry, 0, 0, None), out_axes=(nnx.Carry, 0), graph=False)
            return nnx.scan(body, transform_metadata=_STACK, **axes)(x, self.layers, caches, info)
        found = []
        for index, layer in enumerate(self.layers):
            x, aux = body(x, layer, None if caches is None else caches[index], info)
            found.append(aux)
        if caches is not None:
            return x, tuple(found)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *found)


def stack_layers(params: dict) -> dict:
    """Parameters of a model without `scan_layers` in the form of one with it.

    Args:
      params: `nnx.to_pure_dict(nnx.state(model, nnx.Param))`; "layers" maps 0, 1, … to a layer.

    Returns:
      The same with one layer under "layers", whose arrays have a first axis of layers; for
      `nnx.replace_by_pure_dict`.

    >>> stack_layers({"layers": {0: {"w": jnp.zeros(2)}, 1: {"w": jnp.ones(2)}}})["layers"]["w"]
    Array([[0., 0.],
           [1., 1.]], dtype=float32)
    """
    layers = [params["layers"][index] for index in sorted(params["layers"])]
    return params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: dict) -> dict:
    """The inverse of `stack_layers`.

    Args:
      params: parameters of a model with `scan_layers`, as a pure dict.

    Returns:
      The same with "layers" mapping 0, 1, … to a layer.

    >>> unstack_layers({"layers": {"w": jnp.array([[0.0], [1.0]])}})["layers"][1]["w"].tolist()
    [1.0]
    """
    stacked = params["layers"]
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)}
    return params | {"layers": layers}


def _check_tokens(tokens, segment_ids):
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be [batch, time], time >= 1")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens has dtype {tokens.dtype}; it must be an integer dtype")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"{segment_ids.shape=} must be the shape of tokens, {tokens.shape}")
