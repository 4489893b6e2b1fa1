"""Official tensors as the parameters of one of our modules, in any dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.convert.tables import from_official


def params_of(abstract, table, tensors, dtype) -> dict:
    """Every parameter (and running statistic) of a module, none of the tensors left over.

    Args:
      abstract: the module, from `nnx.eval_shape`.
      table: of `ttt_jax.convert`.
      tensors: official name -> array.
      dtype: of the result.
    """
    found = from_official(table, tensors, nnx.to_pure_dict(nnx.state(abstract)))
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), found)
