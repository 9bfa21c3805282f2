"""Distinguishes ranks from their child processes, which inherit a rank's variables.

A rank records its process in the environment when it connects. If a process finds the
record of a different process there, with the same rank of the same job, it is a
descendant of that process: a worker of a multiprocessing pool, or a program that the
rank has started. Processes between the launcher and the rank (shells, `env`, `numactl`)
run before the record is made, so they do not matter.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping

from tfdist.core import native
from tfdist.core.rendezvous import failure_report
from tfdist.core.rendezvous.environment import Placement, detect
from tfdist.core.rendezvous.errors import RendezvousError

RANK_PROCESS = "_TFDIST_RANK_PROCESS"  # not TFDIST_..., which is for settings
# Variables that launchers set for each process; detect() reads some of them.
_OF_A_RANK = (
    *("TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_", "TFDIST_CROSS_"),
    *("TFDIST_RENDEZVOUS", "TFDIST_SECRET_FILE", "TFDIST_JOB_ID", "TFDIST_MEMBER"),
    "TFDIST_MAX_SIZE",
    "TFDIST_LOG_DIR",  # used by the job of that rank
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("OMPI_", "PMIX_", "PMI_", "PALS_", "MPI_LOCAL"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_"),
    *("FLUX_TASK_", "FLUX_JOB_SIZE", "JSM_NAMESPACE_", "JOB_COMPLETION_INDEX"),
    *("TF_CONFIG", "CLUSTER_SPEC", "PET_", "SM_HOSTS", "SM_CURRENT_HOST"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_"),
    *("HOROVOD_GLOO_", RANK_PROCESS),
)


def note_rank(environ: MutableMapping[str, str], placement: Placement) -> None:
    """Records this process as the rank, so that its child processes can see it."""
    environ[RANK_PROCESS] = f"{os.getpid()} {_place(placement)}"


def rank_above(environ: Mapping[str, str]) -> tuple[int, Placement] | None:
    """Returns the rank whose variables this process has inherited.

    Args:
        environ: environment of this process.

    Returns:
        Process id and placement of this rank. None if this process is not a child of a
        rank, or was given a different placement.

    Example:
        >>> from tfdist.core.rendezvous.child_processes import RANK_PROCESS, rank_above
        >>> own = {"PMI_RANK": "1", "PMI_SIZE": "4"}
        >>> rank_above(own) is None
        True
        >>> rank_above({**own, RANK_PROCESS: "1 1/4 "})[0]
        1
    """
    pid, _, place = environ.get(RANK_PROCESS, "").partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid():
        return None
    placement = detect(environ)
    return (int(pid), placement) if place == _place(placement) else None


def refuse_child(environ: Mapping[str, str]) -> None:
    """Raises if this process is a child of a rank and not a rank itself.

    A worker of a multiprocessing pool that is importing the main script exits with
    code 1 instead. Because the pool would restart it endlessly, the rank is also
    terminated (SIGTERM).

    Raises:
        RendezvousError: this process is a child of a rank, and not such a worker.
    """
    message = refusal(environ)
    above = rank_above(environ)
    if message is None or above is None:
        return
    pid, placement = above
    if _is_imported_by_pool():
        if _is_ancestor(pid):  # otherwise another worker has already terminated it
            _end_rank(environ, pid, placement.rank, message)
        os._exit(1)
    raise RendezvousError(
        native.FAILED_PRECONDITION,
        message,
        {"kind": "not_initialized", "cause": message},
    )


def _end_rank(environ: Mapping[str, str], pid: int, rank: int, message: str) -> None:
    message += ". The rank exits, because the pool would restart its workers endlessly"
    print(f"[tfdist] {message}", file=sys.stderr, flush=True)
    failure_report.send(environ, {"error": message, "blamed": rank})
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def refusal(environ: Mapping[str, str]) -> str | None:
    """Returns why this process cannot be a rank, or None if it is no rank's child."""
    above = rank_above(environ)
    if above is None:
        return None
    pid, placement = above
    if _is_of_multiprocessing():
        advice = (
            "The start methods 'spawn' and 'forkserver' of multiprocessing run the "
            "main script again in each child: put tfdist.init(), and everything else "
            'that only ranks do, under `if __name__ == "__main__":`'
        )
    else:
        advice = (
            "To start a separate tfdist program from a rank, run "
            "`tfdistrun -np 1 python FILE`"
        )
    return (
        f"process {os.getpid()} is a child of rank {placement.rank} (process {pid}), "
        f"not a rank itself, and cannot use tfdist. {advice}"
    )


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables of a rank, for a separate job."""
    return {k: v for k, v in environ.items() if not _is_of_a_rank(k)}


def _is_of_a_rank(name: str) -> bool:
    """Returns whether a name is in `_OF_A_RANK` or starts with an entry "..._"."""
    return any(
        name.startswith(one) if one.endswith(("_", "LOCAL")) else name == one
        for one in _OF_A_RANK
    )


def _place(placement: Placement) -> str:
    return f"{placement.rank}/{placement.size} {placement.job or ''}"


def _is_importing() -> bool:
    """Returns whether multiprocessing is importing the main script in this process."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _is_of_multiprocessing() -> bool:
    return _is_importing() or multiprocessing.parent_process() is not None


def _is_imported_by_pool() -> bool:
    return _is_importing() and "PoolWorker" in multiprocessing.current_process().name


def _is_ancestor(pid: int) -> bool:
    import psutil

    return any(process.pid == pid for process in psutil.Process().parents())
