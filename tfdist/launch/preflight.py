"""Checks, before the start, whether this machine has the resources for the ranks."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tfdist.core import native
from tfdist.core.rendezvous.overlay import first_peers

_FILES_OF_A_PROGRAM = 256  # Python, TensorFlow, data files
_FILES_A_PEER = 4  # socket, shared memory, window, doorbell
_FILES_A_RANK = 6  # in the launcher: two pipes, log file, process, two for the store
_STACK_BYTES = 1 << 20
_GOOD_STACK_BYTES = 8 << 20


@dataclass
class Findings:
    """Errors and warnings of the checks."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def raised_limit(kind: int, need: int, wish: int) -> int:
    """Raises a soft limit of this process, which ranks inherit, if it is below `need`.

    The new limit is `wish`, or the hard limit if that is lower.

    Returns:
        The new limit, which is below `need` if the hard limit is; `need` if the soft
        limit was high enough.
    """
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return need
    target = wish if hard == resource.RLIM_INFINITY else min(wish, hard)
    resource.setrlimit(kind, (target, hard))
    return target


def _used(folder: Path) -> int:
    """Returns the bytes that a control group uses, without reclaimable file caches."""
    told = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in told)
    files = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return int((folder / "memory.current").read_text()) - files


def available_memory() -> int:
    """Returns the bytes that the machine and this control group can still allocate."""
    free = int(psutil.virtual_memory().available)
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            folder = Path("/sys/fs/cgroup") / path.lstrip("/")
            if number == "0":
                limit = (folder / "memory.max").read_text().strip()
                if limit != "max":
                    free = min(free, max(0, int(limit) - _used(folder)))
    except (OSError, ValueError):
        pass  # no cgroup v2: only the machine limits the memory
    return free


def links_a_rank(world: int) -> int:
    """Returns the number of links with which each of `world` ranks starts.

    The number depends on TFDIST_MESH_RANKS.
    """
    try:
        mesh_ranks = int(native.value("TFDIST_MESH_RANKS"))
    except (ImportError, native.CoreError):
        mesh_ranks = world  # the maximum; the error is reported elsewhere
    return len(first_peers(0, world, mesh_ranks))


def check(
    size: int,
    *,
    shm_bytes: int,
    world: int | None = None,
    served: int | None = None,
    at_start: int | None = None,
) -> Findings:
    """Checks open files, stack, shared memory and cores for `size` ranks.

    Args:
        size: number of ranks on this host.
        shm_bytes: bytes of shared memory of a link between two ranks, including each
            rank's window for the other rank; 0 if the ranks use TCP.
        world: number of ranks on all hosts; default: `size`.
        served: number of ranks whose output and messages this process reads; default:
            `world`.
        at_start: number of ranks on this host before an elastic job grows; default:
            `size`.
    """
    found = Findings()
    world = size if world is None else world
    need = max(
        _FILES_OF_A_PROGRAM + _FILES_A_PEER * links_a_rank(world),
        64 + _FILES_A_RANK * (world if served is None else served),
    )
    files = raised_limit(resource.RLIMIT_NOFILE, need, 2 * need)
    if files < need:
        found.errors.append(
            f"{world} ranks need up to {need} open files per process, but the limit is "
            f"{files}; raise it (ulimit -Hn {need}, as the administrator), or start "
            "fewer ranks"
        )
    stack = raised_limit(resource.RLIMIT_STACK, _STACK_BYTES, _GOOD_STACK_BYTES)
    if stack < _STACK_BYTES:
        found.errors.append(
            f"the stack is limited to {stack >> 10} KiB, but TensorFlow needs at least "
            f"{_STACK_BYTES >> 10} KiB; raise it (ulimit -s {_GOOD_STACK_BYTES >> 10})"
        )
    shared = shm_bytes * size * links_a_rank(size) // 2
    free = available_memory()
    if shared > free:
        found.errors.append(
            f"{size} ranks need {shared >> 20} MiB of shared memory, but only "
            f"{free >> 20} MiB of memory are free; start fewer ranks, lower "
            "TFDIST_SHM_SLOTS or TFDIST_SEGMENT_BYTES, or set TFDIST_TRANSPORT=tcp"
        )
    cores = len(os.sched_getaffinity(0))
    running = size if at_start is None else at_start
    if running > cores:
        found.warnings.append(
            f"{running} ranks share {cores} core{'s' if cores > 1 else ''}; they will "
            "be slower than fewer ranks"
        )
    return found
