"""Operations and types to measure, with inputs whose exact results are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tfdist.core import native

_PERIOD = 61


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: name on the command line.
        number: TensorFlow's number for the dtype.
        carrier: NumPy dtype that stores the bits of an element.
    """

    name: str
    number: int
    carrier: type[np.generic]

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return int(np.dtype(self.carrier).itemsize)

    @property
    def half(self) -> bool:
        """Whether partial results are computed in a wider type."""
        return self.name in ("float16", "bfloat16")

    def array(self, numbers: np.ndarray) -> np.ndarray:
        """Converts small integers exactly to elements of this type."""
        if self.name == "bfloat16":  # the upper half of a float32
            bits = numbers.astype(np.float32).view(np.uint32) >> 16
            return bits.astype(np.uint16)
        return numbers.astype(self.carrier)


DTYPES = {
    row.name: row
    for row in (
        DType("float32", 1, np.float32),
        DType("float64", 2, np.float64),
        DType("float16", 19, np.float16),
        DType("bfloat16", 14, np.uint16),
        DType("int32", 3, np.int32),
        DType("int64", 9, np.int64),
    )
}


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the number of ranks."""

    rank: int
    size: int


def _tile(numbers: np.ndarray, count: int) -> np.ndarray:
    return np.resize(numbers, count)


def pattern(place: Place, rank: int) -> np.ndarray:
    """Returns one period of the small integers that a rank contributes.

    With up to 256 ranks, their sums over all ranks are at most 256, which all types,
    including bfloat16, represent exactly.
    """
    limit = max(2, 256 // place.size)
    return (np.arange(_PERIOD) * 7 + rank * 5) % limit


def _total(place: Place) -> np.ndarray:
    return np.sum([pattern(place, rank) for rank in range(place.size)], axis=0)


def _own_part(numbers: np.ndarray, place: Place) -> np.ndarray:
    part = len(numbers) // place.size
    return numbers[place.rank * part : (place.rank + 1) * part]


def _sum_on_all(place: Place, count: int) -> np.ndarray:
    return _tile(_total(place), count)


def _from_root(place: Place, count: int) -> np.ndarray:
    return _tile(pattern(place, 0), count)


def _concatenate_all(place: Place, count: int) -> np.ndarray:
    part = count // place.size
    parts = [_tile(pattern(place, rank), part) for rank in range(place.size)]
    return np.concatenate(parts)


def _exchange_parts(place: Place, count: int) -> np.ndarray:
    parts = [
        _own_part(_tile(pattern(place, rank), count), place)
        for rank in range(place.size)
    ]
    return np.concatenate(parts)


def _on_root(
    result: Callable[[Place, int], np.ndarray],
) -> Callable[[Place, int], np.ndarray | None]:
    return lambda place, count: result(place, count) if place.rank == 0 else None


@dataclass(frozen=True)
class Operation:
    """A collective; for operations with a root, the root is rank 0.

    `count` is defined as in nccl-tests. It is the number of elements in the result of
    an allgather or gather, and in the input of a reduce_scatter, scatter or alltoall.

    Attributes:
        name: name on the command line.
        kind: the operation's number in c_api.h.
        result: function of place and count; returns the numbers that this rank gets,
            or None if it gets nothing.
        bus: function of the number of ranks; returns busbw / algbw, as in nccl-tests.
        rows: whether the output is allocated after the ranks have agreed.
        splits: whether `count` must be a multiple of the number of ranks.
        gives_part: whether a rank's input has `count` / size elements.
        rooted: whether a rank can finish before all ranks have called the operation.
    """

    name: str
    kind: int
    result: Callable[[Place, int], np.ndarray | None]
    bus: Callable[[int], float]
    rows: bool = False
    splits: bool = False
    gives_part: bool = False
    rooted: bool = False

    def round_count(self, count: int, size: int) -> int:
        """Rounds a count down to a valid count, at least one element per rank."""
        return max(size, count - count % size) if self.splits else max(1, count)

    def inputs(self, place: Place, count: int) -> np.ndarray:
        """Returns the numbers that this rank contributes."""
        own = count // place.size if self.gives_part else count
        return _tile(pattern(place, place.rank), own)

    def deciding_bytes(self, size_bytes: int, ranks: int) -> int:
        """Returns the size by which the core chooses algorithms (scheduler/plan.h)."""
        return size_bytes * ranks if self.kind == native.ALLTOALL else size_bytes

    def algorithms(self) -> list[str]:
        """Returns the names of the core's algorithms for this operation."""
        names = [name.partition("/") for name in native.build_info()["algorithms"]]
        return [name for kind, _, name in names if kind == self.name]


def _part(size: int) -> float:
    return (size - 1) / size


OPERATIONS = {
    row.name: row
    for row in (
        Operation(
            "allreduce", native.ALLREDUCE, _sum_on_all, lambda size: 2 * _part(size)
        ),
        Operation(
            "reduce_scatter",
            native.REDUCE_SCATTER,
            lambda place, count: _own_part(_sum_on_all(place, count), place),
            _part,
            rows=True,
            splits=True,
        ),
        Operation(
            "allgather",
            native.ALLGATHER,
            _concatenate_all,
            _part,
            rows=True,
            splits=True,
            gives_part=True,
        ),
        Operation(
            "broadcast", native.BROADCAST, _from_root, lambda size: 1.0, rooted=True
        ),
        Operation(
            "reduce",
            native.REDUCE,
            _on_root(_sum_on_all),
            lambda size: 1.0,
            rooted=True,
        ),
        Operation(
            "gather",
            native.GATHER,
            _on_root(_concatenate_all),
            _part,
            rows=True,
            splits=True,
            gives_part=True,
            rooted=True,
        ),
        Operation(
            "scatter",
            native.SCATTER,
            lambda place, count: _own_part(_from_root(place, count), place),
            _part,
            rows=True,
            splits=True,
            rooted=True,
        ),
        Operation(
            "alltoall", native.ALLTOALL, _exchange_parts, _part, rows=True, splits=True
        ),
    )
}
