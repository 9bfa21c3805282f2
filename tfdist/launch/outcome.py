"""How a job ended, and the exit code of tfdistrun."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from tfdist.core.term_signal import EXIT_CODE
from tfdist.launch import failure_summary
from tfdist.launch.failure_summary import RankEnd

_PREEMPTED = (0, -signal.SIGTERM, EXIT_CODE)  # of a rank that has saved


@dataclass
class Outcome:
    """How the job ended.

    Attributes:
        ends: one entry per rank, in the order of their ends. Of an elastic job,
            without the ranks that have left the job, or were lost before the last
            generation was formed.
        is_preempted: whether an elastic job ended before its last step, so that its
            ranks could save their state and the job can be started again.
        signal: the first signal that this process received; None for none.
        joined: whether a rank has called `tfdist.init()`.
        memory_bytes: peak memory of a rank's process.
    """

    ends: list[RankEnd] = field(default_factory=list)
    signal: int | None = None
    is_preempted: bool = False
    joined: bool = False
    memory_bytes: int = 0

    @property
    def unexpected_ends(self) -> list[RankEnd]:
        """The ends, without those of ranks that have saved before a preemption."""
        if not self.is_preempted:
            return self.ends
        return [end for end in self.ends if end.code not in _PREEMPTED]

    @property
    def first_failure(self) -> RankEnd | None:
        """The rank that failed first, other than by the signal; None if none did."""
        first = failure_summary.first_failure(self.unexpected_ends)
        if first is not None and self.signal is not None:
            forwarded = (0, -self.signal, 128 + self.signal)
            return None if first.code in forwarded else first
        return first

    @property
    def exit_code(self) -> int:
        """Exit code of tfdistrun."""
        if (first := self.first_failure) is not None:
            return failure_summary.exit_code(first, self.unexpected_ends)
        if self.is_preempted:
            return EXIT_CODE
        if self.signal is not None:
            clean = self.ends and all(end.code == 0 for end in self.ends)
            return 0 if clean else 128 + self.signal
        return 0
