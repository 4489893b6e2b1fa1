"""The public operation `round_parts` and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax

from ttt_kernels import compat
from ttt_kernels.arguments import check_array
from ttt_kernels.choice import choose
from ttt_kernels.round_parts import mosaic_gpu, xla

Implementation = Literal["xla", "mosaic_gpu"]
_MODULES = {"mosaic_gpu": mosaic_gpu, "xla": xla}


def round_parts(
    matrices: Sequence[jax.Array],
    parts: Sequence[tuple[int, ...]],
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, ...]:
    """Matrices in bfloat16, each cut along its second axis; as the products that read them want it.

    Args:
      matrices: [in, number of parts, out] or [in, out] floats, no axis empty.
      parts: of each matrix, how many neighbouring parts a result holds, side by side; (1,) for one
        of two axes.
      implementation: "xla" (any device, a pass for each result), "mosaic_gpu" (one kernel for
        Hopper GPUs), or None, which picks the fastest that runs here and logs the choice once. A
        named implementation never falls back.

    Returns:
      The results one after another, [in, parts of it · out] bfloat16. Gradients are rounded to
      bfloat16, as those of a conversion are.

    Raises:
      ValueError: no matrices, one of the wrong shape or dtype, or parts that are not all of one's.
      NotImplementedError: the named implementation cannot run these arguments here.

    >>> import jax.numpy as jnp
    >>> w = jnp.arange(12.0).reshape(2, 3, 2)
    >>> [y.tolist() for y in round_parts([w], [(2, 1)])]
    [[[0.0, 1.0, 2.0, 3.0], [6.0, 7.0, 8.0, 9.0]], [[4.0, 5.0], [10.0, 11.0]]]
    """
    if not matrices or len(matrices) != len(parts):
        raise ValueError(f"{len(matrices)} matrices with {len(parts)} parts; give parts for each")
    for n, (matrix, counts) in enumerate(zip(matrices, parts, strict=True)):
        check_array(f"matrices[{n}]", matrix)
        whole = matrix.shape[1] if matrix.ndim == 3 else 1
        if matrix.ndim not in (2, 3) or 0 in matrix.shape:
            raise ValueError(
                f"matrices[{n}] has shape {matrix.shape}; it must be [in, parts, out] or [in, out]"
            )
        if min(counts, default=0) < 1 or sum(counts) != whole:
            raise ValueError(f"parts[{n}]={counts} must be numbers that add up to {whole}")
    problem = mosaic_gpu.unsupported(matrices) or compat.hopper_problem()
    if implementation is None:
        problem = problem or mosaic_gpu.untimed()
    module = choose("round_parts", implementation, _MODULES, {"mosaic_gpu": problem})
    return module.round_parts(tuple(matrices), tuple(map(tuple, parts)))
