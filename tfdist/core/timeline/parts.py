"""Reads a rank's timeline records: lines of JSON; the last may be incomplete."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

VERSION = 2  # version of the format of a part
_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")
_END = b'{"type":"end"}\n'
_NUMBER_LIMIT = 1 << 63
# Fields of each type of line (scheduler/timeline.cc, `recording`): strings, integers,
# and lists with a fixed number of integers.
_TEXTS = {
    "rank": ("host", "run"),
    "op": ("name", "kind", "ticket"),
    "span": ("name",),
}
_NUMBERS = {
    "rank": (
        *("rank", "size", "host_index", "commit_gate", "wall_us", "monotonic_us"),
    ),
    "op": (
        *("set", "code", "last_ready", "bytes", "submitted", "agreed", "started"),
        *("ended", "done", "first_sent", "last_sent", "sent_bytes", "waited_for"),
        *("waited_since", "waited_until"),
    ),
    "wait": ("rank", "since", "until"),
    "clock": ("asked", "heard", "answered", "back"),
    "span": ("begin", "end"),
    "dropped": ("count",),
    "end": (),
}
_LISTS = {"op": (("pack", 3), ("reduce", 3))}


@dataclasses.dataclass
class Part:
    """Timeline records written by one rank.

    Attributes:
        head: "rank", "size", "host", "host_index", "pid", "run", "generation",
            "commit_gate" (TFDIST_ATOMIC_STEPS), "wall_us" and "monotonic_us" (the same
            moment on two clocks), "version".
        operations: finished operations as written by the core (scheduler/timeline.cc).
        waits: intervals in which the rank waited: "rank", "since", "until". Ascending,
            without overlaps.
        clocks: round trips to rank 0.
        spans: spans of the program: "name", "begin", "end".
        dropped: number of records lost because the core's buffer of records was full.
        complete: whether the rank has left the job; False if it was killed or still
            runs.
        left_out: file and line of each malformed record, and the reason.
    """

    head: dict[str, Any]
    operations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    waits: list[dict[str, int]] = dataclasses.field(default_factory=list)
    clocks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    spans: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    dropped: int = 0
    complete: bool = False
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def rank(self) -> int:
        """Returns the rank that has written the part."""
        return int(self.head["rank"])


def path_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's part; the file with `.old` has older records."""
    return folder / f"rank-{rank}.jsonl"


def older(path: Path) -> Path:
    """Returns the path of the records set aside when a part became too long."""
    return path.with_name(path.name + ".old")


def parts_in(folder: Path) -> dict[int, Path]:
    """Returns the paths of the parts in a folder, by rank."""
    matches = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir())
    ranks = {int(match[1]): path for match, path in matches if match}
    return dict(sorted(ranks.items()))


def strays(folder: Path) -> list[Path]:
    """Returns files that look like parts but have a different name, such as copies."""
    paths = (p for p in folder.glob("rank-*.jsonl") if not _NAME.fullmatch(p.name))
    return sorted(paths)


def head_of(path: Path) -> dict[str, Any] | None:
    """Returns the first line of a part, or None if the file is not a part."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(1 << 16))
    except (OSError, ValueError):
        return None
    is_head = isinstance(head, dict) and head.get("type") == "rank"
    if not is_head or head.get("version") != VERSION or _wrong_with(head):
        return None
    return head if 0 <= head["rank"] < head["size"] else None


def has_ended(path: Path) -> bool:
    """Returns whether the rank has written the last line of its part."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_END), 2)
            return file.read() == _END
    except OSError:
        return False


def read(path: Path) -> Part:
    """Reads a part, including its older records.

    Args:
        path: path of `rank-N.jsonl`.

    Raises:
        ValueError: the file is not a part of a timeline.
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
        _add(part, older(path))
    _add(part, path)
    return part


def _add(part: Part, path: Path) -> None:
    """Adds all lines of a file except the first, up to where another part begins."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row, wrong = _row(line)
            another = number > 1 and row.get("type") == "rank"
            if another:
                wrong = "another part begins here; ignored with all that follows"
            if not wrong:
                _take(part, row)
            elif line.endswith(b"\n"):  # otherwise incomplete because the process ended
                part.left_out.append(f"{path.name}, line {number}: {wrong}")
            if another:
                return


def _row(line: bytes) -> tuple[dict[str, Any], str]:
    """Returns a line and its error; the error is "" if the line is valid."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))  # a name may be truncated
    except (ValueError, RecursionError):
        return {}, "not JSON"
    if not isinstance(row, dict):
        return {}, "not a JSON object"
    return row, _wrong_with(row)


def _wrong_with(row: dict[str, Any]) -> str:
    """Describes what is wrong with a line of a timeline; "" if it is valid."""
    kind = row.get("type")
    if type(kind) is not str or kind not in _NUMBERS:
        return f'expected the "type" of a timeline record, got {kind!r:.40}'
    for name in _TEXTS.get(kind, ()):
        if type(row.get(name)) is not str:
            return f'{kind} without a text "{name}"'
    for name in _NUMBERS[kind]:
        if not _is_number(row.get(name)):
            return f'{kind} without a number "{name}"'
    for name, count in _LISTS.get(kind, ()):
        if not _are_numbers(row.get(name), count):
            return f'{kind} without a list "{name}" of {count} numbers'
    if kind == "op":
        peers = row.get("peers")
        if type(peers) is not list or not all(_are_numbers(peer, 4) for peer in peers):
            return 'op without a list "peers" of lists of 4 numbers'
    return ""


def _is_number(value: Any) -> bool:
    return type(value) is int and -_NUMBER_LIMIT <= value < _NUMBER_LIMIT


def _are_numbers(value: Any, count: int) -> bool:
    return type(value) is list and len(value) == count and all(map(_is_number, value))


def _take(part: Part, row: dict[str, Any]) -> None:
    match row["type"]:
        case "op":
            part.operations.append(row)
        case "wait":
            part.waits.append(row)
        case "clock":
            part.clocks.append(row)
        case "span":
            part.spans.append(row)
        case "dropped":
            part.dropped = max(part.dropped, row["count"])
        case "end":
            part.complete = True
