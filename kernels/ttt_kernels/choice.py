"""The choice among an operation's implementations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TypeVar

Form = TypeVar("Form")
_logger = logging.getLogger("ttt_kernels")


def choose(
    operation: str,
    implementation: str | None,
    forms: Mapping[str, Form],
    problems: Mapping[str, str | None],
) -> Form:
    """What runs a call: the form that is named, or the first of them that can.

    Args:
      operation: name of the public function, for the log.
      implementation: a name in `forms`; or None, and what is taken is logged once, with reasons.
      forms: modules, or anything that runs the call, by name, the fastest first.
      problems: why a form cannot run this call here; one without a problem, or with None, can. At
        least one can.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the named form cannot run; says why, and which one can.

    >>> forms = {"mosaic_gpu": "kernels", "xla": "XLA"}
    >>> choose("f", None, forms, {"mosaic_gpu": "there is no GPU"})
    'XLA'
    >>> choose("f", "mosaic_gpu", forms, {"mosaic_gpu": "there is no GPU"})
    Traceback (most recent call last):
    NotImplementedError: implementation='mosaic_gpu' cannot run here: there is no GPU; 'xla' can
    """
    names = list(forms)
    first = next(name for name in names if not problems.get(name))
    if implementation is None:
        reasons = (f"not {name}: {problems[name]}" for name in names[: names.index(first)])
        _log(operation, first, "; ".join(reasons) or "the call and the device suit it")
        return forms[first]
    if not isinstance(implementation, str) or implementation not in names:
        raise ValueError(f"{implementation=} is unknown; use one of {names} or None")
    if problems.get(implementation):
        raise NotImplementedError(
            f"{implementation=} cannot run here: {problems[implementation]}; {first!r} can"
        )
    return forms[implementation]


@functools.cache
def _log(operation: str, implementation: str, reason: str) -> None:
    _logger.info("%s runs by implementation=%r: %s", operation, implementation, reason)
