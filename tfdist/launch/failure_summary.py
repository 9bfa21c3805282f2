"""Reports which rank failed first, how it failed, and where to look for the cause."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_REASON_CHARACTERS = 1000


@dataclass
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: number of the rank.
        code: exit code; -N if it was killed by signal N.
        time_s: time of the exit, in time.monotonic() seconds.
        ended_by_us: whether tfdistrun terminated the rank, for example after another
            rank had failed.
        told: the rank's own report, with "error", "blamed" and "time_s"; empty if it
            reported nothing.
        tail: last lines of the rank's output.
        tail_is_shown: whether `tail` is among the last lines on the screen.
        host: name of the host on which the rank ran.
        log: file with all output of the rank; None if there is none. In an elastic job,
            its name does not always contain the rank.
        lost: how the host was lost; the exit code is then unknown. "" if it was not.
    """

    rank: int
    code: int
    time_s: float
    ended_by_us: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)
    tail: Sequence[bytes] = ()
    tail_is_shown: bool = False
    host: str = field(default_factory=socket.gethostname)
    lost: str = ""
    log: Path | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank failed, and was not terminated by tfdistrun."""
        return self.code != 0 and not self.ended_by_us

    @property
    def failed_at_s(self) -> float:
        """Time of the failure: of the report or of the exit, whichever is first."""
        return min(self.time_s, float(self.told.get("time_s", self.time_s)))

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 + N for signal N."""
        return 128 - self.code if self.code < 0 else self.code


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Returns the root cause: the first rank that failed without blaming another rank.

    A rank that was only affected (its peer was killed, or it raised RankFailedError)
    may exit before the rank at fault, and then blames that rank in its report. The rank
    at fault may even run on until tfdistrun terminates it.
    """
    failed = [end for end in ends if end.failed]
    by_rank = {end.rank: end for end in ends if end.code != 0}
    guilty = [end for end in roots(ends) if not _blames_other(end, by_rank)]
    candidates = [end for end in guilty if end.failed] or guilty
    # A rank that reported nothing, and that no rank blames, may only have reacted to
    # another rank's error.
    blamed = {end.told.get("blamed") for end in failed}
    spoke = [end for end in candidates if end.told or end.rank in blamed]
    if len(blamed) > 1:
        candidates = spoke or candidates
    found = min(candidates or failed, key=lambda end: end.failed_at_s, default=None)
    if (
        found and not candidates
    ):  # they blame each other, after the link between them broke
        return by_rank[found.told["blamed"]]
    return found


def roots(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Returns, for each rank that failed, the last rank in its chain of blame.

    That is the rank itself if it blames no other, or if the blame is a cycle.
    """
    by_rank = {end.rank: end for end in ends if end.code != 0}
    return [_root(end, by_rank) for end in ends if end.failed]


def exit_code(first: RankEnd, ends: Sequence[RankEnd]) -> int:
    """Returns tfdistrun's exit code, from the root cause `first` and all ends.

    It is the exit code of `first`. If tfdistrun terminated that rank, it is the exit
    code of the first rank that failed by itself.
    """
    if first.failed:
        return first.exit_code
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: end.failed_at_s, default=first).exit_code


def _blames_other(end: RankEnd, by_rank: Mapping[int, RankEnd]) -> bool:
    return end.told.get("blamed") in by_rank.keys() - {end.rank}


def _root(end: RankEnd, by_rank: Mapping[int, RankEnd]) -> RankEnd:
    """Follows blame from rank to rank; returns the last rank, or `end` in a cycle."""
    found, seen = end, {end.rank}
    while _blames_other(found, by_rank):
        found = by_rank[found.told["blamed"]]
        if found.rank in seen:
            return end
        seen.add(found.rank)
    return found


def signal_name(number: int) -> str:
    """Returns the name of a signal, e.g. "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_code(code: int) -> str:
    """Describes an exit code, e.g. "exit code 3", "killed by SIGKILL"."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "it was killed; if nobody ran `kill -9`, the usual cause is the "
    "kernel of a host that is short of memory (see `dmesg`), or a limit of the batch "
    "system",
    signal.SIGSEGV: "it crashed in native code; `tfdistrun --env PYTHONFAULTHANDLER=1` "
    "shows where",
    signal.SIGABRT: "native code aborted; the lines above show the reason, and "
    "`tfdistrun --env PYTHONFAULTHANDLER=1` shows where",
    signal.SIGBUS: "it crashed in native code, or memory that the system had promised "
    "was not available",
    signal.SIGILL: "the program was built for another kind of processor",
    signal.SIGTERM: "it was terminated, perhaps by the batch system at its time limit",
}
_TEXT_HINTS = (
    ("command not found", "give the program's path, or activate its environment"),
    (
        "No module named 'horovod'",
        "start a program that was written for Horovod with `tfdistrun --horovod`",
    ),
    ("in tfdist's replacement for Horovod", ""),  # the message is complete
    (
        "ModuleNotFoundError",
        "is the right environment active? tfdistrun runs COMMAND unchanged, so give "
        "the environment's own Python, e.g. `.venv/bin/python train.py`",
    ),
    (
        "is not built: expected",
        "build tfdist first: `pip install -e . --no-build-isolation`",
    ),
    (
        "MemoryError",
        "out of memory: use a smaller batch size, or fewer ranks on this host",
    ),
    (
        "ResourceExhaustedError",
        "out of memory: use a smaller batch size, or fewer ranks on this host",
    ),
    (
        "although its process is there",
        "a connection between two ranks was cut: check the network between their hosts",
    ),
    (
        "No space left on device",
        "a disk is full: see `df -h`",
    ),
    (
        "Too many open files",
        "raise the limit on open files: `ulimit -n 65536`",
    ),
)


def hint(end: RankEnd, ends: Sequence[RankEnd]) -> str:
    """Returns a hint about the cause of a failure, or "" if there is none."""
    if end.lost:
        return end.lost.partition("\n")[2].strip()
    if end.code == -signal.SIGTERM and end.told.get("error"):
        return ""  # a child process, which reported the reason, terminated the rank
    if end.code < 0 and not end.ended_by_us:
        return _SIGNAL_HINTS.get(-end.code, "")
    blamed = end.told.get("blamed")
    others = {other.rank: other for other in ends}
    if blamed in others and others[blamed].code == 0 and blamed != end.rank:
        return (
            f"rank {blamed} had ended without an error: all ranks must perform the "
            "same number of steps (tfdist.data.shard ensures that)"
        )
    text = b"\n".join(end.tail).decode("utf-8", "replace") + _reason(end, ends)
    for part, advice in _TEXT_HINTS:
        if part in text:
            return advice
    if end.code == 126:
        return "the file is not executable; did you mean `python FILE`?"
    return ""


def explain(
    first: RankEnd,
    ends: Sequence[RankEnd],
    *,
    started_s: float,
    log: Path | None,
) -> list[str]:
    """Returns the report as lines; the first line names the root cause."""
    after = first.failed_at_s - started_s
    lines = [
        f"rank {first.rank} on {first.host} failed first: {_describe(first)} "
        f"after {after:.1f} s"
    ]
    # A reported error was printed before this report, or is in the log. Other output of
    # the rank may be far up on the screen.
    if first.tail and not first.told.get("error") and not first.tail_is_shown:
        lines.append(f"last lines of rank {first.rank}:")
        lines += [f"  | {line.decode('utf-8', 'replace')}" for line in first.tail]
    others = [end for end in ends if end is not first]
    if others:
        told = ", ".join(f"{end.rank}: {_describe(end)}" for end in others)
        lines.append(f"other ranks: {told}")
    if log is not None:
        lines.append(f"all output: {log}")
    if reason := _reason(first, others):
        lines.append(reason)
    if advice := hint(first, ends):
        lines.append(f"hint: {advice}")
    return lines


def _reason(first: RankEnd, others: Sequence[RankEnd]) -> str:
    """Returns the reason that the rank reported, or the first rank that blamed it."""
    witnesses = [end for end in others if end.told.get("blamed") == first.rank]
    witnesses.sort(key=lambda end: end.failed_at_s)
    own_fault = first.told.get("blamed") in (None, first.rank)
    for end in (first, *witnesses) if own_fault else (*witnesses, first):
        if error := str(end.told.get("error", "")):
            by = "" if end is first else f" (as rank {end.rank} saw it)"
            return f"reason{by}: {error.splitlines()[0][:_REASON_CHARACTERS]}"
    return ""


def _describe(end: RankEnd) -> str:
    if end.ended_by_us:
        return "ended by tfdistrun"
    return end.lost.partition("\n")[0] or describe_code(end.code)
