"""How a job ended, and the exit code of tfdistrun."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.core.term_signal import EXIT_CODE
from tfdist.launch import failure_summary
from tfdist.launch.failure_summary import RankEnd
from tfdist.launch.output import RankOutput, Screen

_PREEMPTED = (0, -signal.SIGTERM, EXIT_CODE)  # exit codes of a rank that has saved


@dataclass
class Outcome:
    """How the job ended.

    Attributes:
        ends: one entry per rank, in the order in which the ranks exited. For an elastic
            job, excludes ranks that left the job, ranks that were lost before the last
            generation was formed, and newcomers that have not joined.
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
        """The rank that failed first; None if none failed, except by `signal`.

        If all failed ranks were killed by tfdistrun, it is the first of these: an
        elastic job kills ranks that are stopped or too slow.
        """
        ends = self.unexpected_ends
        first = failure_summary.first_failure(ends)
        if first is None and self.signal is None and not self.is_preempted:
            return next((end for end in ends if end.code != 0), None)
        if first is None or self.signal is None:
            return first
        forwarded = (-self.signal, 128 + self.signal)
        if first.code not in forwarded:
            return first
        # A rank that blames a rank that the signal ended did not fail by itself.
        roots = failure_summary.roots(ends)
        others = [end for end in roots if end.code not in forwarded]
        return failure_summary.first_failure(others)

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


def add_reports(
    ends: Mapping[int, RankEnd],
    reports: Mapping[int, Mapping[str, Any]],
    clocks_s: Mapping[str, float],
) -> None:
    """Adds the ranks' own reports to their `RankEnd`.

    Args:
        ends: the ends, by rank or by member of an elastic job.
        reports: the reports, by the same numbers.
        clocks_s: for each other host, the seconds to add to times on its clock.
    """
    for number, end in ends.items():
        end.told = reports.get(number, {})
        if end.host in clocks_s and "time_s" in end.told:
            time_s = float(end.told["time_s"]) + clocks_s[end.host]
            end.told = {**end.told, "time_s": time_s}


def add_output(end: RankEnd, output: RankOutput, screen: Screen) -> None:
    """Adds a rank's log and last lines to its `RankEnd`, and its traceback to the log.

    Args:
        end: the end of the rank.
        output: output of the rank.
        screen: screen on which the failure is reported.
    """
    end.log = output.log_path
    end.tail = list(output.tail)
    end.tail_is_shown = output.tail_is_shown(screen)
    if full := end.told.get("traceback"):
        output.note(f"tfdistrun: the full traceback:\n{full}")
