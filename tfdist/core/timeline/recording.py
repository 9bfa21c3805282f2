"""Begins a rank's part of the timeline in `init`, and ends it in `shutdown`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

from tfdist.core import native
from tfdist.core.timeline import merging, parts

_log = logging.getLogger("tfdist")
# Larger timelines take more than 2 s to merge, so they are not merged at program exit.
_MOST_BYTES_AT_EXIT = 16 << 20


def begin(
    folder: str,
    topology: native.Topology,
    *,
    host: str,
    job: str,
    generation: int,
    commit_gate: int,
) -> Path:
    """Creates the folder and begins this rank's part.

    Args:
        folder: value of TFDIST_TIMELINE.
        topology: topology of this rank.
        host: host name of this rank.
        job: name that is unique to this job.
        generation: number of the initialization.
        commit_gate: value of TFDIST_ATOMIC_STEPS.

    Returns:
        The absolute path of the folder.

    Raises:
        CoreError: the part cannot be written.
    """
    path = Path(folder).absolute()
    head = {
        "type": "rank",
        "version": parts.VERSION,
        "rank": topology.rank,
        "size": topology.size,
        "host": host,
        "host_index": topology.host_of[topology.rank],
        "pid": os.getpid(),
        "run": _run(job, generation),
        "generation": generation,
        "commit_gate": commit_gate,
        "wall_us": time.time_ns() // 1000,
        "monotonic_us": time.monotonic_ns() // 1000,
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        if topology.rank == 0:
            _remove_older(path, topology.size)
        native.start_timeline(str(path), json.dumps(head))
    except (OSError, native.CoreError) as error:
        text = (
            f"TFDIST_TIMELINE={folder}: rank {topology.rank} ({host}) cannot write its "
            f"timeline: {error}; set the variable to a folder in which this rank can "
            "create files, or unset it"
        )
        raise native.CoreError(
            native.INVALID_ARGUMENT, text, {"kind": "invalid_argument", "cause": text}
        ) from None
    return path


def _remove_older(folder: Path, size: int) -> None:
    """Removes the old trace, and the parts of ranks that this job does not have.

    The core overwrites the old parts of the ranks that this job has.
    """
    (folder / merging.TRACE).unlink(missing_ok=True)
    for rank, path in parts.parts_in(folder).items():
        if rank >= size:
            path.unlink(missing_ok=True)
            parts.older(path).unlink(missing_ok=True)


def _run(job: str, generation: int) -> str:
    """Returns a name for this run that does not reveal secrets."""
    return hashlib.sha256(f"timeline {generation} {job}".encode()).hexdigest()[:16]


def share(folder: Path, rank: int) -> None:
    """Makes the part available to rank 0, through a common folder or by sending it.

    Args:
        folder: folder that `begin` returned, on all ranks.
        rank: this rank.
    """
    own_head, first = (parts.head_of(parts.path_of(folder, r)) for r in (rank, 0))
    if own_head is None or first is None or first["run"] != own_head["run"]:
        native.forward_timeline()


def finish(folder: Path, rank: int, size: int) -> merging.Summary | None:
    """Merges the parts on the last rank to leave, after the core has shut down.

    Args:
        folder: folder that `begin` returned.
        rank: this rank.
        size: number of ranks.

    Returns:
        The summary, or None if another rank or the user has to merge the parts.
    """
    own_head = parts.head_of(parts.path_of(folder, rank))
    paths = [parts.path_of(folder, r) for r in range(size)]
    if own_head is None or not all(map(parts.has_ended, paths)):
        return None
    heads = list(map(parts.head_of, paths))
    if any(head is None or head["run"] != own_head["run"] for head in heads):
        return None
    advice = f"merge the timeline with this command: tfdist timeline {folder}"
    if merging.bytes_in(folder) > _MOST_BYTES_AT_EXIT:
        _log.warning("%s", advice)
        return None
    claim = folder / f".merging-{own_head['run']}"
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError:
        return None  # another rank merges
    try:
        return merging.merge(folder)
    except (OSError, ValueError) as error:
        _log.warning("%s; %s", error, advice)
        return None
    finally:
        claim.unlink(missing_ok=True)
