"""Determines rank and size of this process from the variables of its launcher.

The rules are tried in a fixed order; the first rule with complete variables is used:

| rule | rank, size | also read |
|---|---|---|
| tfdist | TFDIST_RANK, TFDIST_SIZE | TFDIST_LOCAL_*, TFDIST_CROSS_* |
| torchrun | RANK, WORLD_SIZE (and MASTER_ADDR) | LOCAL_*, MASTER_PORT |
| openmpi | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| pals | PALS_RANKID, PMI_SIZE | PALS_LOCAL_RANKID, PMI_LOCAL_SIZE |
| mpich | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS, PMI_LOCAL_* |
| jsrun | JSM_NAMESPACE_RANK, _SIZE | JSM_NAMESPACE_LOCAL_RANK, _LOCAL_SIZE |
| flux | FLUX_TASK_RANK, FLUX_JOB_SIZE | FLUX_TASK_LOCAL_ID |
| slurm | SLURM_PROCID, SLURM_STEP_NUM_TASKS | SLURM_LOCALID, _STEP_TASKS_PER_NODE |
| horovodrun | HOROVOD_RANK, HOROVOD_SIZE | HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE |
| single | none of them: rank 0 of 1 | |

`horovodrun` also requires HOROVOD_GLOO_RENDEZVOUS_ADDR. In an Indexed Job of
Kubernetes, JOB_COMPLETION_INDEX is used if TFDIST_RANK is not set.

If no rule before `single` matches, the description of a cluster is used, if there is
one (`cluster_variables`). Platforms set such descriptions; launchers of ranks do not.

If TFDIST_RENDEZVOUS is set, it is the rendezvous address of every multi-rank job.

Slurm variables are used only inside an srun step: SLURM_NTASKS is also set for the
single process of a batch script, which would wait for ranks that are never started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from tfdist.core.rendezvous import cluster_variables
from tfdist.core.rendezvous.errors import RendezvousError, invalid
from tfdist.core.rendezvous.placement import Placement, build, integer

_MAX_JOB_BYTES = 512  # half of the claims of a handshake (auth.MAX_CLAIMS_BYTES)
LAUNCHER_JOB = "tfdistrun:"  # start of TFDIST_JOB_ID if tfdistrun runs the store


def check_working_folder() -> None:
    """Raises if this process's working folder no longer exists.

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
    # Kubernetes numbers the pods of an Indexed Job; its manifest sets TFDIST_SIZE.
    pod = environ.get("JOB_COMPLETION_INDEX") and not environ.get("TFDIST_RANK")
    found = build(
        environ,
        "tfdist",
        "JOB_COMPLETION_INDEX" if pod else "TFDIST_RANK",
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
    cross_rank = integer(environ, "TFDIST_CROSS_RANK")
    cross_size = integer(environ, "TFDIST_CROSS_SIZE", minimum=1)
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
    port = integer(environ, "MASTER_PORT", minimum=1, maximum=65535)
    run = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun itself listens on MASTER_PORT, so rank 0 cannot use this port.
    reachable = port is not None and run is None
    return build(
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
    return build(
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
    return build(
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
    return build(
        environ,
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=environ.get("PMI_JOBID") or step,
    )


def _jsrun(environ: Mapping[str, str]) -> Placement | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("LSB_JOBID")
    return build(
        environ,
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=f"jsrun {job}" if job else None,
    )


def _flux(environ: Mapping[str, str]) -> Placement | None:
    job = environ.get("FLUX_JOB_ID")
    return build(
        environ,
        "flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        local_rank=("FLUX_TASK_LOCAL_ID",),
        job=f"flux {job}" if job else None,
    )


def _slurm_step(environ: Mapping[str, str]) -> str | None:
    if not environ.get("SLURM_STEP_NUM_TASKS"):
        return None
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"slurm {job}.{step}" if job and step else None


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    found = build(
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
    """Returns the number of tasks on this node; "2(x3),1" means 2, 2, 2 and 1."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    node = integer(environ, "SLURM_NODEID")
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
    """Returns horovodrun's placement; its rendezvous address names the job."""
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not address:
        return None
    return build(
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
    _jsrun,
    _flux,
    _slurm,
    _horovodrun,
)


def detect(environ: Mapping[str, str]) -> Placement:
    """Determines rank and size of this process from its environment.

    Args:
        environ: environment variables, e.g. os.environ.

    Returns:
        The placement of the first rule that matches, else of the cluster's description,
        else rank 0 of 1.

    Raises:
        RendezvousError: a variable is malformed, or the variables of two launchers
            contradict each other. The message names the variables.

    Example:
        >>> from tfdist.core.rendezvous.environment import detect
        >>> detect({"PMI_RANK": "1", "PMI_SIZE": "4"}).rank
        1
    """
    found = [placement for rule in _RULES if (placement := rule(environ))]
    described = cluster_variables.read(environ)
    if not (found or described):
        return Placement(rank=0, size=1, local_rank=0, local_size=1)
    winner = (found or described)[0]
    for other in (found or described)[1:]:
        if (other.rank, other.size) != (winner.rank, winner.size) and not _harmless(
            winner, other
        ):
            raise _contradiction(winner, other)
    for other in described:
        # A launcher may start several ranks on each host, but not fewer ranks than
        # hosts. tfdistrun has checked this itself, and its job may have lost ranks.
        if other.size > winner.size and not winner.launcher_runs_store:
            raise _contradiction(winner, other)
    # Few launchers provide an address. For the others, the user can.
    address = environ.get("TFDIST_RENDEZVOUS")
    return replace(winner, rendezvous=address) if address else winner


def _harmless(winner: Placement, other: Placement) -> bool:
    # The other launcher started a single process, from which the ranks were launched
    # (srun --pty, mpirun -np 1).
    if other.size == 1:
        return True
    # mpirun starts its daemons with srun, one on each node. The ranks inherit the
    # variables of this step.
    return other.source == "slurm" and winner.source in ("openmpi", "pals", "mpich")


def _contradiction(winner: Placement, other: Placement) -> RendezvousError:
    # torchrun also sets LOCAL_RANK. Platforms that set RANK once for each host do not.
    per_host = next(
        (
            one.variables
            for one in (winner, other)
            if one.source == "torchrun" and one.local_rank is None
        ),
        None,
    )
    hint = (
        f" (LOCAL_RANK is not set, so {per_host} may number hosts instead of ranks, as "
        "on some platforms: in this case, unset RANK and WORLD_SIZE for the ranks)"
        if per_host
        else ""
    )
    return invalid(
        f"two launchers contradict each other: {winner.variables} ({winner.source}), "
        f"but {other.variables} ({other.source}); start the ranks with one of them, "
        f"or unset the variables of the other{hint}"
    )
