"""One step of a gated network on each image, then read at its tokens: ViTTT's inner loop."""

from ttt_kernels.glu_step.api import glu_step, kernel_problem

__all__ = ["glu_step", "kernel_problem"]
