"""A rank's part: its beginning in `init`, its end in `shutdown`."""

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
# More, some 2 s of work, is not put together while a program ends.
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
    """Makes the folder and begins this rank's part.

    Args:
        folder: TFDIST_TIMELINE.
        topology: place of this rank.
        host: of this rank.
        job: what only the ranks of this job know alike.
        generation: number of the initialization.
        commit_gate: TFDIST_ATOMIC_STEPS.

    Returns:
        The folder, absolute.

    Raises:
        CoreError: the part cannot be written.
    """
    where = Path(folder).absolute()
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
        where.mkdir(parents=True, exist_ok=True)
        if topology.rank == 0:
            _remove_older(where, topology.size)
        native.start_timeline(str(where), json.dumps(head))
    except (OSError, native.CoreError) as error:
        text = (
            f"TFDIST_TIMELINE={folder}: rank {topology.rank} ({host}) cannot write its "
            f"timeline: {error}; name a folder that it may write, or unset the variable"
        )
        raise native.CoreError(
            native.INVALID_ARGUMENT, text, {"kind": "invalid_argument", "cause": text}
        ) from None
    return where


def _remove_older(folder: Path, size: int) -> None:
    """Removes the old trace and the parts of ranks that this job does not have.

    The parts of this job replace the others.
    """
    (folder / merging.TRACE).unlink(missing_ok=True)
    for rank, path in parts.found(folder).items():
        if rank >= size:
            path.unlink(missing_ok=True)
            parts.older(path).unlink(missing_ok=True)


def _run(job: str, generation: int) -> str:
    """A name for this run that tells nothing about the job's secret parts."""
    return hashlib.sha256(f"timeline {generation} {job}".encode()).hexdigest()[:16]


def share(folder: Path, rank: int) -> None:
    """Makes sure that rank 0 has the part: by its folder, or by sending it there.

    Args:
        folder: that `begin` returned, on all ranks.
        rank: this one.
    """
    own, first = (parts.head_of(parts.path_of(folder, r)) for r in (rank, 0))
    if own is None or first is None or first["run"] != own["run"]:
        native.forward_timeline()


def finish(folder: Path, rank: int, size: int) -> merging.Summary | None:
    """The last rank to leave puts the parts together; after the core has ended.

    Args:
        folder: that `begin` returned.
        rank: this one.
        size: number of ranks.

    Returns:
        What was put together; None: another rank is to do it, or somebody by hand.
    """
    own = parts.head_of(parts.path_of(folder, rank))
    others = [parts.path_of(folder, r) for r in range(size)]
    if own is None or not all(map(parts.has_ended, others)):
        return None
    heads = list(map(parts.head_of, others))
    if any(head is None or head["run"] != own["run"] for head in heads):
        return None
    by_hand = f"put the timeline together: tfdist timeline {folder}"
    if merging.bytes_in(folder) > _MOST_BYTES_AT_EXIT:
        _log.warning("%s", by_hand)
        return None
    claim = folder / f".merging-{own['run']}"
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except OSError:
        return None  # another rank is at it
    try:
        return merging.merge(folder)
    except (OSError, ValueError) as error:
        _log.warning("%s; %s", error, by_hand)
        return None
    finally:
        claim.unlink(missing_ok=True)
