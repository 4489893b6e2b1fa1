"""Values of kinds that no argument takes by accident."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

_KINDS = {
    "a string": "bogus",
    "a list": [[1.0]],
    "a complex number": 1j,
    "a NaN": float("nan"),
    "a 0-d array": np.array(1.0),
    "an array of strings": np.array(["bogus"]),
    "an object": object(),
    "a mapping": {"bogus": 1},
}


def check_argument(
    function: Callable, arguments: Mapping[str, Any], name: str, none: bool = True
) -> None:
    """Fails unless a wrong kind of value for one argument is a ValueError that names it.

    Args:
      function: what is called.
      arguments: by name, all of which fit.
      name: of the argument that gets values that do not fit.
      none: whether None does not fit either, and a bool, where the right value is none.
    """
    wrong = dict(_KINDS)
    if none:
        wrong |= {"None": None}
        if not isinstance(arguments[name], bool):
            wrong |= {"a bool": True}
    for kind, value in wrong.items():
        try:
            function(**(dict(arguments) | {name: value}))
        except ValueError as error:
            assert re.search(rf"\b{name}\b", str(error)), f"{kind}: {error}"
        else:
            pytest.fail(f"{name}={value!r}, {kind}, was taken")
