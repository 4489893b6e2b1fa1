"""The program that a configuration runs: the trainer's own step, or a decoding step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ttt_jax import sharding, tasks
from ttt_jax.layers.attention_cache import AttentionCache
from ttt_jax.train_step import abstract_params, make_train_step, make_trainee

STEPS = ("train", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A step, ready to be lowered.

    Attributes:
      step: a jitted function.
      arguments: `jax.ShapeDtypeStruct`s with shardings.
      parameters: number of parameter values.
      model_flops: FLOPs of the mathematics of one step, on all devices together.
      describe: what one step does, in words.
    """

    step: Any
    arguments: tuple[Any, ...]
    parameters: int
    model_flops: float
    describe: str


def make_program(config: Any, mesh: Mesh, step: str) -> Program:
    """Makes the program of a configuration, without allocating anything.

    Args:
      config: a validated `ttt_jax.config.Config`.
      mesh: a mesh of `sharding.make_mesh`; its devices need not be there.
      step: "train" or "decode".

    Raises:
      ValueError: the batch does not divide over the mesh, or the model does not decode.
    """
    return _train_program(config, mesh) if step == "train" else _decode_program(config, mesh)


def _train_program(config: Any, mesh: Mesh) -> Program:
    """Loss, gradient and update of one batch, as `ttt_jax.train` runs them."""
    task = tasks.make_task(config)
    train = config.train
    rows = config.data.batch_size // train.accumulation_steps
    placement = sharding.batch_sharding(mesh, rows, task.rows)
    trainee = make_trainee(
        config.model, config.optimizer, train.steps, mesh, averaged=train.ema_decay > 0
    )
    step = make_train_step(
        trainee,
        task.loss,
        accumulation_steps=train.accumulation_steps,
        ema_decay=train.ema_decay,
    )
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)
        for name, x in task.example().items()
    }
    model = nnx.merge(trainee.graphdef, trainee.abstract.params, trainee.abstract.buffers)
    shapes = ", ".join(f"{name} {'x'.join(map(str, x.shape))}" for name, x in batch.items())
    return Program(
        step=step,
        arguments=(trainee.abstract, batch),
        parameters=_size(trainee.abstract.params),
        model_flops=3 * task.flops_per_step(model),
        describe=f"training step: forward, backward, update of a batch of {shapes}",
    )


def _decode_program(config: Any, mesh: Mesh) -> Program:
    """One token for each row of a batch, from a carried cache."""
    graphdef, params, buffers, _ = abstract_params(config.model, mesh)
    model = nnx.merge(graphdef, params, buffers)
    if not hasattr(model, "decode"):
        raise ValueError(f"--step=decode: a {type(model).__name__} does not decode; use train")
    rows = config.data.batch_size
    placement = sharding.batch_sharding(mesh, rows)

    def place(names: tuple[str | None, ...], x: Any) -> jax.ShapeDtypeStruct:
        spec = sharding.partition_spec(names, x.shape, dict(mesh.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    cache = jax.eval_shape(lambda: nnx.merge(graphdef, params, buffers).init_cache(rows))
    stacked = 1 if config.model.scan_layers else 0
    cache = jax.tree.map(place, _cache_names(cache, stacked), cache, is_leaf=_is_names)
    tokens = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=placement)

    def decode_step(params: Any, buffers: Any, tokens: jax.Array, cache: Any) -> Any:
        logits, cache = nnx.merge(graphdef, params, buffers).decode(tokens, cache)
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), cache

    shardings = (placement, jax.tree.map(lambda x: x.sharding, cache))
    step = jax.jit(decode_step, donate_argnums=3, out_shardings=shardings)
    return Program(
        step=step,
        arguments=(params, buffers, tokens, cache),
        parameters=_size(params),
        model_flops=rows * model.flops_per_token(1),
        describe=f"decoding step: one token for each of {rows} rows",
    )


def _cache_names(cache: Any, stacked: int) -> Any:
    """Logical axis names of a decoding cache, whose arrays have `stacked` axes of layers first."""

    def names(tree: Any) -> Any:
        if isinstance(tree, AttentionCache):
            return AttentionCache(*[(None,) * stacked + ("batch", None, "heads", None)] * 2)
        rest = max(tree.ndim - stacked - 2, 0)
        return ((None,) * stacked + ("batch", "heads") + (None,) * rest)[: tree.ndim]

    def is_leaf(tree: Any) -> bool:
        return isinstance(tree, AttentionCache)

    layers = jax.tree.map(names, cache.layers, is_leaf=is_leaf)
    return cache._replace(position=("batch",), layers=layers)


def _is_names(tree: Any) -> bool:
    return type(tree) is tuple and all(x is None or isinstance(x, str) for x in tree)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
