"""Image classifiers with blocks of one width; subclasses say what mixes the tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttt_jax.layers.convolution import PatchEmbedding
from ttt_jax.layers.gelu_mlp import GeluMLP
from ttt_jax.layers.layer_norm import LayerNorm
from ttt_jax.layers.linear import Linear
from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.models.vision_blocks import BlockStack, VisionBlock
from ttt_jax.sharding import constrain


class VisionModel(nnx.Module):
    """Patches, blocks, a norm, the mean over all tokens, and a linear head.

    There is no class token and no table of positions: a model takes images of any size whose
    sides are multiples of the patch.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        """Makes the model.

        Args:
          config: a `VisionConfig` of the subclass.
          rngs: random streams; "params" is used.

        Raises:
          ValueError: from `config.validate()`.
        """
        config.validate()
        self.config = dataclasses.replace(config)
        width, dtype = config.hidden_size, config.dtype
        make_mixer = type(self).make_mixer

        def make_block(rngs):
            mlp = GeluMLP(
                width,
                int(width * config.mlp_ratio),
                stddev=config.initializer_range,
                dtype=dtype,
                rngs=rngs,
                bias=True,
            )
            mixer, epsilon = make_mixer(config, rngs), config.norm_epsilon
            return VisionBlock(width, mixer, mlp, epsilon=epsilon, dtype=dtype, rngs=rngs)

        self.patches = PatchEmbedding(config.patch_size, width, dtype=dtype, rngs=rngs)
        self.blocks = BlockStack(
            make_block, config.num_layers, scan=config.scan_layers, remat=config.remat, rngs=rngs
        )
        self.norm = LayerNorm(width, epsilon=config.norm_epsilon, bias=True)
        self.head = classifier(config, width, rngs)

    def features(self, images, *, key=None):
        """The pooled features of images.

        Args:
          images: [batch, height, width, 3], normalised, any float dtype.
          key: random key of a training step (stochastic depth); None in evaluation.

        Returns:
          [batch, hidden], float32 (float64 for float64).

        Raises:
          ValueError: if the sides are no multiples of the patch.
        """
        config = self.config
        rates = np.linspace(0.0, config.drop_path_rate, config.num_layers)
        x = self.blocks(self.patches(images), rates, key)
        x = jnp.mean(self.norm(x), axis=(1, 2), dtype=at_least_float32(config.dtype))
        return constrain(x, ("images", None))

    def __call__(self, images, *, key=None):
        """Scores of the classes; arguments as in `features`.

        Args:
          images: [batch, height, width, 3].
          key: random key of a training step, or None.

        Returns:
          [batch, num_classes], float32 (float64 for float64).
        """
        features = self.features(images, key=key)
        with jax.named_scope("head"):
            return self.head(features, out_dtype=at_least_float32(self.config.dtype))

    def num_params(self) -> int:
        """Number of parameters, the head included.

        Returns:
          The sum of the sizes of all `nnx.Param`s.
        """
        return count_params(self)

    def flops_per_image(self) -> float:
        """Matmul FLOPs of a forward pass over one image of the configured size.

        Returns:
          2 FLOPs a multiply-add: patches, projections, mixers, feed-forward layers and head;
          depthwise convolutions are left out. Training costs three times as much.
        """
        config, grid = self.config, self.config.grid()
        width = config.hidden_size
        tokens = grid * grid
        first = self.blocks.layers if config.scan_layers else self.blocks.layers[0]
        mlp = 4 * width * int(width * config.mlp_ratio)
        block = first.mixer.flops(grid, grid) + tokens * mlp
        patches = 2 * tokens * config.patch_size**2 * 3 * width
        return float(config.num_layers * block + patches + 2 * width * config.num_classes)

    @staticmethod
    def make_mixer(config, rngs: nnx.Rngs):
        """The token mixer of one block; every subclass has its own.

        Args:
          config: the model's configuration.
          rngs: random streams of that block.
        """
        raise NotImplementedError("a subclass of VisionModel must define make_mixer")


def classifier(config, width: int, rngs: nnx.Rngs) -> Linear:
    """The linear head of a vision model.

    Args:
      config: with num_classes, initializer_range and dtype.
      width: of the features.
      rngs: random streams; "params" is used.

    Returns:
      The layer, with a bias.
    """
    return Linear(
        width,
        config.num_classes,
        names=("embed", "vocab"),
        stddev=config.initializer_range,
        dtype=config.dtype,
        bias=True,
        rngs=rngs,
    )


def count_params(model: nnx.Module) -> int:
    """Number of parameters of a model.

    Args:
      model: the model; arrays or shapes.

    Returns:
      The sum of the sizes of all `nnx.Param`s.
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
