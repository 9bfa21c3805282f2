"""Reads variables in which a platform describes the hosts or tasks of a cluster.

These platforms start the program once on each host, or for each task:

| source | variables | set by |
|---|---|---|
| tf_config | TF_CONFIG | TensorFlow's format: Kubeflow's TFJob, Ray, Vertex AI |
| cluster_spec | CLUSTER_SPEC | Vertex AI |
| pet | PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT | Kubeflow Trainer |
| sagemaker | SM_HOSTS, SM_CURRENT_HOST | Amazon SageMaker |

Each of these processes is one rank. In TF_CONFIG, the ranks are the chief (or master),
followed by the workers. Parameter servers and evaluators are not ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.errors import invalid
from tfdist.core.rendezvous.placement import MAX_SIZE, Placement, integer

SOURCES = ("tf_config", "cluster_spec", "pet", "sagemaker")
TF_CONFIG_RANKS = ("chief", "master", "worker")
VERTEX_RANKS = ("workerpool0", "workerpool1")
# SageMaker opens all ports between the hosts of a job, and chooses none.
SAGEMAKER_PORT = 29600
_ANY_COUNT = ("", "1", "auto", "cpu", "gpu")


def read(environ: Mapping[str, str]) -> list[Placement]:
    """Returns the placement of this process according to each complete description.

    Raises:
        RendezvousError: a description is malformed, or this process is not one of its
            ranks.

    Example:
        >>> from tfdist.core.rendezvous import cluster_variables
        >>> hosts = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
        >>> [place] = cluster_variables.read(hosts)
        >>> place.rank, place.size, place.rendezvous
        (1, 2, 'algo-1:29600')
    """
    found = [
        _tasks(environ, "TF_CONFIG", TF_CONFIG_RANKS),
        _tasks(environ, "CLUSTER_SPEC", VERTEX_RANKS),
        _pet(environ),
        _sagemaker(environ),
    ]
    return [placement for placement in found if placement is not None]


def check_one_rank_per_host(placement: Placement, environ: Mapping[str, str]) -> None:
    """Raises unless the platform starts one rank on each of a fixed number of hosts.

    Raises:
        RendezvousError: PET_NPROC_PER_NODE is a number above 1, or PET_NNODES is a
            range.
    """
    if placement.source != "pet":
        return
    count, nodes = environ.get("PET_NPROC_PER_NODE", ""), environ["PET_NNODES"]
    if count not in _ANY_COUNT:
        raise invalid(
            f"PET_NPROC_PER_NODE={count!r} asks for several ranks on each host, but "
            "this program was started once; set numProcPerNode to 1 in the TrainJob, "
            "or start the ranks with mpirun or torchrun"
        )
    if ":" in nodes:
        raise invalid(
            f"PET_NNODES={nodes!r} is a range, but the number of ranks is fixed here; "
            "set it to one number. Jobs that change their size are started by "
            "tfdistrun --min-np"
        )


def _tasks(
    environ: Mapping[str, str], name: str, roles: tuple[str, ...]
) -> Placement | None:
    """Reads {"cluster": {role: [address, ...]}, "task": {"type": role, "index": i}}."""
    text = environ.get(name)
    if not text:
        return None
    try:
        described: Any = json.loads(text)
        cluster, task = described.get("cluster") or {}, described.get("task") or {}
        ranks = [
            (role, index, address)
            for role in roles
            for index, address in enumerate(_addresses(cluster.get(role) or []))
        ]
        own = (str(task.get("type", "")), int(task.get("index", 0)))
    except (ValueError, TypeError, AttributeError, OverflowError, KeyError):
        raise invalid(
            f"{name}={text!r} is not a description such as "
            f'{{"cluster": {{"{roles[-1]}": ["host0:2222", "host1:2222"]}}, '
            f'"task": {{"type": "{roles[-1]}", "index": 0}}}}; correct it, or unset it'
        ) from None
    if not ranks:
        return None
    places = [(role, index) for role, index, _ in ranks]
    if own not in places:
        raise invalid(
            f"{name} says that this process is task {own[1]} of type {own[0]!r}. "
            "tfdist has no parameter servers or evaluators: its ranks are the tasks of "
            "type "
            f"{', '.join(role for role in roles if cluster.get(role))} in the cluster "
            f"({len(ranks)} tasks)"
        )
    rank, first = places.index(own), ranks[0][2]
    split_address(first, f"the first address of {name}")
    return Placement(
        rank=rank,
        size=len(ranks),
        source=name.lower(),
        rendezvous=first,
        job=f"{name.lower()} {first}",
        variables=f"task {own[1]} of type {own[0]!r} of {len(ranks)} in {name}",
    )


def _addresses(tasks: Any) -> list[str]:
    """Returns the addresses of a list, or of TensorFlow's form {"0": address, ...}."""
    if isinstance(tasks, dict):
        tasks = [tasks[str(index)] for index in range(len(tasks))]
    if not isinstance(tasks, list) or not all(isinstance(one, str) for one in tasks):
        raise TypeError("expected a list of addresses")
    return tasks


def _pet(environ: Mapping[str, str]) -> Placement | None:
    """Reads torchrun's PET_* variables for this node, which runs one rank."""
    address = environ.get("PET_MASTER_ADDR")
    count, rank = environ.get("PET_NNODES", ""), integer(environ, "PET_NODE_RANK")
    if not (address and count) or rank is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,6}(:\d{1,7})?", count):
        raise invalid(f"PET_NNODES={count!r} is not a number of nodes such as 2")
    fewest, _, most = count.partition(":")
    port = integer(environ, "PET_MASTER_PORT", minimum=1, maximum=65535)
    return _place_of_host(
        "pet",
        rank,
        max(rank + 1, int(fewest)) if most else int(fewest),
        f"{address}:{port or 29500}",
        f"PET_NODE_RANK={rank} and PET_NNODES={count}",
    )


def _sagemaker(environ: Mapping[str, str]) -> Placement | None:
    text, own = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if not (text and own):
        return None
    try:
        hosts = sorted(str(host) for host in json.loads(text))
        rank = hosts.index(own)
    except (ValueError, TypeError):
        raise invalid(
            f"SM_HOSTS={text!r} is not a JSON list with SM_CURRENT_HOST={own!r} in it"
        ) from None
    return _place_of_host(
        "sagemaker",
        rank,
        len(hosts),
        f"{hosts[0]}:{SAGEMAKER_PORT}",
        f"SM_CURRENT_HOST={own} of {len(hosts)} hosts in SM_HOSTS",
    )


def _place_of_host(
    source: str, rank: int, size: int, address: str, variables: str
) -> Placement:
    if rank >= size or size > MAX_SIZE:
        raise invalid(
            f"{variables}: the rank must be below the size, and the size at most "
            f"{MAX_SIZE}"
        )
    return Placement(
        rank=rank,
        size=size,
        source=source,
        rendezvous=address,
        job=f"{source} {address}",
        variables=variables,
    )
