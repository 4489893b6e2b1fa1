"""What the vision models share: the residual block, and a stack of equal blocks."""

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.layers.convolution import DepthwiseConv
from ttt_jax.layers.layer_norm import LayerNorm
from ttt_jax.layers.residual import add_and_norm
from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.layers.stochastic_depth import drop_factor
from ttt_jax.models.layer_stack import STACK, draw_layers

_KEEP = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class VisionBlock(nnx.Module):
    """x + cpe(x), then x + mixer(norm(x)), then x + mlp(norm(x)), on a grid of tokens.

    cpe is a 3×3 depthwise convolution, the only sense of place that a block has (conditional
    position encoding, Chu et al. 2021, arXiv 2102.10882).
    """

    def __init__(self, hidden_size: int, mixer, mlp, *, epsilon: float, dtype: str, rngs):
        """Makes a block.

        Args:
          hidden_size: width.
          mixer: has a method `branch` that maps [batch, height, width, hidden] to (the same, a bias
            [hidden] still to be added to it, or None).
          mlp: likewise.
          epsilon: ε of the two norms.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        self.position = DepthwiseConv(hidden_size, dtype=dtype, rngs=rngs)
        self.mixer_norm = LayerNorm(hidden_size, epsilon=epsilon, bias=True)
        self.mixer = mixer
        self.mlp_norm = LayerNorm(hidden_size, epsilon=epsilon, bias=True)
        self.mlp = mlp

    def __call__(self, x, rate=None, key=None):
        """Runs the block.

        Args:
          x: [batch, height, width, hidden].
          rate: probability of leaving out a branch, see `drop_factor`; used with a key only.
          key: random key of a training step, or None.

        Returns:
          Same shape and dtype.
        """
        keys = (None, None) if key is None else jax.random.split(key)

        def branch(layer, x, key):
            y, bias = layer.branch(x)
            dtype = at_least_float32(y.dtype)
            factor = None if key is None else drop_factor(x.shape[0], rate, key, dtype)
            return dict(branch=y, branch_bias=bias, factor=factor)

        x, y = add_and_norm(self.position(x, residual=True), self.mixer_norm)
        x, y = add_and_norm(x, self.mlp_norm, **branch(self.mixer, y, keys[0]))
        return add_and_norm(x, None, **branch(self.mlp, y, keys[1]))


class BlockStack(nnx.Module):
    """Blocks of equal shape, one after another: a list, or stacked and run in a scan.

    In a scan compile time does not depend on the number of blocks. The initial weights do not
    depend on that choice.
    """

    def __init__(self, make_block, depth: int, *, scan: bool, remat: str, rngs: nnx.Rngs):
        """Makes the blocks.

        Args:
          make_block: maps an `nnx.Rngs` to a block.
          depth: number of blocks, at least 1.
          scan: stack the parameters along a first axis, named "layers".
          remat: what the backward pass recomputes: "none", "full" or "dots" (all but the
            products with weights).
          rngs: random streams; "params" is used.
        """
        keys = jax.random.split(rngs.params(), depth)

        def make(key):
            return make_block(nnx.Rngs(params=key))

        self.layers = draw_layers(make, keys, scan=scan)
        self.depth, self.scan, self.remat = depth, scan, remat

    def __call__(self, x, rates, key):
        """Runs all blocks.

        Args:
          x: [batch, height, width, hidden].
          rates: [depth], numpy: of stochastic depth, by block; used with a key only.
          key: random key of a training step, or None.

        Returns:
          Like x.
        """

        def body(x, block, rate, key):
            return block(x, rate, key)

        if self.remat != "none":
            body = nnx.remat(body, policy=_KEEP[self.remat], graph=False)
        if key is None or not any(rates):
            rates = keys = None
        else:
            rates, keys = jnp.asarray(rates, jnp.float32), jax.random.split(key, self.depth)
        if self.scan:
            # As a plain pytree (no graph) a model can be used inside any loop of the caller's.
            axes = dict(in_axes=(nnx.Carry, 0, 0, 0), out_axes=nnx.Carry, graph=False)
            return nnx.scan(body, transform_metadata=STACK, **axes)(x, self.layers, rates, keys)
        for index, block in enumerate(self.layers):
            chosen = (None, None) if keys is None else (rates[index], keys[index])
            x = body(x, block, *chosen)
        return x
