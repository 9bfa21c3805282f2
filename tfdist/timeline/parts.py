"""Reading what a rank has left: lines of JSON, the last of a killed rank torn."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

VERSION = 1  # of the format of a part
_NAME = re.compile(r"rank-(\d+)\.jsonl")
_END = b'{"type":"end"}\n'


@dataclasses.dataclass
class Part:
    """What one rank has written.

    Attributes:
        head: "rank", "size", "host", "host_index", "pid", "run", "generation",
            "wall_us" and "monotonic_us" (the same moment by two clocks), "version".
        operations: finished ones, as the core writes them (scheduler/timeline.cc).
        waits: for which "rank" it waited, "since" when, "until" when; by time, and each
            moment once.
        clocks: round trips to rank 0.
        spans: of the program: "name", "begin", "end".
        dropped: how many of them were lost, because too much happened at once.
        complete: whether the rank has left, and not just ended.
    """

    head: dict[str, Any]
    operations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    waits: list[dict[str, int]] = dataclasses.field(default_factory=list)
    clocks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    spans: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    dropped: int = 0
    complete: bool = False

    @property
    def rank(self) -> int:
        """Of the rank that has written it."""
        return int(self.head["rank"])


def path_of(folder: Path, rank: int) -> Path:
    """Where the part of a rank is; `.old` behind it has what was before."""
    return folder / f"rank-{rank}.jsonl"


def older(path: Path) -> Path:
    """What a part was before its file became too long."""
    return path.with_name(path.name + ".old")


def found(folder: Path) -> dict[int, Path]:
    """The parts in a folder, by rank."""
    matches = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir())
    ranks = {int(match[1]): path for match, path in matches if match}
    return dict(sorted(ranks.items()))


def head_of(path: Path) -> dict[str, Any] | None:
    """The first line of a part; None where it is no part."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(1 << 16))
    except (OSError, ValueError):
        return None
    is_head = isinstance(head, dict) and head.get("type") == "rank"
    return head if is_head and head.get("version") == VERSION else None


def has_ended(path: Path) -> bool:
    """Whether the rank has written the last line."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_END), 2)
            return file.read() == _END
    except OSError:
        return False


def read(path: Path) -> Part:
    """Reads a part, with what was before it.

    Args:
        path: of `rank-N.jsonl`.

    Raises:
        ValueError: it is no part of a timeline.
    """
    head = head_of(path)
    if head is None:
        raise ValueError(
            f"Expected {path} to begin with a line about its rank, as tfdist with "
            f"TFDIST_TIMELINE writes it (version {VERSION}), got something else. "
            "Remove the file, or use the version of tfdist that wrote it."
        )
    part = Part(head)
    before = head_of(older(path))
    if before is not None and before["run"] == head["run"]:
        _add(part, _lines(older(path)))
    _add(part, _lines(path))
    return part


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # torn, by the end of the process or of the disk
                continue
            if isinstance(row, dict):
                yield row


def _add(part: Part, rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        kind = row.get("type")
        if kind == "op":
            part.operations.append(row)
        elif kind == "wait":
            part.waits.append(row)
        elif kind == "clock":
            part.clocks.append(row)
        elif kind == "span":
            part.spans.append(row)
        elif kind == "dropped":
            part.dropped = max(part.dropped, int(row["count"]))
        elif kind == "end":
            part.complete = True
