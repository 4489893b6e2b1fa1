"""Rules of fields: what every part of a run's configuration is checked by."""

from typing import Any


def check(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ValueError(name, value, rule) unless `condition` holds.

    >>> check(False, "data.source", "", "name one")
    Traceback (most recent call last):
    ValueError: config.data.source='': name one
    """
    if not condition:
        raise ValueError(f"config.{name}={value!r}: {rule}")


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an int (no bool) of at least `least`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    check(is_int and value >= least, name, value, f"must be an integer >= {least}")


def check_number(name: str, value: Any, interval: str) -> None:
    """Raises ValueError unless `value` is a number (no bool, no NaN) in an interval.

    Args:
      name: of the field, behind "config.".
      value: of the field.
      interval: as in mathematics, "[0, 1)" for 0 <= value < 1; "inf" has no bound.

    >>> check_number("data.flip", 1.0, "[0, 1]")
    >>> check_number("data.flip", 1.0, "[0, 1)")
    Traceback (most recent call last):
    ValueError: config.data.flip=1.0: must lie in [0, 1)
    """
    low, high = map(float, interval[1:-1].split(","))
    inside = isinstance(value, int | float) and not isinstance(value, bool)
    inside = inside and low <= value <= high
    inside = inside and not (value == low and interval[0] == "(")
    inside = inside and not (value == high and interval[-1] == ")")
    check(inside, name, value, f"must lie in {interval}")
