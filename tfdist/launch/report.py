"""Says which rank failed first, how, and what to look at."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: its index.
        code: exit code; -N when signal N killed it.
        time_s: when, in time.monotonic() seconds.
        ended_by_us: it was ended because another one had failed before.
        told: what it reported before its end: "error", "blamed", "time_s".
        tail: last lines of its output.
        host: where it ran.
        lost: how its host was lost, when that is why its end is not known.
    """

    rank: int
    code: int
    time_s: float
    ended_by_us: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)
    tail: Sequence[bytes] = ()
    host: str = field(default_factory=socket.gethostname)
    lost: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return self.code != 0 and not self.ended_by_us

    @property
    def failed_at_s(self) -> float:
        """When it failed: at its report, if that came before its end."""
        return min(self.time_s, float(self.told.get("time_s", self.time_s)))

    @property
    def exit_code(self) -> int:
        """As a shell would say it."""
        return 128 - self.code if self.code < 0 else self.code


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The root cause: the first rank that failed without blaming another one.

    A rank that only suffered (its peer was killed, it got RankFailedError) can end
    before the one at fault; it names that one in its report.
    """
    failed = [end for end in ends if end.failed]
    numbers = {end.rank for end in failed}
    guilty = [
        end
        for end in failed
        if end.told.get("blamed") in (None, end.rank)
        or end.told["blamed"] not in numbers
    ]
    return min(guilty or failed, key=lambda end: end.failed_at_s, default=None)


def signal_name(number: int) -> str:
    """E.g. "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_code(code: int) -> str:
    """E.g. "exit code 3", "killed by SIGKILL"."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "somebody killed it; without a user's `kill -9` that is often the "
    "kernel, short of memory (see `dmesg`), or a limit of the batch system",
    signal.SIGSEGV: "it crashed in native code; `tfdistrun --env PYTHONFAULTHANDLER=1` "
    "shows where",
    signal.SIGABRT: "native code gave up; its reason is in the lines above, "
    "`tfdistrun --env PYTHONFAULTHANDLER=1` shows where",
    signal.SIGBUS: "it crashed in native code, or memory that was promised ran out",
    signal.SIGILL: "the program was built for another kind of processor",
    signal.SIGTERM: "somebody ended it, perhaps the batch system at its time limit",
}
_TEXT_HINTS = (
    ("command not found", "give the program's path, or activate its environment"),
    (
        "No module named 'horovod'",
        "a program that was written for Horovod is started with `tfdistrun --horovod`",
    ),
    ("in tfdist's place of Horovod", ""),  # which says it all
    (
        "ModuleNotFoundError",
        "is the right environment active? tfdistrun starts COMMAND as it is, e.g. "
        "`.venv/bin/python train.py`",
    ),
    (
        "is not built: expected",
        "build tfdist first: `pip install -e . --no-build-isolation`",
    ),
    (
        "MemoryError",
        "the memory is used up: use a smaller batch, or fewer ranks on this host",
    ),
    (
        "ResourceExhaustedError",
        "the memory is used up: use a smaller batch, or fewer ranks on this host",
    ),
    (
        "No space left on device",
        "a disk is full: see `df -h`",
    ),
    (
        "Too many open files",
        "raise the limit of open files: `ulimit -n 65536`",
    ),
)


def hint(end: RankEnd, ends: Sequence[RankEnd]) -> str:
    """What to look at, "" when the output says it all."""
    if end.lost:
        return end.lost.partition("\n")[2].strip()
    if end.code < 0:
        return _SIGNAL_HINTS.get(-end.code, "")
    blamed = end.told.get("blamed")
    others = {other.rank: other for other in ends}
    if blamed in others and others[blamed].code == 0 and blamed != end.rank:
        return (
            f"rank {blamed} had ended without an error: all ranks must do the same "
            "number of steps (tfdist.data.shard sees to that)"
        )
    text = b"\n".join(end.tail).decode("utf-8", "replace")
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
    """The report, line by line; the first line names the root cause."""
    after = first.failed_at_s - started_s
    lines = [
        f"rank {first.rank} on {first.host} failed first: {_describe(first)} "
        f"after {after:.1f} s"
    ]
    if first.told.get("error"):
        lines.append(f"reason: {str(first.told['error']).splitlines()[0][:500]}")
    if advice := hint(first, ends):
        lines.append(f"hint: {advice}")
    if first.tail:
        lines.append(f"last lines of rank {first.rank}:")
        lines += [f"  | {line.decode('utf-8', 'replace')}" for line in first.tail]
    others = [end for end in ends if end is not first]
    if others:
        told = ", ".join(f"{end.rank}: {_describe_other(end)}" for end in others)
        lines.append(f"other ranks: {told}")
    if log is not None:
        lines.append(f"all output: {log}")
    return lines


def _describe_other(end: RankEnd) -> str:
    return "ended by tfdistrun" if end.ended_by_us else _describe(end)


def _describe(end: RankEnd) -> str:
    return end.lost.partition("\n")[0] or describe_code(end.code)
