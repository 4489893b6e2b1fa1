"""The optimizer: AdamW or Muon, gradient clipping, warm-up and cosine decay.

Which rule a parameter falls under is decided by its name and its logical axis names
(`sharding.axis_names`), never by its rank alone: under `nnx.scan` every parameter has one more
axis, "layers", and a stack of matrices must be treated matrix by matrix, a stack of gains as
gains.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from ttt_jax.config import OptimizerConfig

Schedule = Callable[[jax.Array | int], jax.Array]
AxisNames = tuple[str | None, ...]

# Parameters that scale or shift a signal, whatever their rank (one gain vector per head, ...).
GAINS = ("scale", "offset", "bias")


def parameter_rule(name: str, axes: AxisNames, config: OptimizerConfig) -> str:
    """Returns the rule for one parameter: "muon", "adamw", or "adamw without decay".

    A matrix has two axes or more besides "layers", none of them named "gain", and is not called
    "scale", "offset" or "bias".
    Muon takes the matrices inside the layers. The embedding and the output head (axis "vocab")
    stay with AdamW, as Muon's authors advise: their rows are updated one by one.

    Args:
      name: the parameter's own name, the last part of its path.
      axes: logical names of its axes.
      config: the optimizer's configuration.

    >>> parameter_rule("kernel", ("layers", "embed", "mlp"), OptimizerConfig(name="muon"))
    'muon'
    >>> parameter_rule("table", ("vocab", "embed"), OptimizerConfig(name="muon"))
    'adamw'
    >>> parameter_rule("scale", ("layers", "heads", None), OptimizerConfig(name="muon"))
    'adamw without decay'
    """
    rank = sum(axis != "layers" for axis in axes)
    if rank < 2 or "gain" in axes or name in GAINS:
        return "adamw without decay"
    return "muon" if config.name == "muon" and "vocab" not in axes else "adamw"


def matrix_axes(axes: AxisNames) -> tuple[int, int]:
    """Finds a matrix's (input, output) axes; all its other axes stack independent matrices.

    They are the two named axes where there are two, as in a joint q, k, v kernel ("embed", None,
    "heads"), and else the last two, as in fast weights ("heads", None, None).

    >>> matrix_axes(("layers", "embed", None, "heads"))
    (1, 3)
    >>> matrix_axes(("layers", "heads", None, None))
    (2, 3)
    """
    named = [i for i, axis in enumerate(axes) if axis not in (None, "layers")]
    return (named[0], named[1]) if len(named) == 2 else (len(axes) - 2, len(axes) - 1)


def parameter_rules(names: Any, config: OptimizerConfig) -> Any:
    """Applies `parameter_rule` to nested dicts with a tuple of axis names at each leaf."""

    def rule(path: tuple[Any, ...], axes: AxisNames) -> str:
        return parameter_rule(jax.tree_util.keystr(path[-1:], simple=True), axes, config)

    return jax.tree_util.tree_map_with_path(rule, names, is_leaf=_is_axes)


def _is_axes(node: Any) -> bool:
    """Tells the tuple of axis names, a leaf here, from a dict of parameters."""
    return isinstance(node, tuple)


def describe_rules(names: Any, params: Any, config: OptimizerConfig) -> str:
    """Writes which parameters each rule treats.

    Args:
      names: nested dicts with a tuple of axis names at each leaf.
      params: the same dicts with arrays or shapes at the leaves.
      config: the optimizer's configuration.

    Returns:
      One line per rule with its number of arrays and values, then one line per parameter.
    """
    rules = parameter_rules(names, config)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    lines: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for (path, leaf), rule in zip(leaves, jax.tree.leaves(rules), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        lines.setdefault(rule, []).append(f"    {name} {tuple(leaf.shape)}")
        sizes[rule] = sizes.get(rule, 0) + leaf.size
    out = []
    for rule, entries in sorted(lines.items()):
        out.append(f"  {rule}: {len(entries)} arrays, {sizes[rule]:,} values")
        out.extend(entries)
    return "\n".join(out)


def warmup_cosine(steps: int, warmup_steps: int, end_fraction: float) -> Schedule:
    """Returns the schedule's factor: linear warm-up to 1, then a half cosine to `end_fraction`.

    With n updates done, w warm-up steps and p = clip((n + 1 - w) / (steps - w), 0, 1):

        factor(n) = min(1, (n + 1) / w) * (e + (1 - e) * (1 + cos(pi p)) / 2)

    so that the first step already moves and the last one has the end value.

    Args:
      steps: optimizer steps of the run.
      warmup_steps: w.
      end_fraction: e.

    Returns:
      A function from the number of updates done (int32 scalar) to the factor (float32 scalar).

    >>> float(warmup_cosine(10, 4, 0.1)(1)), round(float(warmup_cosine(10, 4, 0.1)(9)), 6)
    (0.5, 0.1)
    """

    def factor(count: jax.Array | int) -> jax.Array:
        done = jnp.asarray(count, jnp.float32) + 1.0
        warm = jnp.minimum(1.0, done / max(warmup_steps, 1))
        progress = jnp.clip((done - warmup_steps) / max(steps - warmup_steps, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return warm * (end_fraction + (1.0 - end_fraction) * cosine)

    return factor


def make_optimizer(
    config: OptimizerConfig, names: Any, steps: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """Builds the optimizer.

    AdamW: Loshchilov & Hutter, arXiv 1711.05101. Muon: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/; Nesterov momentum, five Newton-Schulz steps in the
    gradient's own dtype (float32), each update scaled by sqrt(max(1, fan_out / fan_in)).

    Args:
      config: the optimizer's configuration.
      names: logical axis names of the parameters, as of `sharding.axis_names`.
      steps: optimizer steps of the run, for the schedule.

    Returns:
      (transformation, learning rate of AdamW as a function of the number of updates done).
      The transformation's gradients, moments and updates have the parameters' dtype.

    Raises:
      ValueError: the configuration breaks a rule, or Muon finds no matrix to treat.

    >>> tx, rate = make_optimizer(OptimizerConfig(warmup_steps=0), {"w": ("embed", "mlp")}, 10)
    >>> updates, _ = tx.update({"w": jnp.ones((2, 2))}, tx.init({"w": jnp.zeros((2, 2))}),
    ...                        {"w": jnp.zeros((2, 2))})
    >>> bool((updates["w"] < 0).all())
    True
    """
    config.validate()
    factor = warmup_cosine(steps, config.warmup_steps, config.end_fraction)
    adam_rate = lambda count: config.learning_rate * factor(count)  # noqa: E731
    muon_rate = lambda count: config.muon_learning_rate * factor(count)  # noqa: E731
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    decay = optax.add_decayed_weights(config.weight_decay)
    rules = {
        "adamw": optax.chain(adam, decay, optax.scale_by_learning_rate(adam_rate)),
        "adamw without decay": optax.chain(adam, optax.scale_by_learning_rate(adam_rate)),
        "muon": optax.chain(
            _orthogonalised_momentum(config.muon_momentum, names),
            decay,
            optax.scale_by_learning_rate(muon_rate),
        ),
    }
    labels = parameter_rules(names, config)
    if config.name == "muon" and "muon" not in jax.tree.leaves(labels):
        raise ValueError('config.optimizer.name="muon": the model has no matrix inside its layers')
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, optax.partition(rules, labels)), adam_rate


def _orthogonalised_momentum(momentum: float, names: Any) -> optax.GradientTransformation:
    """Muon without its learning rate: momentum, Newton-Schulz per matrix, scale by shape."""
    dimensions = jax.tree.map(
        lambda axes: contrib.MuonDimensionNumbers(*matrix_axes(axes)), names, is_leaf=_is_axes
    )

    def for_masked(updates: Any) -> Any:
        """Leaves out what `optax.partition` has left out of `updates`."""
        masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
        return jax.tree.map(lambda u, d: u if masked(u) else d, updates, dimensions, is_leaf=masked)

    def scale(update: jax.Array, dims: contrib.MuonDimensionNumbers) -> jax.Array:
        fan_in, fan_out = update.shape[dims.reduction_axis], update.shape[dims.output_axis]
        return update * max(1.0, fan_out / fan_in) ** 0.5

    return optax.chain(
        contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=for_masked),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates, for_masked(updates))),
    )
