"""Times one operation at one size with each requested algorithm."""

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
_ROUNDS = 5  # in each round, every algorithm runs
_MIN_REPETITIONS, _MAX_REPETITIONS = 1, 60  # repetitions of an algorithm in a round
_ALIGNMENT = 64
_GARBAGE = 0x5A


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of the table.

    Attributes:
        size_bytes: size of the data, as defined by nccl-tests.
        algorithm: name of the algorithm; with auto, the chosen algorithm.
        auto: whether auto was requested.
        seconds: time of the slowest rank, as the median over the repetitions.
        repetitions: number of repetitions.
        wrong: number of wrong elements on all ranks.
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
        """Algorithm bandwidth, in bytes per second."""
        return self.size_bytes / self.seconds


class _Candidate:
    """An algorithm to be measured, on arrays that all algorithms share."""

    def __init__(self, call: Call, algorithm: str, auto: bool) -> None:
        self.call, self.algorithm, self.auto = call, algorithm, auto
        self.times_s: list[float] = []
        self.wrong = 0.0
        self.repetitions = _MIN_REPETITIONS


def _align(array: np.ndarray) -> np.ndarray:
    """Returns a copy that is aligned to 64 bytes, like tensors.

    A large NumPy array begins 16 bytes after the start of a page. Writes to this
    address delay reads at the start of other pages, where segments begin, because the
    processor first compares only the last 12 bits of addresses.
    """
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    found = memory[first : first + array.nbytes].view(array.dtype)
    found = found.reshape(array.shape)
    found[...] = array
    return found


class Cell:
    """An operation at one size and type."""

    def __init__(
        self, operation: Operation, dtype: DType, size_bytes: int, place: Place
    ) -> None:
        self._operation, self._dtype, self._place = operation, dtype, place
        self.count = operation.round_count(size_bytes // dtype.bytes, place.size)
        self.size_bytes = self.count * dtype.bytes
        self._input = _align(dtype.array(operation.inputs(place, self.count)))
        expected = operation.result(place, self.count)
        self._expected = None if expected is None else dtype.array(expected)
        shape = self._input if self._expected is None else self._expected
        # In a reduce, ranks other than the root also have an output, which is not used.
        self._output = _align(shape)

    def algorithm_of(self, choice: str) -> str | None:
        """Returns the core's algorithm for `choice`; None if this case has none."""
        decides = self._operation.deciding_bytes(self.size_bytes, self._place.size)
        kind, dtype = self._operation.kind, self._dtype.number
        return native.algorithm(kind, dtype, decides, choice)

    def _candidate(self, choice: str) -> _Candidate | None:
        name = self.algorithm_of("" if choice == AUTO else choice)
        if name is None:
            return None
        call = Call(
            self._operation,
            self._dtype,
            self._input,
            self._output,
            name=f"bench {self._operation.name} {self._dtype.name} {choice}",
            algorithm="" if choice == AUTO else choice,
        )
        return _Candidate(call, name, choice == AUTO)

    def _check(self, candidate: _Candidate, agreement: Agreement) -> None:
        self._output.view(np.uint8).fill(_GARBAGE)
        candidate.call.run()
        wrong = 0
        if self._expected is not None:
            wrong = int(np.count_nonzero(self._output != self._expected))
        candidate.wrong += agreement.total(wrong)

    def _time(self, candidate: _Candidate, count: int, agreement: Agreement) -> None:
        agreement.meet()
        for _ in range(count):
            if (
                self._operation.rooted
            ):  # otherwise the root could be one repetition ahead
                agreement.meet()
            begin = time.perf_counter()
            candidate.call.run()
            candidate.times_s.append(time.perf_counter() - begin)

    def measure(
        self, names: Sequence[str], agreement: Agreement, *, cap_s: float
    ) -> list[Result]:
        """Times all algorithms that support this case, each for about `cap_s` seconds.

        Results are checked before the first and after the last repetition.
        """
        found = [c for c in (self._candidate(name) for name in names) if c is not None]
        for candidate in found:
            self._check(candidate, agreement)
            self._time(candidate, 2, agreement)  # warm-up
        if not found:
            return []
        slowest = agreement.largest(np.array([min(c.times_s) for c in found]))
        for candidate, seconds in zip(found, slowest, strict=True):
            fits = math.floor(cap_s / _ROUNDS / max(seconds, 1e-9))
            candidate.repetitions = min(max(fits, _MIN_REPETITIONS), _MAX_REPETITIONS)
            candidate.times_s.clear()
        for _ in range(_ROUNDS):
            for candidate in found:
                self._time(candidate, candidate.repetitions, agreement)
        for candidate in found:
            self._check(candidate, agreement)
        return [self._result(candidate, agreement) for candidate in found]

    def _result(self, candidate: _Candidate, agreement: Agreement) -> Result:
        slowest = agreement.largest(np.array(candidate.times_s))
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
