"""Merges the parts of all ranks into one trace."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist.core.timeline import clocks, communication, events, parts
from tfdist.core.timeline.slowest_rank import slowest

TRACE = "trace.json"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of a merged timeline.

    Attributes:
        path: path of the trace.
        size: number of ranks of the job.
        ranks: ranks whose parts were found.
        incomplete: ranks that have not left the job, because they were killed or still
            run.
        error_us: largest error between the clocks of two ranks; None if unknown.
        waited_us: how long each rank has waited for each other rank, after the first
            step of `fit` if there is one.
        exposed: exposed communication by rank, for ranks with at least two steps.
        waits: operations in which the ranks waited longest, and for which rank.
        dropped: number of lost records.
        left_out: ignored files and lines, with the reason.
    """

    path: Path
    size: int
    ranks: list[int]
    incomplete: list[int]
    error_us: float | None
    waited_us: dict[int, dict[int, int]]
    exposed: dict[int, communication.Exposure]
    waits: list[communication.Wait]
    dropped: int
    left_out: list[str]

    @property
    def slowest(self) -> tuple[int | None, float]:
        """Returns the slowest rank, and how long the others waited for it, in us."""
        return slowest({r: float(sum(w.values())) for r, w in self.waited_us.items()})


def bytes_in(folder: Path) -> int:
    """Returns the total size of the parts in a folder."""
    paths = [
        p for part in parts.parts_in(folder).values() for p in (part, parts.older(part))
    ]
    return sum(p.stat().st_size for p in paths if p.is_file())


def merge(folder: Path) -> Summary:
    """Writes `trace.json` in `folder` from the parts in this folder.

    Args:
        folder: folder given by TFDIST_TIMELINE. Parts from several hosts must be copied
            into one folder.

    Raises:
        ValueError: the folder has no parts, a file with the name of a part but
            different contents, or parts of two jobs.
        OSError: a file cannot be read or written. An older trace is not changed.
    """
    found, left_out = _read(folder)
    if not found:
        raise ValueError(
            f"Expected files rank-N.jsonl in {folder}, got none"
            + "".join(f"; {one}" for one in left_out)
            + ". Pass the folder that TFDIST_TIMELINE named when the job ran."
        )
    heads = {rank: part.head for rank, part in found.items()}
    _check_run(folder, heads)
    base = found[min(found)]
    converts, errors = {}, {}
    for rank, part in found.items():
        same = part.head["host_index"] == 0  # on the host of rank 0
        converts[rank], errors[rank] = clocks.to_rank_zero(part.clocks, same_host=same)
    waited = {rank: _waited_us(part) for rank, part in found.items()}
    exposed = {r: communication.exposure_of(part) for r, part in found.items()}
    known = [e for e in errors.values() if e is not None]
    summary = Summary(
        path=folder / TRACE,
        size=int(base.head["size"]),
        ranks=sorted(found),
        incomplete=sorted(r for r, part in found.items() if not part.complete),
        error_us=sum(sorted(known)[-2:]) if len(known) == len(errors) else None,
        waited_us=waited,
        exposed={r: e for r, e in exposed.items() if e is not None},
        waits=communication.longest_waits(list(found.values())),
        dropped=sum(part.dropped for part in found.values()),
        left_out=left_out,
    )
    try:
        _write(summary, found, converts)
    except OSError as error:  # the error of a full disk has no path
        why = error.strerror or error
        raise OSError(f"{summary.path} cannot be written: {why}") from error
    return summary


def _read(folder: Path) -> tuple[dict[int, parts.Part], list[str]]:
    """Returns the parts by rank, and descriptions of ignored files."""
    found: dict[int, parts.Part] = {}
    left_out = [
        f"{path.name}: not a name like rank-0.jsonl; rename the file if it is the part "
        "of a rank, or remove it if it is a copy"
        for path in parts.strays(folder)
    ]
    for rank, path in parts.parts_in(folder).items():
        part = parts.read(path)
        if part.rank == rank:
            found[rank] = part
            left_out += part.left_out
        else:
            left_out.append(
                f"{path.name}: the part of rank {part.rank}; rename it to "
                f"{parts.path_of(folder, part.rank).name}, or remove it if it is a copy"
            )
    return found, left_out


def _check_run(folder: Path, heads: Mapping[int, Mapping[str, Any]]) -> None:
    runs: dict[str, list[int]] = {}
    for rank, head in heads.items():
        runs.setdefault(str(head["run"]), []).append(rank)
    if len(runs) > 1:
        ranks = " and ".join(str(r) for r in runs.values())
        raise ValueError(
            f"Expected the parts in {folder} to be of one job, got parts of "
            f"{len(runs)} jobs: ranks {ranks}. Remove the parts of the older jobs."
        )


def _waited_us(part: parts.Part) -> dict[int, int]:
    """Sums the waits after the first step of `fit`, which builds graphs."""
    first_us = communication.first_step_end_us(part)
    total: dict[int, int] = {}
    for wait in part.waits:
        us = wait["until"] - max(wait["since"], first_us)
        if us > 0:
            total[wait["rank"]] = total.get(wait["rank"], 0) + us
    return total


def _write(
    summary: Summary, found: Mapping[int, parts.Part], converts: Mapping[int, Any]
) -> None:
    starts = [converts[r](part.head["monotonic_us"]) for r, part in found.items()]
    begin_us = min(starts)
    late, cost_us = summary.slowest
    about = {
        "size": summary.size,
        "ranks": summary.ranks,
        "incomplete": summary.incomplete,
        "clock_error_us": summary.error_us,
        "dropped": summary.dropped,
        "left_out": len(summary.left_out),
        "started_wall_us": min(part.head["wall_us"] for part in found.values()),
        "slowest_rank": late,
        "others_waited_for_it_ms": cost_us / 1000,
        "waited_for_us": summary.waited_us,
        "exposed_communication": {r: e._asdict() for r, e in summary.exposed.items()},
        "longest_waits": [wait._asdict() for wait in summary.waits],
    }
    temporary = summary.path.with_name(f"{TRACE}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","otherData":')
            file.write(json.dumps(about) + ',\n"traceEvents":[\n')
            separator = ""
            for rank in summary.ranks:
                note = ""
                if rank == late and cost_us > 0:
                    note = f", slowest: others waited {cost_us / 1000:.1f} ms for it"
                shift = _shift(converts[rank], begin_us)
                for event in events.events_of(found[rank], shift, note=note):
                    file.write(separator + json.dumps(event, separators=(",", ":")))
                    separator = ",\n"
            file.write("\n]}\n")
        temporary.replace(summary.path)
    finally:
        temporary.unlink(missing_ok=True)


def _shift(
    convert: Callable[[float], float], begin_us: float
) -> Callable[[float], float]:
    """Returns a function that converts times such that the trace begins at 0."""
    return lambda us: round(convert(us) - begin_us, 1)
