"""Layers of equal shape, stacked or in a list, with initial weights that are drawn together."""

from collections.abc import Callable

import jax
from flax import nnx

STACK = {nnx.PARTITION_NAME: "layers"}


def draw_layers(
    make: Callable[[jax.Array], nnx.Module], keys: jax.Array, *, scan: bool
) -> nnx.Module | nnx.List:
    """Makes a layer from each key.

    The layers of a list are drawn as one stack and then cut: a program that draws 14 layers one by
    one takes a minute to compile for a GPU, and XLA would make that of this one without the
    barrier. The weights are those of ``make(key)``, to the last bit.

    Args:
      make: maps a key to a layer; all have the same structure and shapes.
      keys: [layers].
      scan: stack the parameters along a first axis, named "layers", for `nnx.scan`.

    Returns:
      One layer with stacked parameters, or an `nnx.List` of layers.

    >>> make = lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(params=key))
    >>> layers = draw_layers(make, jax.random.split(jax.random.key(0), 4), scan=False)
    >>> len(layers), layers[0].kernel.shape
    (4, (2, 3))
    """
    if scan:
        return nnx.vmap(make, transform_metadata=STACK)(keys)
    graphdef, stacked = nnx.split(nnx.vmap(make)(keys))
    stacked = jax.lax.optimization_barrier(stacked)
    layers = (jax.tree.map(lambda x, n=n: x[n], stacked) for n in range(len(keys)))
    return nnx.List([nnx.merge(graphdef, layer) for layer in layers])
