"""Describes a job to the agents of other hosts: variables, folder, command, ranks."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.core import allocator
from tfdist.launch.hosts import Place

if TYPE_CHECKING:
    from tfdist.launch.job import Job

# Variables that are specific to one host or rank, or that each host sets again.
_STAYS_HERE = (
    "TFDIST_SECRET_FILE",
    "TFDIST_RENDEZVOUS",
    "TFDIST_LOG_DIR",
    "TFDIST_RANK",
    "TFDIST_SIZE",
)
# Prefixes of variables that affect results or speed, and that users expect to be set
# on every rank. Terraform, which is unrelated, also uses the prefix TF_.
_TERRAFORM = ("TF_CLI_", "TF_VAR_")
_MISSED = ("TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "NCCL_", "CUDA_", "LD_LIBRARY_PATH")


def _of_this_host(name: str, environ: Mapping[str, str]) -> bool:
    """Returns whether the variable is TFDIST_ADDRESS, and valid only on this host.

    It is valid only here if it is an IP address. A network or interface is valid on all
    hosts.
    """
    if name != "TFDIST_ADDRESS":
        return False
    try:
        ipaddress.ip_address(environ[name])
    except ValueError:
        return False
    return True


def crossing(environ: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ranks on other hosts receive.

    Args:
        environ: environment variables of this process.
        exported: variables that the user gave with -x.

    Example:
        >>> from tfdist.launch import agent_job
        >>> agent_job.crossing({"TFDIST_TIMEOUT_S": "9", "HOME": "/root"}, {"A": "b"})
        {'PYTHONUNBUFFERED': '1', 'TFDIST_TIMEOUT_S': '9', 'A': 'b'}
    """
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith("TFDIST_") or name == "PYTHONPATH")
        and name not in _STAYS_HERE
        and not _of_this_host(name, environ)
    }
    return {"PYTHONUNBUFFERED": "1", **found, **exported}


def missed(environ: Mapping[str, str], crossed: Mapping[str, str]) -> list[str]:
    """Returns variables that are set only on this host, but expected on all hosts."""
    everywhere = allocator.settings({})
    return sorted(
        name
        for name in environ.keys() - crossed.keys()
        if name.startswith(_MISSED)
        and not name.startswith(_TERRAFORM)
        and environ[name] != everywhere.get(name)
    )


def working_directory() -> str:
    """Returns the working directory; keeps symbolic links, if PWD contains them.

    The path of a folder on a shared file system may be valid on all hosts only with
    these links.
    """
    logical = os.environ.get("PWD", "")
    try:
        if logical.startswith("/") and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    return os.getcwd()


def describe(
    job: Job, address: str, *, number: int, slots: int, places: Sequence[Place]
) -> dict[str, Any]:
    """Returns everything that the agent of a host needs to know.

    Args:
        job: the job.
        address: address of the store.
        number: number of the host.
        slots: number of slots among which the host divides its CPUs.
        places: places of the ranks that the agent starts when the job starts.
    """
    own, exported = dict(os.environ), dict(job.options.env)
    started = {
        "cwd": working_directory(),
        "command": job.options.command,
        "path": own.get("PATH", ""),
        "secret": job.secret.hex(),
    }
    if job.place is not None:  # `nodes.join` adds its own values on each host
        started = {}
        for name in ("PYTHONPATH", "TFDIST_ADDRESS"):
            own.pop(name, None)
    return {
        **started,
        "job_tag": f"{job.name}@{number}",
        "environ": {**crossing(own, exported), "TFDIST_JOB_ID": job.name},
        "store": address,
        "size": job.plan.max_size,
        "slots": slots,
        "shm_bytes": job.shm_bytes,
        "bind_to": job.options.bind_to,
        "signal_grace_s": job.options.signal_grace_s,
        "is_elastic": job.options.min_size is not None,
        "ranks": [
            {
                "rank": place.rank,
                "slot": place.local_rank,
                "variables": job.variables_of(place),
                "terminal_columns": job.streams.terminal_columns(
                    job.output_of(place.rank, None)
                ),
            }
            for place in places
        ],
    }
