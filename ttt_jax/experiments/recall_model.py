"""The small model of the recall experiment: one mixer for all systems, trained in a scan."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ttt_jax.experiments.recall_tasks import BLANK, RecallBatch, RecallTask
from ttt_jax.inner_loop import presets
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.inner_loop_layer import ConvolvedAttention, InnerLoopLayer
from ttt_jax.models.decoder import Decoder
from ttt_jax.models.decoder_config import DecoderConfig, check_choice, check_count

_STEPS_AT_ONCE = 50  # of one compiled scan


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A token mixer of the experiment.

    Attributes:
      spec: from the chunk size to the inner loop; None for softmax attention.
      options: arguments of `InnerLoopLayer` in which the system differs.
    """

    spec: Callable[[int], InnerLoop] | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _lact(variant: int) -> System:
    return System(spec=lambda chunk: presets.lact_llm(variant=variant, chunk_size=chunk))


# Linear attention and Mamba-2 read and write with keys as they are, the others with unit keys.
SYSTEMS = {f"V{variant}": _lact(variant) for variant in range(7)} | {
    "linear attention": System(
        spec=lambda _: presets.linear_attention(), options={"normalize": False}
    ),
    "Mamba-2": System(
        spec=lambda _: presets.mamba2(), options={"normalize": False, "tie_forget": True}
    ),
    "DeltaNet": System(spec=lambda _: presets.deltanet()),
    "Gated DeltaNet": System(spec=lambda _: presets.gated_deltanet()),
    "softmax": System(spec=None),
}


@dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)
class RecallConfig(DecoderConfig):
    """The model's configuration; the other fields are those of `DecoderConfig`.

    Attributes:
      system: a key of `SYSTEMS`.
      head_dim: width of a key and of a value, which sets the size of the state.
      chunk_size: tokens of an inner update, for V0 to V6; the others update at every token.
      mode: how the inner loop is evaluated, as in `ttt_jax.ttt`.

    >>> RecallConfig(vocab_size=9, hidden_size=8, num_layers=1, num_attention_heads=2,
    ...              system="V9", head_dim=4, chunk_size=2).validate()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: system='V9' must be one of ('V0', ...
    """

    system: str
    head_dim: int
    chunk_size: int
    mode: str = "auto"

    def validate(self) -> None:
        """Checks every field.

        Raises:
          ValueError: naming the field, its value and the rule that it breaks.
        """
        DecoderConfig.validate(self)
        check_choice(self, "system", tuple(SYSTEMS))
        check_count(self, "head_dim")
        check_count(self, "chunk_size")


class RecallModel(Decoder):
    """A decoder without decoding, whose blocks mix by one system.

    >>> config = RecallConfig(vocab_size=9, hidden_size=8, num_layers=1, num_attention_heads=2,
    ...                       system="V6", head_dim=4, chunk_size=2, intermediate_size=16)
    >>> RecallModel(config, nnx.Rngs(0))(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 9)
    """

    @staticmethod
    def make_mixer(config: RecallConfig, rngs: nnx.Rngs) -> ConvolvedAttention:
        """The mixer of one layer.

        Args:
          config: the model's configuration.
          rngs: random streams of that layer.

        Returns:
          `InnerLoopLayer` with the system's inner loop, or `ConvolvedAttention`.
        """
        system = SYSTEMS[config.system]
        sizes = (config.hidden_size, config.num_attention_heads)
        options = dict(
            head_dim=config.head_dim,
            stddev=config.initializer_range,
            dtype=config.dtype,
            rngs=rngs,
        )
        if system.spec is None:
            return ConvolvedAttention(*sizes, **options)
        options |= system.options
        spec = system.spec(config.chunk_size)
        return InnerLoopLayer(*sizes, spec, mode=config.mode, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained: AdamW with a warm-up and a cosine.

    Attributes:
      steps: batches.
      rows: rows of a batch.
      learning_rate: its peak.
    """

    steps: int
    rows: int
    learning_rate: float


def train(
    config: RecallConfig, task: RecallTask, training: Training, seed: int
) -> tuple[RecallModel, list[float]]:
    """Trains a model on a task.

    Args:
      config: the model.
      task: the task; step i of the training reads `task.batch(seed, i, rows)`.
      training: steps, rows, rate.
      seed: of parameters and data.

    Returns:
      The model, and the mean loss (nats a query) of each stretch of steps.
    """
    graphdef, params = nnx.split(RecallModel(config, nnx.Rngs(seed)), nnx.Param)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, training.learning_rate, training.steps // 10, training.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    state = (params, optimizer.init(params))

    def step(state, batch):
        params, moments = state
        loss, gradients = jax.value_and_grad(_loss)(params, graphdef, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    run = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    losses = []
    for first in range(0, training.steps, _STEPS_AT_ONCE):
        last = min(first + _STEPS_AT_ONCE, training.steps)
        batches = [task.batch(seed, index, training.rows) for index in range(first, last)]
        tokens, targets = (np.stack([batch[field] for batch in batches]) for field in (0, 1))
        state, stretch = run(state, (tokens, targets))
        losses.append(float(jnp.mean(stretch)))
    return nnx.merge(graphdef, state[0]), losses


def answer(model: RecallModel, batch: RecallBatch) -> np.ndarray:
    """The model's most likely token at every query.

    Args:
      model: a trained model.
      batch: what to ask.

    Returns:
      [rows, queries], token ids.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    return np.asarray(_answers(params, graphdef, batch.tokens, batch.targets.shape[1]))


@functools.partial(jax.jit, static_argnames=("graphdef", "queries"))
def _answers(params, graphdef, tokens, queries):
    return jnp.argmax(_logits(params, graphdef, tokens, queries), axis=-1)


def _logits(params, graphdef, tokens, queries):
    """Scores at the last `queries` tokens, [rows, queries, vocabulary]."""
    model = nnx.merge(graphdef, params)
    features, _ = model.features(tokens)
    return model.logits(features[:, -queries:])


def _loss(params, graphdef, tokens, targets):
    """Mean negative log-likelihood of the answers, in nats a query."""
    logits = _logits(params, graphdef, tokens, targets.shape[1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    asked = targets != BLANK
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.sum(asked)
