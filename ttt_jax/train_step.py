"""One optimizer step as a pure function of (state, batch), and the state it works on.

The step is compiled once and its state is donated: the new state takes the old one's memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ttt_jax import models, optim, sharding
from ttt_jax.config import OptimizerConfig
from ttt_jax.objective import Batch, Loss
from ttt_kernels import compat

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
      step: int32 [], batches consumed; skipped ones count.
      skipped: int32 [], steps whose loss or gradient was not finite and which changed nothing.
      skipped_in_a_row: int32 [], how many of them came last without a good one between.
      key: uint32 [2], data of the run's random key; a step's key is this one folded with `step`.
      params: nested dicts of float32 arrays, as of `nnx.to_pure_dict`.
      buffers: running statistics (`nnx.BatchStat`) likewise; {} for most models.
      average: moving average of the parameters; {} where the run keeps none.
      optimizer: the state of the optax transformation.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    key: jax.Array
    params: Any
    buffers: Any
    average: Any
    optimizer: Any

    def best_params(self) -> Any:
        """Returns the parameters to evaluate: their average where the run keeps one."""
        return self.average or self.params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
    """The static half of a training run: what `TrainState` does not hold.

    Attributes:
      graphdef: the model without its arrays; `nnx.merge(graphdef, params, buffers)` makes one.
      names: logical axis names of each parameter.
      optimizer: the optax transformation.
      learning_rate: rate as a function of the number of updates done.
      init: from an int32 seed to a fresh `TrainState`; jit it with `shardings`.
      abstract: `TrainState` of `jax.ShapeDtypeStruct`s that carry their shardings.
      shardings: `TrainState` of NamedShardings.
      mesh: the device mesh.
    """

    graphdef: nnx.GraphDef
    names: Any
    optimizer: optax.GradientTransformation
    learning_rate: optim.Schedule
    init: Callable[[jax.Array], TrainState]
    abstract: TrainState
    shardings: TrainState
    mesh: Mesh


def make_trainee(
    model_config: Any,
    optimizer_config: OptimizerConfig,
    steps: int,
    mesh: Mesh,
    build: Callable[..., nnx.Module] = models.build,
    averaged: bool = False,
) -> Trainee:
    """Prepares model, optimizer and shardings without allocating a parameter.

    Args:
      model_config: the model's configuration, given to `build`.
      optimizer_config: the optimizer's configuration.
      steps: optimizer steps of the run, for the learning-rate schedule.
      mesh: a mesh of `sharding.make_mesh`.
      build: `build(model_config, rngs=nnx.Rngs(key))` returns the model, which holds `nnx.Param`s
        and `nnx.BatchStat`s alone.
      averaged: whether the state keeps a moving average of the parameters.

    Returns:
      The static half of the run.

    Raises:
      ValueError: a parameter is in less than float32, in which small updates would be lost.
    """
    graphdef, shapes, _, names = abstract_params(model_config, mesh, build)
    optimizer, learning_rate = optim.make_optimizer(optimizer_config, names, steps)

    def init(seed: jax.Array) -> TrainState:
        key = jax.random.key(seed)
        model = build(model_config, rngs=nnx.Rngs(key))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        buffers = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        zero = jnp.zeros((), jnp.int32)
        # A copy: the state is donated, and no buffer can be given away twice.
        average = jax.tree.map(jnp.copy, params) if averaged else {}
        start = (zero, zero, zero, jax.random.key_data(key))
        return TrainState(*start, params, buffers, average, optimizer.init(params))

    abstract = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.int32))
    shardings = sharding.like_params(abstract, shapes, mesh)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    return Trainee(
        graphdef=graphdef,
        names=names,
        optimizer=optimizer,
        learning_rate=learning_rate,
        init=init,
        abstract=abstract,
        shardings=shardings,
        mesh=mesh,
    )


def abstract_params(
    model_config: Any, mesh: Mesh, build: Callable[..., nnx.Module] = models.build
) -> tuple[nnx.GraphDef, Any, Any, Any]:
    """Describes a model's arrays without allocating them.

    Args:
      model_config, mesh, build: as of `make_trainee`.

    Returns:
      (graphdef, parameters as nested dicts of `jax.ShapeDtypeStruct` with shardings, buffers
      likewise and replicated, nested dicts of the parameters' logical axis names).

    Raises:
      ValueError: a parameter is in less than float32.
    """
    graphdefs = []

    def split() -> tuple[nnx.State, nnx.State]:
        model = build(model_config, rngs=nnx.Rngs(0))
        graphdef, params, buffers = nnx.split(model, nnx.Param, nnx.BatchStat)
        graphdefs.append(graphdef)
        return params, buffers

    # Not nnx.eval_shape: under jax.set_mesh it would read the logical names as mesh axes.
    params, buffers = jax.eval_shape(split)
    graphdef = graphdefs[0]
    names = sharding.axis_names(params)
    shapes = nnx.to_pure_dict(params)
    _check_master_dtypes(shapes)
    shardings = sharding.param_shardings(names, shapes, mesh)
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    buffers = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated),
        nnx.to_pure_dict(buffers),
    )
    return graphdef, shapes, buffers, names


def _check_master_dtypes(shapes: Any) -> None:
    """Raises ValueError if a parameter has fewer bits than float32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if jnp.finfo(leaf.dtype).bits < 32:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"parameter {name} is {leaf.dtype}: parameters are kept in float32, in which a "
                "small update is not rounded away; set the model's compute dtype instead"
            )


def init_state(trainee: Trainee, seed: int) -> TrainState:
    """Creates the parameters and the optimizer's state, each directly on its own devices."""
    init = jax.jit(trainee.init, out_shardings=trainee.shardings)
    return init(jnp.asarray(seed, jnp.int32))


def loss_and_gradient(
    loss: Loss,
    graphdef: nnx.GraphDef,
    params: Any,
    buffers: Any,
    batch: Batch,
    key: jax.Array,
    accumulation_steps: int = 1,
) -> tuple[jax.Array, Any, Metrics, Any]:
    """Computes the mean loss over all that counts in the batch, and its gradient.

        mean loss = sum over the batch of weighted losses / sum of their weights

    With accumulation the sums are accumulated and divided once at the end, so that the result
    is that of the whole batch however the weights are spread over its parts.

    Args:
      loss: see `ttt_jax.objective.Loss`.
      graphdef: the model without its arrays.
      params: its parameters.
      buffers: its running statistics.
      batch: arrays [B, ...]; B is a multiple of the parts.
      key: random key of the step.
      accumulation_steps: parts into which the batch is cut.

    Returns:
      (loss float32 [], gradient like `params`, {"count": sum of the weights, and the statistics
      of the task}, the buffers after the step; statistics and buffers are means over the parts).
    """

    def summed_loss(params: Any, part: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params, buffers)
        total, stats = loss(model, part, key)
        count = stats.pop("count")
        after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        means = jax.tree.map(lambda x: x / accumulation_steps, (stats, after))
        return total, (count, *means)

    value_and_grad = jax.value_and_grad(summed_loss, has_aux=True)
    if accumulation_steps == 1:
        (total, (count, stats, after)), gradient = value_and_grad(params, batch, key)
    else:

        def add(sums: Any, part_and_key: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, value_and_grad(params, *part_and_key)), None

        parts = jax.tree.map(lambda x: _split_rows(x, accumulation_steps), batch)
        inputs = (parts, jax.random.split(key, accumulation_steps))
        first = jax.tree.map(lambda x: x[0], inputs)
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(value_and_grad, params, *first)
        )
        ((total, (count, stats, after)), gradient), _ = jax.lax.scan(add, zeros, inputs)
    divisor = jnp.maximum(count, 1.0)
    gradient = jax.tree.map(lambda g: g / divisor, gradient)
    return total / divisor, gradient, stats | {"count": count}, after


def _split_rows(x: jax.Array, parts: int) -> jax.Array:
    """Cuts [B, ...] into [parts, B/parts, ...], each device's rows spread over all parts."""
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def make_train_step(
    trainee: Trainee,
    loss: Loss,
    *,
    accumulation_steps: int = 1,
    ema_decay: float = 0.0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the step: loss, gradient, update, all in one program with a donated state.

    A step whose loss or gradient norm is not finite leaves everything but the counters as it
    was, bit for bit, and is counted.

    Args:
      trainee: of `make_trainee`.
      loss: see `ttt_jax.objective.Loss`.
      accumulation_steps: parts into which each batch is cut.
      ema_decay: decay a step of the average of the parameters, where the state keeps one.

    Returns:
      A compiled function (state, batch) -> (state, metrics). Call it under
      `jax.set_mesh(trainee.mesh)`; the state given to it must not be used again. The metrics are
      replicated: the scalars loss (mean), grad_norm (before clipping), learning_rate, count,
      skipped, skipped_in_a_row, and the task's statistics, scalars or one value a layer.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        mean, gradient, stats, buffers = loss_and_gradient(
            loss, trainee.graphdef, state.params, state.buffers, batch, key, accumulation_steps
        )
        grad_norm = optax.global_norm(gradient)
        finite = jnp.isfinite(mean) & jnp.isfinite(grad_norm)
        updates, optimizer = trainee.optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        average = state.average and optax.incremental_update(params, state.average, 1 - ema_decay)
        changed = (params, buffers, average, optimizer)
        kept = (state.params, state.buffers, state.average, state.optimizer)
        chosen = jax.tree.map(lambda a, b: jnp.where(finite, a, b), changed, kept)
        missed = 1 - finite.astype(jnp.int32)
        new_state = TrainState(
            state.step + 1,
            state.skipped + missed,
            (state.skipped_in_a_row + missed) * missed,
            state.key,
            *chosen,
        )
        metrics = stats | {
            "loss": mean,
            "grad_norm": grad_norm,
            "learning_rate": trainee.learning_rate(state.step - state.skipped),
            "skipped": new_state.skipped,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }
        return new_state, metrics

    replicated = NamedSharding(trainee.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(trainee.shardings, replicated),
        compiler_options=compat.program_options(),
    )
