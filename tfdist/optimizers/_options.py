"""Checks of option values; their errors contain the expected and the actual value."""

from __future__ import annotations

import math
import numbers
from typing import Any


def number(
    name: str, value: Any, *, at_least: float | None = None, above: float | None = None
) -> float:
    """Returns the value as a finite float; raises if it is below the bound."""
    expected = "a finite number"
    if at_least is not None:
        expected = f"a number of at least {at_least:g}"
    if above is not None:
        expected = f"a number above {above:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_message(name, expected, value))
    found = float(value)
    too_small = (at_least is not None and found < at_least) or (
        above is not None and found <= above
    )
    if too_small or not math.isfinite(found):
        raise ValueError(_message(name, expected, value))
    return found


def fraction(name: str, value: Any, *, below_one: bool = False) -> float:
    """Returns the value as a float in [0, 1], or in [0, 1) if `below_one`."""
    found = number(name, value, at_least=0)
    if found > 1 or (below_one and found == 1):
        expected = "of at least 0 and below 1" if below_one else "from 0 to 1"
        raise ValueError(_message(name, f"a number {expected}", value))
    return found


def integer(name: str, value: Any, *, at_least: int) -> int:
    """Returns the value as an int; raises if it is below the bound."""
    expected = f"a whole number of at least {at_least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(name, expected, value))
    if value < at_least:
        raise ValueError(_message(name, expected, value))
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Returns the value; raises unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(_message(name, "True or False", value))
    return value


def _message(name: str, expected: str, value: Any) -> str:
    return f"{name}: expected {expected}, got {type(value).__name__} {value!r}."
