"""One step of a gated network on each image, then read at its tokens: ViTTT's inner loop."""

from ttt_kernels.glu_step.api import glu_step, glu_step_beside, kernel_problem

__all__ = ["glu_step", "glu_step_beside", "kernel_problem"]
