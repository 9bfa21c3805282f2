"""The loops of ../loops.c, for workers whose library is timed from C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def looped(path: str, name: str, arguments: list[Any]) -> Callable[[int], list[float]]:
    """Repeats an operation in C; see `measuring.Repeat`.

    Args:
        path: of the compiled loops.
        name: of the function.
        arguments: all but the last two, which are the times and how many.
    """
    function = getattr(ctypes.CDLL(path), name)
    function.restype = ctypes.c_int32

    def repeat(count: int) -> list[float]:
        seconds = (ctypes.c_double * count)()
        code = function(*arguments, seconds, ctypes.c_int32(count))
        if code != 0:
            raise SystemExit(f"{name}: the operation failed with code {code}")
        return list(seconds)

    return repeat
