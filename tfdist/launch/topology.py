"""Topology of this host's CPUs, from Linux's /sys."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Processor:
    """A logical CPU: one hardware thread of a core.

    Sorting puts CPUs that share a socket, a NUMA node or a core next to each other.

    Attributes:
        socket: ID of the physical package.
        node: ID of the NUMA node.
        core: lowest CPU ID on the same core.
        number: CPU ID, as in `taskset` and /proc/cpuinfo.
    """

    socket: int
    node: int
    core: int
    number: int


def parse_ranges(text: str) -> set[int]:
    """Returns the numbers in a text such as "0-2,8", the kernel's list format.

    Raises:
        ValueError: the text is not such a list.

    Example:
        >>> from tfdist.launch import topology
        >>> sorted(topology.parse_ranges("0-2,8"))
        [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as a text such as "0-2,8", the kernel's list format.

    Example:
        >>> from tfdist.launch import topology
        >>> topology.ranges([8, 0, 1, 2])
        '0-2,8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _numbers(path: Path) -> set[int]:
    with contextlib.suppress(OSError, ValueError):
        return parse_ranges(path.read_text())
    return set()


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def read(allowed: Collection[int], system: Path = _SYSTEM) -> list[Processor]:
    """Returns the topology of the given CPUs, sorted by socket, NUMA node and core.

    If the kernel reports no topology (in a sandbox without /sys), each CPU is treated
    as a core of its own, and all are in one socket and one NUMA node.

    Args:
        allowed: CPU IDs.
        system: the folder /sys/devices/system.
    """
    node_of = {}
    for folder in system.glob("node/node[0-9]*"):
        for number in _numbers(folder / "cpulist"):
            node_of[number] = int(folder.name.removeprefix("node"))
    found = []
    for number in allowed:
        folder = system / "cpu" / f"cpu{number}" / "topology"
        # Kernels before 5.2 use the second name.
        together = _numbers(folder / "core_cpus_list") or _numbers(
            folder / "thread_siblings_list"
        )
        found.append(
            Processor(
                socket=_number(folder / "physical_package_id"),
                node=node_of.get(number, 0),
                core=min(together, default=number),
                number=number,
            )
        )
    return sorted(found)


def own() -> list[Processor]:
    """Returns the CPUs that this process, and its children, may use."""
    return read(os.sched_getaffinity(0))
