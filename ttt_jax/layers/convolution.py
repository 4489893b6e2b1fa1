"""Convolutions of images: depthwise 3×3, dense, and the patch embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ttt_jax.sharding import on_each_device, param
from ttt_kernels.depthwise_conv import depthwise_conv


class DepthwiseConv(nnx.Module):
    """`ttt_kernels.depthwise_conv` with a learned kernel and bias, each device on its own images.

    >>> DepthwiseConv(4, dtype="float32", rngs=nnx.Rngs(0))(jnp.ones((2, 5, 6, 4))).shape
    (2, 5, 6, 4)
    """

    def __init__(self, channels: int, *, dtype: str, rngs: nnx.Rngs, stride: int = 1):
        """Makes kernel and bias, uniform in ±1/3 (PyTorch's default for 9 inputs).

        Args:
          channels: of input and output.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
          stride: as in `ttt_kernels.depthwise_conv`.
        """
        self.kernel = param(_uniform(rngs, (9, channels), 9), (None, "embed"))
        self.bias = param(_uniform(rngs, (channels,), 9), ("embed",))
        self.dtype, self.stride = dtype, stride

    def __call__(self, x, residual: bool = False):
        """Applies the layer.

        Args:
          x: [batch, height, width, channels].
          residual: returns x + y, which a kernel gets for nothing.

        Returns:
          [batch, ceil(height / stride), ceil(width / stride), channels] in the compute dtype.
        """

        def convolve(x, kernel, bias):
            return depthwise_conv(x, kernel, bias, stride=self.stride, residual=residual)

        images = ("images", None, None, None)
        with jax.named_scope("depthwise_conv"):
            arrays = x.astype(self.dtype), self.kernel[...], self.bias[...]
            return on_each_device(convolve, arrays, [images, (None, None), (None,)], images)


class Conv(nnx.Module):
    """A dense k×k convolution with zero padding of (k − 1)/2.

    >>> Conv(3, 8, size=3, stride=2, bias=False, dtype="float32", rngs=nnx.Rngs(0))(
    ...     jnp.ones((1, 8, 8, 3))).shape
    (1, 4, 4, 8)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        size: int,
        bias: bool,
        dtype: str,
        rngs: nnx.Rngs,
        stride: int = 1,
    ):
        """Makes kernel and bias, uniform in ±1/√(k² in) (PyTorch's default).

        Args:
          in_channels: of the input.
          out_channels: of the output.
          size: k, odd.
          bias: whether there is a bias.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
          stride: rows and columns from one output to the next.
        """
        fan_in = size * size * in_channels
        shape = (size, size, in_channels, out_channels)
        self.kernel = param(_uniform(rngs, shape, fan_in), (None, None, None, "embed"))
        self.bias = param(_uniform(rngs, (out_channels,), fan_in), ("embed",)) if bias else None
        self.dtype, self.stride = dtype, stride

    def __call__(self, x):
        """Applies the layer.

        Args:
          x: [batch, height, width, in_channels].

        Returns:
          [batch, ceil(height / stride), ceil(width / stride), out_channels].
        """
        kernel = self.kernel[...].astype(self.dtype)
        padding = kernel.shape[0] // 2
        y = lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel,
            (self.stride, self.stride),
            ((padding, padding),) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class PatchEmbedding(nnx.Module):
    """One token a patch: the patch's pixels times a matrix (Dosovitskiy et al. 2021, eq. 1).

    >>> PatchEmbedding(4, 16, dtype="float32", rngs=nnx.Rngs(0))(jnp.ones((2, 8, 12, 3))).shape
    (2, 2, 3, 16)
    """

    def __init__(self, patch_size: int, features: int, *, dtype: str, rngs: nnx.Rngs):
        """Makes matrix and bias, uniform in ±1/√(pixels · 3) (PyTorch's default).

        Args:
          patch_size: rows and columns of a patch.
          features: width of the model.
          dtype: compute dtype.
          rngs: random streams; "params" is used.
        """
        fan_in = patch_size * patch_size * 3
        self.kernel = param(_uniform(rngs, (fan_in, features), fan_in), (None, "embed"))
        self.bias = param(_uniform(rngs, (features,), fan_in), ("embed",))
        self.patch_size, self.dtype = patch_size, dtype

    def __call__(self, images):
        """Embeds the patches.

        Args:
          images: [batch, height, width, 3], any float dtype; sides are multiples of the patch.

        Returns:
          [batch, height / patch_size, width / patch_size, features] in the compute dtype.

        Raises:
          ValueError: if a side is no multiple of the patch.
        """
        patch, (batch, height, width, channels) = self.patch_size, images.shape
        if height % patch or width % patch or channels != 3:
            raise ValueError(
                f"images has shape {images.shape}; it must be [batch, height, width, 3] with sides"
                f" that are multiples of patch_size={patch}: resize the images"
            )
        x = images.astype(self.dtype).reshape(
            batch, height // patch, patch, width // patch, patch, channels
        )
        x = jnp.swapaxes(x, 2, 3).reshape(batch, height // patch, width // patch, -1)
        return x @ self.kernel[...].astype(self.dtype) + self.bias[...].astype(self.dtype)


def _uniform(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int):
    bound = fan_in**-0.5
    return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
