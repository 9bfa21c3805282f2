"""Determines rank and size of this process from the variables of its launcher.

The rules are tried in a fixed order; the first rule with complete variables is used:

| rule | rank, size | also read |
|---|---|---|
| tfdist | TFDIST_RANK, TFDIST_SIZE | TFDIST_LOCAL_*, TFDIST_CROSS_* |
| torchrun | RANK, WORLD_SIZE (and MASTER_ADDR) | LOCAL_*, MASTER_PORT |
| openmpi | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| pals | PALS_RANKID, PMI_SIZE | PALS_LOCAL_RANKID, PMI_LOCAL_SIZE |
| mpich | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS, PMI_LOCAL_* |
| slurm | SLURM_PROCID, SLURM_STEP_NUM_TASKS | SLURM_LOCALID, _STEP_TASKS_PER_NODE |
| horovodrun | HOROVOD_RANK, HOROVOD_SIZE | HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE |
| single | none of them: rank 0 of 1 | |

If TFDIST_RENDEZVOUS is set, it is the rendezvous address of every multi-rank job.

Slurm variables are used only inside an srun step: SLURM_NTASKS is also set for the
single process of a batch script, which would wait for ranks that are never started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tfdist.core.rendezvous.errors import RendezvousError, invalid

MAX_SIZE = 1 << 20
_MAX_JOB_BYTES = 512  # half of the claims of a handshake (auth.MAX_CLAIMS_BYTES)
LAUNCHER_JOB = "tfdistrun:"  # TFDIST_JOB_ID if tfdistrun runs the store


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of a process in its job, according to its launcher.

    Attributes:
        rank: index of this process.
        size: number of processes.
        local_rank: index among the processes of this host; None if unknown.
        local_size: number of processes of this host; None if unknown.
        cross_rank: index among the processes with equal local_rank; None if unknown.
        cross_size: number of processes with equal local_rank; None if unknown.
        source: name of the rule that matched.
        rendezvous: "host:port" of the store; None if unknown.
        job: name that distinguishes the job from other jobs of this user on this host.
            None if the processes have only their parent process in common.
        launcher_runs_store: whether the launcher runs the store. If not, rank 0 runs
            it.
        variables: the two variables from which rank and size were read, with values.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    source: str = "single"
    rendezvous: str | None = None
    job: str | None = None
    launcher_runs_store: bool = False
    variables: str = ""


def check_working_folder() -> None:
    """Raises if this process's working folder does not exist any more.

    Raises:
        RendezvousError: the folder was deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        folder = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        raise invalid(
            f"the working folder {folder} was deleted while this process was in it; "
            "go to one that exists (cd) and start again"
        ) from None


def _integer(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int = MAX_SIZE
) -> int | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise invalid(
            f"{name}={text!r} is not a whole number from {minimum} to {maximum}; "
            f"correct it, or unset it to start without that launcher"
        )
    return int(text)


def _first(environ: Mapping[str, str], *names: str, minimum: int = 0) -> int | None:
    for name in names:
        found = _integer(environ, name, minimum=minimum)
        if found is not None:
            return found
    return None


def _build(
    environ: Mapping[str, str],
    source: str,
    rank_name: str,
    size_name: str,
    *,
    local_rank: tuple[str, ...] = (),
    local_size: tuple[str, ...] = (),
    rendezvous: str | None = None,
    job: str | None = None,
) -> Placement | None:
    """Returns a placement if both variables are set; raises if they contradict."""
    rank = _integer(environ, rank_name)
    size = _integer(environ, size_name, minimum=1)
    if rank is None or size is None:
        return None
    variables = f"{rank_name}={rank} and {size_name}={size}"
    if rank >= size:
        raise invalid(f"{variables}: the rank must be below the size")
    placement = Placement(
        rank=rank,
        size=size,
        local_rank=_first(environ, *local_rank),
        local_size=_first(environ, *local_size, minimum=1),
        source=source,
        rendezvous=rendezvous,
        job=job,
        variables=variables,
    )
    return _checked_local(placement, local_rank, local_size)


def _checked_local(
    placement: Placement, rank_names: tuple[str, ...], size_names: tuple[str, ...]
) -> Placement:
    local_rank, local_size = placement.local_rank, placement.local_size
    if local_size is not None and local_size > placement.size:
        raise invalid(
            f"{'/'.join(size_names)}={local_size} with {placement.variables}: "
            "a host cannot hold more ranks than the job"
        )
    if local_rank is not None and local_rank >= (local_size or placement.size):
        raise invalid(
            f"{'/'.join(rank_names)}={local_rank} with "
            f"{'/'.join(size_names) or 'size'}={local_size or placement.size}: "
            "the local rank must be below the local size"
        )
    return placement


def _job(environ: Mapping[str, str]) -> str | None:
    job = environ.get("TFDIST_JOB_ID")
    if not job:
        return None
    length = len(json.dumps(job)) - len('""')
    if length > _MAX_JOB_BYTES:
        raise invalid(
            f"TFDIST_JOB_ID has {length} bytes (as JSON, in ASCII), at most "
            f"{_MAX_JOB_BYTES} are allowed; give the job a shorter name"
        )
    return job


def _tfdist(environ: Mapping[str, str]) -> Placement | None:
    found = _build(
        environ,
        "tfdist",
        "TFDIST_RANK",
        "TFDIST_SIZE",
        local_rank=("TFDIST_LOCAL_RANK",),
        local_size=("TFDIST_LOCAL_SIZE",),
        job=_job(environ),
    )
    names = [name for name in ("TFDIST_RANK", "TFDIST_SIZE") if environ.get(name)]
    if found is None:
        if len(names) == 1:
            raise invalid(
                f"{names[0]}={environ[names[0]]} is set, but its partner is not; set "
                "both TFDIST_RANK and TFDIST_SIZE, or neither"
            )
        return None
    cross_rank = _integer(environ, "TFDIST_CROSS_RANK")
    cross_size = _integer(environ, "TFDIST_CROSS_SIZE", minimum=1)
    of_tfdistrun = (found.job or "").startswith(LAUNCHER_JOB)
    return replace(
        found,
        cross_rank=cross_rank,
        cross_size=cross_size,
        launcher_runs_store=of_tfdistrun,
    )


def _torchrun(environ: Mapping[str, str]) -> Placement | None:
    address = environ.get("MASTER_ADDR")
    if not address:
        return None
    port = _integer(environ, "MASTER_PORT", minimum=1, maximum=65535)
    run = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun itself listens on MASTER_PORT, so rank 0 cannot use this port.
    reachable = port is not None and run is None
    return _build(
        environ,
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        rendezvous=f"{address}:{port}" if reachable else None,
        job=f"torchrun {address}:{port or 0} {run or ''}",
    )


def _openmpi(environ: Mapping[str, str]) -> Placement | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _build(
        environ,
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=f"openmpi {job}" if job else None,
    )


def _pals(environ: Mapping[str, str]) -> Placement | None:
    job = environ.get("PALS_APID")
    return _build(
        environ,
        "pals",
        "PALS_RANKID",
        "PMI_SIZE",
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PMI_LOCAL_SIZE",),
        job=f"pals {job}" if job else None,
    )


def _mpich(environ: Mapping[str, str]) -> Placement | None:
    # MPICH does not give its ranks a common job name. Inside a Slurm step (srun
    # --mpi=pmi2), the name of the step is used.
    step = _slurm_step(environ)
    return _build(
        environ,
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=environ.get("PMI_JOBID") or step,
    )


def _slurm_step(environ: Mapping[str, str]) -> str | None:
    if not environ.get("SLURM_STEP_NUM_TASKS"):
        return None
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"slurm {job}.{step}" if job and step else None


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    found = _build(
        environ,
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        local_rank=("SLURM_LOCALID",),
        job=_slurm_step(environ),
    )
    if found is None:
        return None
    return replace(found, local_size=_slurm_local_size(environ))


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Returns the tasks of this node from e.g. SLURM_STEP_TASKS_PER_NODE="2(x3),1"."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    node = _integer(environ, "SLURM_NODEID")
    if not text or node is None:
        return None
    if not re.fullmatch(r"\d{1,7}(\(x\d{1,7}\))?(,\d{1,7}(\(x\d{1,7}\))?)*", text):
        raise invalid(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as 2(x3),1"
        )
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        if node < int(times or 1):
            return int(count)
        node -= int(times or 1)
    raise invalid(
        f"SLURM_NODEID={environ['SLURM_NODEID']} is not in "
        f"SLURM_STEP_TASKS_PER_NODE={text!r}"
    )


def _horovodrun(environ: Mapping[str, str]) -> Placement | None:
    """Returns the placement by horovodrun; the address of its store names the job."""
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not address:
        return None
    return _build(
        environ,
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        job=f"horovodrun {address}:{environ.get('HOROVOD_GLOO_RENDEZVOUS_PORT')}",
    )


_RULES: tuple[Callable[[Mapping[str, str]], Placement | None], ...] = (
    _tfdist,
    _torchrun,
    _openmpi,
    _pals,
    _mpich,
    _slurm,
    _horovodrun,
)


def detect(environ: Mapping[str, str]) -> Placement:
    """Determines rank and size of this process from its environment.

    Args:
        environ: environment variables, e.g. os.environ.

    Returns:
        The placement of the first rule that matches; rank 0 of 1 if no rule matches.

    Raises:
        RendezvousError: a variable is malformed, or the variables of two launchers
            differ. The message names the variables.

    Example:
        >>> from tfdist.core.rendezvous.environment import detect
        >>> detect({"PMI_RANK": "1", "PMI_SIZE": "4"}).rank
        1
    """
    found = [placement for rule in _RULES if (placement := rule(environ))]
    if not found:
        return Placement(rank=0, size=1, local_rank=0, local_size=1)
    winner = found[0]
    for other in found[1:]:
        if (other.rank, other.size) != (winner.rank, winner.size) and not _harmless(
            winner, other
        ):
            raise _contradiction(winner, other)
    # Only tfdistrun and torchrun provide an address. For other launchers, the user can.
    address = environ.get("TFDIST_RENDEZVOUS")
    return replace(winner, rendezvous=address) if address else winner


def _harmless(winner: Placement, other: Placement) -> bool:
    # A launcher started by another launcher as its only process (srun --pty, mpirun -np
    # 1).
    if other.size == 1:
        return True
    # mpirun starts its daemons with srun, one on each node; their ranks inherit the
    # step.
    return other.source == "slurm" and winner.source in ("openmpi", "pals", "mpich")


def _contradiction(winner: Placement, other: Placement) -> RendezvousError:
    return invalid(
        f"two launchers contradict each other: {winner.variables} ({winner.source}), "
        f"but {other.variables} ({other.source}); start the ranks with one of them, "
        "or unset the variables of the other"
    )
