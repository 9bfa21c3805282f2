"""Times one operation at one size, by every algorithm that is asked for, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.core import native
from tfdist.tools.bench.calls import Agreement, Call
from tfdist.tools.bench.operations import DType, Operation, Place

AUTO = "auto"
_ROUNDS = 5  # in which the algorithms take turns
_LEAST, _MOST = 1, 60  # repetitions of an algorithm in a round
_ALIGNMENT = 64
_GARBAGE = 0x5A


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of the table.

    Attributes:
        size_bytes: of the data, as nccl-tests counts them.
        algorithm: its name; what auto took, if it was asked for.
        auto: whether auto was asked for.
        seconds: median over the repetitions of the slowest rank's time.
        repetitions: how many.
        wrong: elements that were not exactly right, on all ranks.
    """

    operation: str
    dtype: str
    count: int
    size_bytes: int
    algorithm: str
    auto: bool
    seconds: float
    repetitions: int
    wrong: int

    @property
    def algbw(self) -> float:
        """Bytes a second."""
        return self.size_bytes / self.seconds


class _Candidate:
    """One algorithm on the memory that all of them use."""

    def __init__(self, call: Call, algorithm: str, auto: bool) -> None:
        self.call, self.algorithm, self.auto = call, algorithm, auto
        self.taken_s: list[float] = []
        self.wrong = 0.0
        self.repetitions = _LEAST


def _placed(array: np.ndarray) -> np.ndarray:
    """A copy that begins where TensorFlow's tensors do, at a multiple of 64 bytes.

    A large array of NumPy begins 16 bytes after a page. What is written there holds up
    reading at the beginning of other pages, where segments begin: a processor compares
    the last 12 bits of addresses first.
    """
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    found = memory[first : first + array.nbytes].view(array.dtype)
    found = found.reshape(array.shape)
    found[...] = array
    return found


class Cell:
    """One operation on one size and type."""

    def __init__(
        self, operation: Operation, dtype: DType, size_bytes: int, place: Place
    ) -> None:
        self._operation, self._dtype, self._place = operation, dtype, place
        self.count = operation.rounded(size_bytes // dtype.bytes, place.size)
        self.size_bytes = self.count * dtype.bytes
        self._given = _placed(dtype.array(operation.given(place, self.count)))
        expected = operation.result(place, self.count)
        self._expected = None if expected is None else dtype.array(expected)
        shape = self._given if self._expected is None else self._expected
        # Non-roots of a reduce have an output too, that nobody reads.
        self._taken = _placed(shape)

    def algorithm_of(self, wanted: str) -> str | None:
        """Returns the core's algorithm for `wanted`, or None if it has none here."""
        decides = self._operation.deciding_bytes(self.size_bytes, self._place.size)
        kind, dtype = self._operation.kind, self._dtype.number
        return native.algorithm(kind, dtype, decides, wanted)

    def _candidate(self, wanted: str) -> _Candidate | None:
        name = self.algorithm_of("" if wanted == AUTO else wanted)
        if name is None:
            return None
        call = Call(
            self._operation,
            self._dtype,
            self._given,
            self._taken,
            name=f"bench {self._operation.name} {self._dtype.name} {wanted}",
            algorithm="" if wanted == AUTO else wanted,
        )
        return _Candidate(call, name, wanted == AUTO)

    def _checked(self, candidate: _Candidate, agreement: Agreement) -> None:
        self._taken.view(np.uint8).fill(_GARBAGE)
        candidate.call.run()
        wrong = 0
        if self._expected is not None:
            wrong = int(np.count_nonzero(self._taken != self._expected))
        candidate.wrong += agreement.total(wrong)

    def _timed(self, candidate: _Candidate, count: int, agreement: Agreement) -> None:
        agreement.meet()
        for _ in range(count):
            if self._operation.rooted:  # else the root of one would be in the next
                agreement.meet()
            begin = time.perf_counter()
            candidate.call.run()
            candidate.taken_s.append(time.perf_counter() - begin)

    def measure(
        self, wanted: Sequence[str], agreement: Agreement, *, cap_s: float
    ) -> list[Result]:
        """Times all algorithms that support the case, each for about `cap_s` seconds.

        Each result is checked before the first and after the last repetition.
        """
        found = [c for c in (self._candidate(name) for name in wanted) if c is not None]
        for candidate in found:
            self._checked(candidate, agreement)
            self._timed(candidate, 2, agreement)  # warm-up
        if not found:
            return []
        slowest = agreement.largest(np.array([min(c.taken_s) for c in found]))
        for candidate, seconds in zip(found, slowest, strict=True):
            fits = math.floor(cap_s / _ROUNDS / max(seconds, 1e-9))
            candidate.repetitions = min(max(fits, _LEAST), _MOST)
            candidate.taken_s.clear()
        for _ in range(_ROUNDS):
            for candidate in found:
                self._timed(candidate, candidate.repetitions, agreement)
        for candidate in found:
            self._checked(candidate, agreement)
        return [self._result(candidate, agreement) for candidate in found]

    def _result(self, candidate: _Candidate, agreement: Agreement) -> Result:
        slowest = agreement.largest(np.array(candidate.taken_s))
        return Result(
            operation=self._operation.name,
            dtype=self._dtype.name,
            count=self.count,
            size_bytes=self.size_bytes,
            algorithm=candidate.algorithm,
            auto=candidate.auto,
            seconds=float(np.median(slowest)),
            repetitions=len(slowest),
            wrong=int(candidate.wrong),
        )
