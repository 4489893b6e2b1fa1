"""Losses of a batch as a sum and a count, so that the parts of a batch add up."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax import sharding

Batch = dict[str, jax.Array]
Statistics = dict[str, jax.Array]
# (model, batch, key) -> (sum of weighted losses [], {"count": sum of the weights, and statistics
# to report, scalars or one value a layer}); loss / count is the mean loss.
Loss = Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, Statistics]]


def make_token_loss(loss_chunk: int) -> Loss:
    """Makes the loss of a batch of text: `token_losses` summed with the batch's weights.

    Args:
      loss_chunk: positions of each row whose logits exist at one time.

    Returns:
      A `Loss`; its batches hold `weights`, float32 [B, T], beside what `token_losses` takes.
    """

    def loss(model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[jax.Array, Statistics]:
        losses, stats = token_losses(model, batch, loss_chunk)
        return jnp.sum(batch["weights"] * losses), stats | {"count": jnp.sum(batch["weights"])}

    return loss


def token_losses(
    model: nnx.Module, batch: Batch, loss_chunk: int
) -> tuple[jax.Array, Statistics]:
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
    features = sharding.constrain(features, ("batch", "seq", None))
    rows, length, _ = features.shape
    parts = sharding.sequence_parts(length)  # every device takes pieces of its own stretch
    stretch = length // parts
    size = min(-(-loss_chunk // parts), stretch)
    pieces = -(-stretch // size)

    def cut(x: jax.Array) -> jax.Array:
        """[rows, length, ...] to [pieces, rows, parts * size, ...]."""
        x = x.reshape(rows, parts, stretch, *x.shape[2:])
        padding = ((0, 0), (0, 0), (0, pieces * size - stretch), *((0, 0),) * (x.ndim - 3))
        x = jnp.pad(x, padding).reshape(rows, parts, pieces, size, *x.shape[3:])
        x = jnp.moveaxis(x, 2, 0).reshape(pieces, rows, parts * size, *x.shape[4:])
        return sharding.constrain(x, (None, "batch", "seq", *(None,) * (x.ndim - 3)))

    @jax.checkpoint
    def piece_losses(features: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.logits(features)
        # A masked sum, not a gather: it stays local when the vocabulary is cut over devices.
        chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
        picked = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)
        return jax.nn.logsumexp(logits, axis=-1) - picked

    if pieces == 1:
        return piece_losses(features, batch["targets"]), stats
    inputs = (cut(features), cut(batch["targets"]))
    losses = jax.lax.map(lambda piece: piece_losses(*piece), inputs)
    losses = jnp.moveaxis(losses.reshape(pieces, rows, parts, size), 0, 2)
    losses = losses.reshape(rows, parts, pieces * size)
    return losses[:, :, :stretch].reshape(rows, length), stats
