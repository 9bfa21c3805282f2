"""How a job ended, and the exit code of tfdistrun."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from tfdist.core.term_signal import EXIT_CODE
from tfdist.launch import failure_summary
from tfdist.launch.failure_summary import RankEnd

_PREEMPTED = (0, -signal.SIGTERM, EXIT_CODE)  # exit codes of a rank that has saved


@dataclass
class Outcome:
    """How the job ended.

    Attributes:
        ends: one entry per rank, in the order in which the ranks exited. For an elastic
            job, excludes ranks that left the job, and ranks that were lost before the
            last generation was formed.
        is_preempted: whether an elastic job was preempted: its ranks could save their
            state and exited before the last step.
        signal: first signal to end the job that this process received; None if none.
        joined: whether at least one rank has called `tfdist.init()`.
        memory_bytes: largest peak memory of a process of the job.
    """

    ends: list[RankEnd] = field(default_factory=list)
    signal: int | None = None
    is_preempted: bool = False
    joined: bool = False
    memory_bytes: int = 0

    @property
    def unexpected_ends(self) -> list[RankEnd]:
        """The entries of `ends`, without ranks that saved because of a preemption."""
        if not self.is_preempted:
            return self.ends
        return [end for end in self.ends if end.code not in _PREEMPTED]

    @property
    def first_failure(self) -> RankEnd | None:
        """The rank that failed first; None if none failed, or if `signal` ended it."""
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
