"""Objects that are no plain data, under one module name on all ranks."""

from __future__ import annotations

from typing import Any

import tfdist

ran: list[str] = []


class Point:
    """An object like any other."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    def __hash__(self) -> int:
        return hash(self.x)


def _boom() -> None:
    ran.append("boom")


class Bomb:
    """Says in `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_boom, ())


class Refusing:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("no number",))


def _only_elsewhere(rank: int) -> str:
    if tfdist.rank() == rank:
        raise ModuleNotFoundError("No module named 'theirs'")
    return "loaded"


class NotOn:
    """Cannot be unpickled on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return (_only_elsewhere, (self._rank,))
