"""The choice between XLA and the Hopper kernels of an operation that has these two forms."""

from __future__ import annotations

import functools
import logging
from typing import TypeVar

Module = TypeVar("Module")
_logger = logging.getLogger("ttt_kernels")


def xla_or_hopper(
    operation: str,
    implementation: str | None,
    problem: str | None,
    xla: Module,
    kernels: Module,
    name: str = "mosaic_gpu",
) -> Module:
    """The module that runs a call; what None picks is logged once.

    Args:
      operation: name of the public function.
      implementation: "xla", `name` or None, as the caller gave it.
      problem: why the kernels cannot run this call here, or None.
      xla, kernels: the two modules.
      name: of the kernels' implementation.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the kernels are named and there is a problem.

    >>> xla_or_hopper("f", None, "no GPU", "by XLA", "by kernels")
    'by XLA'
    """
    if implementation not in (None, "xla", name):
        raise ValueError(f"{implementation=} is unknown; use 'xla', {name!r} or None")
    if implementation == name and problem:
        raise NotImplementedError(
            f"{implementation=} cannot run here: {problem}; implementation='xla' can"
        )
    if implementation is None:
        implementation = "xla" if problem else name
        _log(operation, implementation, problem or "the arguments and the device suit it")
    return {"xla": xla, name: kernels}[implementation]


@functools.cache
def _log(operation: str, implementation: str, reason: str) -> None:
    _logger.info("%s runs by implementation=%r: %s", operation, implementation, reason)
