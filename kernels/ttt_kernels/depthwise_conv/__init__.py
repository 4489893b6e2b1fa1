"""Depthwise 3×3 convolutions of images."""

from ttt_kernels.depthwise_conv.api import depthwise_conv

__all__ = ["depthwise_conv"]
