"""The public operation `norm_parts` and the choice of its implementation."""

from __future__ import annotations

from typing import Literal

import jax

from ttt_kernels import compat
from ttt_kernels.arguments import check_array, check_number
from ttt_kernels.choice import choose
from ttt_kernels.norm_parts import mosaic_gpu, xla

Implementation = Literal["xla", "mosaic_gpu"]
KINDS = ("rms", "unit", "silu")
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def norm_parts(
    x: jax.Array,
    scales: jax.Array | None = None,
    *,
    kinds: tuple[str, ...],
    size: int,
    epsilon: float,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """The parts of rows, each cut into groups of `size` numbers a, and of each group::

        "rms":   a / sqrt(mean(a²) + epsilon) · scale of the part
        "unit":  b / (|b| + epsilon), b = silu(a)
        "silu":  a σ(a)

    The backward pass starts from x, and makes the scales' gradients in the same pass as that of x.

    Args:
      x: [rows, features] floats, no axis empty; parts of equal width lie side by side.
      scales: [parts, size] floats where a part is "rms", else None.
      kinds: of each part, "rms", "unit" or "silu".
      size: of a group; divides the width of a part.
      epsilon: added to the mean square, or to the norm.
      implementation: "xla" (any device), "mosaic_gpu" (one kernel each way for Hopper GPUs), or
        None, which picks the fastest that runs here and logs the choice once. A named
        implementation never falls back.

    Returns:
      The parts, [rows, features / parts] each, in x's dtype; computed in at least float32.

    Raises:
      ValueError: an argument of the wrong shape or dtype, or an unknown kind.
      NotImplementedError: the named implementation cannot run these arguments here.

    Sources: Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4; Elfwing et al. 2018, arXiv 1702.03118.

    >>> import jax.numpy as jnp
    >>> x, scales = jnp.array([[3.0, 4.0, 0.0, 2.0]]), jnp.ones((2, 2))
    >>> y, z = norm_parts(x, scales, kinds=("rms", "silu"), size=2, epsilon=0.0)
    >>> [round(float(value), 3) for value in (*y[0], *z[0])]
    [0.849, 1.131, 0.0, 1.762]
    """
    check_array("x", x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; it must be [rows, features], no axis empty")
    if not isinstance(kinds, tuple) or not kinds or not all(kind in KINDS for kind in kinds):
        raise ValueError(f"{kinds=} must be a tuple of {KINDS}, one a part")
    check_number("epsilon", epsilon, least=0)
    whole = isinstance(size, int) and not isinstance(size, bool)
    if not whole or size < 1 or x.shape[1] % (len(kinds) * size):
        raise ValueError(
            f"{size=} must divide each of the {len(kinds)} parts of the {x.shape[1]} features"
        )
    if ("rms" in kinds) != (scales is not None):
        raise ValueError(f"{scales=} with {kinds=}: a part of kind 'rms' has them, and it alone")
    if scales is not None:
        check_array("scales", scales)
        if scales.shape != (len(kinds), size):
            raise ValueError(f"scales has shape {scales.shape}; it must be {(len(kinds), size)}")
    problem = mosaic_gpu.unsupported(x, len(kinds), size) or compat.hopper_problem()
    module = choose("norm_parts", implementation, _MODULES, {"mosaic_gpu": problem})
    return module.norm_parts(x, scales, kinds, size, float(epsilon))
