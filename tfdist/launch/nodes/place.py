"""Place of this host among the hosts of `--nnodes`; options that all hosts share.

Pure functions on options and environment variables; `shared_secret` reads a file.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.core.rendezvous import auth, cluster_variables
from tfdist.core.rendezvous.address import join_address, split_address
from tfdist.core.rendezvous.child_processes import without_rank
from tfdist.core.rendezvous.environment import detect
from tfdist.core.rendezvous.errors import invalid
from tfdist.core.rendezvous.placement import Placement, integer
from tfdist.core.rendezvous.secret import read_secret_file
from tfdist.core.version import __version__

PURPOSE = "tfdistrun --nnodes"
# Options that must be equal on all hosts, with their names in messages. They describe
# the job, and not how one host shows or starts it.
_COMPARED = {
    "version": "version of tfdist",
    "nodes": "--nnodes",
    "size": "-np",
    "min_size": "--min-np",
    "max_restarts": "--max-restarts",
    "spares": "--spares",
    "bind_to": "--bind-to",
    "horovod": "--horovod",
    "grace_s": "--grace-s",
    "signal_grace_s": "--signal-grace-s",
}
_KEPT = ("TFDIST_SECRET_FILE", "TFDIST_LOG_DIR")


class NodesError(Exception):
    """The job of --nnodes cannot start; `code` is tfdistrun's exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class NodePlace:
    """Number of this host among the hosts of `--nnodes`, and where they meet.

    Attributes:
        rank: number of this host; the first host has 0.
        count: number of hosts.
        address: host name and port at which the first host listens.
    """

    rank: int
    count: int
    address: tuple[str, int]

    @property
    def where(self) -> str:
        """The address as a string."""
        return join_address(*self.address)


def node_place(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> NodePlace | None:
    """Returns the place of this host; None if tfdistrun runs on a single host.

    Args:
        options: options of the command line.
        environ: environment variables. A launcher or platform that starts one process
            on each host sets variables that take the place of a missing --node-rank or
            --rdzv.

    Raises:
        RendezvousError: an option is missing, has no effect, or contradicts the
            variables.

    Example:
        >>> from tfdist.launch.nodes.place import node_place
        >>> from tfdist.launch.options import parser
        >>> words = ["-np", "4", "--nnodes", "2", "--node-rank", "1"]
        >>> options = parser().parse_args([*words, "--rdzv", "host0:29400", "true"])
        >>> node_place(options, {}).where
        'host0:29400'
    """
    if options.nodes is None:
        given = {"--node-rank": options.node_rank, "--rdzv": options.rdzv}
        for name in (name for name, value in given.items() if value is not None):
            raise invalid(f"{name} has an effect only with --nnodes N; add it")
        return None
    _check_options(options)
    outer = detect(environ)
    rank = _rank(options, outer, environ)
    if options.nodes == 1:
        return None
    address = (
        options.rdzv or outer.rendezvous or environ.get("TFDIST_RENDEZVOUS") or None
    )
    if address is None:
        raise invalid(
            "--rdzv HOST:PORT is missing: an address of the first host that all other "
            "hosts can reach, and a port that is free there"
        )
    return NodePlace(rank, options.nodes, _checked_address(address))


def _checked_address(text: str) -> tuple[str, int]:
    host, port = split_address(text, "--rdzv")
    try:
        host.encode("idna")
        if "%" not in host and ipaddress.ip_address(host).is_unspecified:
            raise invalid(
                f"--rdzv {text} means all network interfaces; give the address of the "
                "first host that the others can reach"
            )
    except UnicodeError:
        raise invalid(f"--rdzv {text!r} is not the name of a host and a port") from None
    except ValueError:
        pass  # a name, and not an address
    return host, port


def _check_options(options: argparse.Namespace) -> None:
    excluded = {
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--ssh-command": options.ssh_command,
        "--host-discovery-script": options.discovery_script,
    }
    for name in (name for name, value in excluded.items() if value is not None):
        raise invalid(
            f"{name} and --nnodes exclude each other: with --nnodes, you start "
            "tfdistrun on every host; omit one of them"
        )
    if options.size % options.nodes:
        raise invalid(
            f"-np {options.size} is the number of ranks on all hosts together, and has "
            f"to be a multiple of --nnodes {options.nodes}"
        )


def _rank(
    options: argparse.Namespace, outer: Placement, environ: Mapping[str, str]
) -> int:
    """Returns the number of this host: from the option, or from a launcher."""
    nodes, rank = int(options.nodes), options.node_rank
    if outer.size > 1:
        if outer.size != nodes:
            raise invalid(
                f"--nnodes {nodes}, but the variables of a launcher describe "
                f"{outer.size} processes ({outer.variables}); start one tfdistrun on "
                "each host, or unset these variables"
            )
        if rank is not None and rank != outer.rank:
            raise invalid(
                f"--node-rank {rank} contradicts {outer.variables}; omit --node-rank, "
                "or unset these variables"
            )
        rank = outer.rank
    if rank is None:
        rank = integer(environ, "JOB_COMPLETION_INDEX")
    if rank is None and nodes == 1:
        return 0
    if rank is None:
        raise invalid(
            "--node-rank is missing: pass 0 on the first host, 1 on the second, and so "
            f"on, up to {nodes - 1}"
        )
    if rank >= nodes:
        origin = "JOB_COMPLETION_INDEX" if options.node_rank is None else "--node-rank"
        raise invalid(
            f"{origin} is {rank}, but with --nnodes {nodes} it must be from 0 to "
            f"{nodes - 1}"
        )
    return int(rank)


def variables_to_remove(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of variables with which a launcher has numbered the hosts.

    The ranks would mistake the numbers of hosts for their own. Variables that describe
    all hosts (`cluster_variables`) are not returned: they do not disturb the ranks, and
    programs may read them.
    """
    if detect(environ).source in cluster_variables.SOURCES:
        return []
    return sorted(environ.keys() - without_rank(environ).keys() - {*_KEPT})


def shared_secret(environ: Mapping[str, str]) -> bytes:
    """Returns the secret that all hosts share.

    Raises:
        RendezvousError: TFDIST_SECRET_FILE is not set, or the file cannot be used.
    """
    path = environ.get("TFDIST_SECRET_FILE")
    if not path:
        raise invalid(
            "--nnodes needs a secret that all hosts share: write 32 random bytes to a "
            "file, `(umask 077; head -c 32 /dev/urandom > FILE)`, copy it to every "
            "host, and set TFDIST_SECRET_FILE=FILE there"
        )
    return read_secret_file(path)


def job_secret(shared: bytes, job: str) -> bytes:
    """Returns the secret of one job; every host derives it, so it is never sent.

    Args:
        shared: the secret that all hosts share.
        job: name of the job.
    """
    key = auth.extract(shared, job.encode())
    return auth.expand(key, b"tfdist secret of a job", auth.SECRET_BYTES)


# ---- what all hosts must agree on ----


def claims(options: argparse.Namespace, place: NodePlace, host: str) -> dict[str, Any]:
    """Returns the description that a host sends when it connects to the first host."""
    described = {**vars(options), "version": __version__}
    job = {name: described[name] for name in _COMPARED}
    return {"purpose": PURPOSE, "node": place.rank, "host": host, **job}


def differences(own: Mapping[str, Any], other: Mapping[str, Any], where: str) -> str:
    """Describes the options of another host that differ from those of the first host.

    Args:
        own: claims of the first host.
        other: claims of the other host.
        where: location of the other host, for the text, such as "on node 1".

    Returns:
        The description; "" if no option differs.

    Example:
        >>> from tfdist.launch.nodes.place import differences
        >>> differences({"size": 4}, {"size": 8}, "on node 1")
        '-np 8 on node 1, 4 on the first host'
    """
    return "; ".join(
        f"{_COMPARED[name]} {_shown(other.get(name))} {where}, "
        f"{_shown(value)} on the first host"
        for name, value in own.items()
        if name in _COMPARED and other.get(name) != value
    )


def _shown(value: Any) -> str:
    return "not given" if value is None else f"{value!s:.100}"
