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

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
      step: int32 [], batches consumed; skipped ones count.
      skipped: int32 [], steps whose loss or gradient was not finite and which changed nothing.
      skipped_in_a_row: int32 [], how many of them came last without a good one between.
      params: nested dicts of float32 arrays, as of `nnx.to_pure_dict`.
      optimizer: the state of the optax transformation.
    """

    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    params: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
    """The static half of a training run: what `TrainState` does not hold.

    Attributes:
      graphdef: the model without its parameters; `nnx.merge(graphdef, params)` makes a model.
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
) -> Trainee:
    """Prepares model, optimizer and shardings without allocating a parameter.

    Args:
      model_config: the model's configuration, given to `build`.
      optimizer_config: the optimizer's configuration.
      steps: optimizer steps of the run, for the learning-rate schedule.
      mesh: a mesh of `sharding.make_mesh`.
      build: `build(model_config, rngs=nnx.Rngs(key))` returns the model, which holds
        `nnx.Param`s alone.

    Returns:
      The static half of the run.

    Raises:
      ValueError: a parameter is in less than float32, in which small updates would be lost.
    """
    graphdef, shapes, names = abstract_params(model_config, mesh, build)
    optimizer, learning_rate = optim.make_optimizer(optimizer_config, names, steps)

    def init(seed: jax.Array) -> TrainState:
        model = build(model_config, rngs=nnx.Rngs(jax.random.key(seed)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, zero, params, optimizer.init(params))

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
) -> tuple[nnx.GraphDef, Any, Any]:
    """Describes a model's parameters without allocating them.

    Args:
      model_config, mesh, build: as of `make_trainee`.

    Returns:
      (graphdef, nested dicts of `jax.ShapeDtypeStruct` with shardings, nested dicts of the
      logical axis names).

    Raises:
      ValueError: a parameter is in less than float32.
    """
    graphdefs = []

    def split() -> nnx.State:
        graphdef, params = nnx.split(build(model_config, rngs=nnx.Rngs(0)), nnx.Param)
        graphdefs.append(graphdef)
        return params

    # Not nnx.eval_shape: under jax.set_mesh it would read the logical names as mesh axes.
    params = jax.eval_shape(split)
    graphdef = graphdefs[0]
    names = sharding.axis_names(params)
    shapes = nnx.to_pure_dict(params)
    _check_master_dtypes(shapes)
    shardings = sharding.param_shardings(names, shapes, mesh)
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )
    return graphdef, shapes, names


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


def token_losses(model: nnx.Module, batch: Batch, loss_chunk: int) -> tuple[jax.Array, Metrics]:
    """Computes each token's negative log-likelihood without ever holding all logits.

        nll[b, t] = logsumexp(z[b, t]) - z[b, t, targets[b, t]],    z = model.logits(features)

    The sequence is cut into pieces; the logits of one piece exist at a time, and the backward
    pass computes them again (`jax.checkpoint`).

    Args:
      model: a model with `features` and `logits`.
      batch: tokens, targets int32 [B, T]; segment_ids int32 [B, T] too where rows hold several
        documents (without it a row is one document, padded at its end if at all).
      loss_chunk: positions of each row whose logits exist at one time.

    Returns:
      (nll float32 [B, T] in nats, the statistics that `model.features` returns).
    """
    features, stats = model.features(batch["tokens"], segment_ids=batch.get("segment_ids"))
    features = sharding.constrain(features, ("batch", "seq", "embed"))
    rows, length, width = features.shape
    size = min(loss_chunk, length)
    pieces = -(-length // size)
    padding = pieces * size - length
    features = jnp.pad(features, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(batch["targets"], ((0, 0), (0, padding)))

    @jax.checkpoint
    def piece_losses(features: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.logits(features)
        # A masked sum, not a gather: it stays local when the vocabulary is cut over devices.
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        picked = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return jax.nn.logsumexp(logits, axis=-1) - picked

    if pieces == 1:
        return piece_losses(features, targets), stats
    features = jnp.moveaxis(features.reshape(rows, pieces, size, width), 1, 0)
    targets = jnp.moveaxis(targets.reshape(rows, pieces, size), 1, 0)
    losses = jax.lax.map(lambda piece: piece_losses(*piece), (features, targets))
    return jnp.moveaxis(losses, 0, 1).reshape(rows, pieces * size)[:, :length], stats


def loss_and_gradient(
    graphdef: nnx.GraphDef, params: Any, batch: Batch, accumulation_steps: int, loss_chunk: int
) -> tuple[jax.Array, Any, Metrics]:
    """Computes the mean loss over the batch's real tokens, and its gradient.

        loss = sum(weights * nll) / sum(weights)        over the whole batch

    With accumulation the sums are accumulated and divided once at the end, so that the result
    is that of the whole batch however the real tokens are spread over its parts.

    Args:
      graphdef: the model without its parameters.
      params: its parameters.
      batch: as of `token_losses`, and weights float32 [B, T].
      accumulation_steps: parts, A; B is a multiple of A.
      loss_chunk: see `token_losses`.

    Returns:
      (loss float32 [] in nats per token, gradient like `params`, {"tokens": sum of weights,
      and each of the model's statistics averaged to a scalar}).
    """

    def summed_loss(params: Any, part: Batch) -> tuple[jax.Array, Metrics]:
        losses, stats = token_losses(nnx.merge(graphdef, params), part, loss_chunk)
        stats = {name: jnp.mean(value) / accumulation_steps for name, value in stats.items()}
        return jnp.sum(part["weights"] * losses), stats | {"tokens": jnp.sum(part["weights"])}

    value_and_grad = jax.value_and_grad(summed_loss, has_aux=True)
    if accumulation_steps == 1:
        (loss, stats), gradient = value_and_grad(params, batch)
    else:

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(params, part)), None

        parts = jax.tree.map(lambda x: _split_rows(x, accumulation_steps), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        zeros = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(value_and_grad, params, first)
        )
        ((loss, stats), gradient), _ = jax.lax.scan(add, zeros, parts)
    tokens = jnp.maximum(stats["tokens"], 1.0)
    return loss / tokens, jax.tree.map(lambda g: g / tokens, gradient), stats


def _split_rows(x: jax.Array, parts: int) -> jax.Array:
    """Cuts [B, ...] into [parts, B/parts, ...], each device's rows spread over all parts."""
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def make_train_step(
    trainee: Trainee, *, accumulation_steps: int = 1, loss_chunk: int = 1024
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the step: loss, gradient, update, all in one program with a donated state.

    A step whose loss or gradient norm is not finite leaves parameters and optimizer state as
    they were, bit for bit, and is counted.

    Args:
      trainee: of `make_trainee`.
      accumulation_steps: parts into which each batch is cut.
      loss_chunk: positions of each row whose logits exist at one time.

    Returns:
      A compiled function (state, batch) -> (state, metrics). Call it under
      `jax.set_mesh(trainee.mesh)`; the state given to it must not be used again. The metrics are
      replicated scalars: loss (nats per token), grad_norm (before clipping), learning_rate,
      tokens, skipped, skipped_in_a_row, and the model's statistics.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, gradient, stats = loss_and_gradient(
            trainee.graphdef, state.params, batch, accumulation_steps, loss_chunk
        )
        grad_norm = optax.global_norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, optimizer = trainee.optimizer.update(gradient, state.optimizer, state.params)
        changed = (optax.apply_updates(state.params, updates), optimizer)
        kept = (state.params, state.optimizer)
        params, optimizer = jax.tree.map(lambda a, b: jnp.where(finite, a, b), changed, kept)
        missed = 1 - finite.astype(jnp.int32)
        new_state = TrainState(
            step=state.step + 1,
            skipped=state.skipped + missed,
            skipped_in_a_row=(state.skipped_in_a_row + missed) * missed,
            params=params,
            optimizer=optimizer,
        )
        metrics = stats | {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": trainee.learning_rate(state.step - state.skipped),
            "skipped": new_state.skipped,
            "skipped_in_a_row": new_state.skipped_in_a_row,
        }
        return new_state, metrics

    replicated = NamedSharding(trainee.mesh, PartitionSpec())
    return jax.jit(train_step, donate_argnums=0, out_shardings=(trainee.shardings, replicated))
