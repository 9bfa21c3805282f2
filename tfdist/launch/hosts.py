"""Reads lists of hosts and hostfiles, and assigns ranks to the hosts.

`read_file` reads a file. `own_names` and `mark_local` look up the addresses of this
machine. All other functions are pure.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_MAX_SLOTS = 4096
_NAME = re.compile(r"(?:[\w.+-]+@)?[\w][\w.-]*|(?:[\w.+-]+@)?[0-9A-Fa-f:.]+(?:%\w+)?")


class HostsError(ValueError):
    """A list of hosts cannot be used; the message states where and why."""


@dataclass(frozen=True)
class Host:
    """One host of the job.

    Attributes:
        name: the name that the user gave, with or without "user@"; passed to ssh.
        slots: maximum number of ranks on this host at the start.
        is_local: whether the host is this machine, where ranks are started without ssh.
    """

    name: str
    slots: int
    is_local: bool = False

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank, its host (an index into the hosts), and its local and cross rank.

    In later generations of an elastic job, a rank gets its place as a
    `tfdist.core.rendezvous.renewal.Place`.
    """

    rank: int
    host: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self, size: int) -> dict[str, str]:
        """Returns the variables that tell a rank its place among `size` ranks."""
        return {
            "TFDIST_RANK": str(self.rank),
            "TFDIST_SIZE": str(size),
            "TFDIST_LOCAL_RANK": str(self.local_rank),
            "TFDIST_LOCAL_SIZE": str(self.local_size),
            "TFDIST_CROSS_RANK": str(self.cross_rank),
            "TFDIST_CROSS_SIZE": str(self.cross_size),
        }


@dataclass(frozen=True)
class Slot:
    """A slot: capacity for one rank on a host.

    Attributes:
        host: index of the host.
        index: number of the slot on the host. It is the local rank of the process in
            this slot if all slots are used.
    """

    host: int
    index: int


def _checked_slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= _MAX_SLOTS:
        raise HostsError(
            f"{where}: expected a number of slots from 1 to {_MAX_SLOTS}, got {text!r}"
        )
    return int(text)


def _checked_name(text: str, where: str) -> str:
    # ssh must not read the name as an option, and a shell must not expand it.
    if not _NAME.fullmatch(text):
        raise HostsError(f"{where}: {text!r} is not the name or address of a host")
    return text


def _split_slots(text: str, where: str) -> tuple[str, int]:
    """Splits "host", "host:2" or "[::1]:2" into host and slots; default: 1 slot."""
    bracket = re.fullmatch(r"((?:[^@\[\]]+@)?)\[([0-9A-Fa-f:.%\w]+)\](?::(.*))?", text)
    if bracket:
        name, slots = bracket[1] + bracket[2], bracket[3]
    else:
        name, _, after = text.partition(":")
        if ":" in after:
            raise HostsError(
                f"{where}: {text!r} is neither host:slots nor [IPv6 address]:slots"
            )
        slots = after if ":" in text else None
    return _checked_name(name, where), (
        1 if slots is None else _checked_slots(slots, where)
    )


def _summed(found: Iterable[tuple[str, int]]) -> list[Host]:
    """Returns hosts in order of first mention; slots of repeated hosts are added."""
    slots: dict[str, int] = {}
    for name, count in found:
        slots[name] = slots.get(name, 0) + count
    return [Host(name, count) for name, count in slots.items()]


def parse_list(text: str) -> list[Host]:
    """Returns the hosts of `-H host1:2,host2:2`.

    Args:
        text: hosts with their slots (default 1), separated by commas. The slots of a
            host that is named twice are added up, as in Open MPI.

    Raises:
        HostsError: an entry is malformed.

    Example:
        >>> from tfdist.launch import hosts
        >>> [(host.name, host.slots) for host in hosts.parse_list("a:2,b,a:1")]
        [('a', 3), ('b', 1)]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise HostsError(f"-H {text!r}: expected host:slots, separated by commas")
    return _summed(_split_slots(part, f"-H {text!r}") for part in parts)


def parse_file(text: str, name: str) -> list[Host]:
    r"""Returns the hosts of a hostfile: lines `host slots=N`, `host:N` or `host`.

    Args:
        text: the file's contents; "#" starts a comment.
        name: name of the file, for messages.

    Raises:
        HostsError: a line is malformed (the message states its number), or the file
            contains no host.

    Example:
        >>> from tfdist.launch import hosts
        >>> found = hosts.parse_file("a slots=2  # the first\nb:1\n", "hosts")
        >>> [(host.name, host.slots) for host in found]
        [('a', 2), ('b', 1)]
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_file_line(words, f"{name}, line {number}"))
    if not found:
        raise HostsError(f"{name}: no host in it; expected lines like: host1 slots=2")
    return _summed(found)


def _file_line(words: list[str], where: str) -> tuple[str, int]:
    name, slots = _split_slots(words[0], where)
    told = {"slots": slots} if ":" in words[0].rpartition("]")[2] else {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in ("slots", "max_slots"):
            raise HostsError(f"{where}: expected slots=N after the host, got {word!r}")
        if key in told:
            raise HostsError(f"{where}: the number of slots is given twice")
        told[key] = _checked_slots(value, where)
    slots = told.get("slots", 1)
    most = told.get("max_slots", slots)
    if most < slots:
        raise HostsError(f"{where}: max_slots={most} is below {slots} slots")
    return name, slots


def read_file(path: str) -> list[Host]:
    """Reads a hostfile; see `parse_file`.

    Raises:
        HostsError: the file cannot be read, or is malformed.
    """
    try:
        return parse_file(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise HostsError(f"--hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HostsError(f"--hostfile {path}: not a text file") from None


def own_names() -> set[str]:
    """Returns the names and addresses of this machine."""
    name = socket.gethostname().lower()
    found = {"localhost", name, name.partition(".")[0]}
    for addresses in psutil.net_if_addrs().values():
        found |= {one.address.lower() for one in addresses}
    return found


def _is_local(address: str, own: set[str]) -> bool:
    name = address.lower().rstrip(".")
    if name in own:
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # only ssh knows the name
    resolved = {str(info[4][0]) for info in found}
    return all(
        one in own or ipaddress.ip_address(one.partition("%")[0]).is_loopback
        for one in resolved
    )


def mark_local(found: Sequence[Host]) -> list[Host]:
    """Marks this machine in a list of hosts; entries that all name it become one host.

    The names of this machine are "localhost", loopback addresses, its own name and
    addresses, and names that resolve only to these addresses. A name with "user@" is
    always reached through ssh.
    """
    own = own_names()
    merged: dict[str, Host] = {}
    for host in found:
        local = "@" not in host.name and _is_local(host.address, own)
        key = "" if local else host.name
        slots = host.slots + (merged[key].slots if key in merged else 0)
        name = merged[key].name if key in merged else host.name
        merged[key] = Host(name, slots, local)
    return list(merged.values())


def nodes(count: int, size: int) -> list[Host]:
    """Returns the hosts of --nnodes; this machine is the first.

    Args:
        count: number of hosts.
        size: number of ranks on all hosts together, a multiple of `count`.

    Example:
        >>> from tfdist.launch import hosts
        >>> [(host.name, host.slots) for host in hosts.nodes(2, 4)]
        [('localhost', 2), ('node 1', 2)]
    """
    others = [Host(f"node {number}", size // count) for number in range(1, count)]
    return [Host("localhost", size // count, is_local=True), *others]


def places(found: Sequence[Host], size: int) -> list[Place]:
    """Assigns `size` ranks to the hosts; each host is filled before the next is used.

    Returns:
        The places, in rank order.

    Raises:
        HostsError: there are fewer slots than ranks.

    Example:
        >>> from tfdist.launch.hosts import Host, places
        >>> [(p.host, p.local_rank) for p in places([Host("a", 1), Host("b", 3)], 3)]
        [(0, 0), (1, 0), (1, 1)]
    """
    slots = sum(host.slots for host in found)
    if size > slots:
        listed = ", ".join(f"{host.name}: {host.slots}" for host in found[:20])
        more = f", and {len(found) - 20} more" if len(found) > 20 else ""
        raise HostsError(
            f"-np {size}, but the hosts have {slots} slot{'s' if slots > 1 else ''} "
            f"({listed}{more}); add hosts, or give the hosts more slots (host:N)"
        )
    filled = [index for index, host in enumerate(found) for _ in range(host.slots)]
    return places_of(filled[:size])


def slots_of(found: Sequence[Host], most: int) -> list[Slot]:
    """Returns the slots of the hosts, in order, with at most `most` slots per host.

    Example:
        >>> from tfdist.launch.hosts import Host, slots_of
        >>> [(s.host, s.index) for s in slots_of([Host("a", 1), Host("b", 9)], 2)]
        [(0, 0), (1, 0), (1, 1)]
    """
    return [
        Slot(number, index)
        for number, host in enumerate(found)
        for index in range(min(host.slots, most))
    ]


def places_of(hosts: Sequence[int]) -> list[Place]:
    """Returns the places of ranks whose hosts are known.

    Args:
        hosts: the host of each rank, in rank order.

    Example:
        >>> from tfdist.launch.hosts import places_of
        >>> [(p.local_rank, p.cross_rank) for p in places_of([0, 1, 1, 0])]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    on_host: Counter[int] = Counter()
    with_local_rank: Counter[int] = Counter()
    indexes = []
    for host in hosts:
        local_rank = on_host[host]
        indexes.append((local_rank, with_local_rank[local_rank]))
        on_host[host] += 1
        with_local_rank[local_rank] += 1
    return [
        Place(
            rank=rank,
            host=host,
            local_rank=local_rank,
            local_size=on_host[host],
            cross_rank=cross_rank,
            cross_size=with_local_rank[local_rank],
        )
        for rank, (host, (local_rank, cross_rank)) in enumerate(
            zip(hosts, indexes, strict=True)
        )
    ]
