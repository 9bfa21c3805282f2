"""Topology of this host's processors, from Linux's /sys."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, order=True)
class Processor:
    """A hardware thread of a core. Sorting puts those that share the most side by side.

    Attributes:
        socket: number of its package.
        node: number of its NUMA node.
        core: lowest number of the processors of its core.
        number: its number, as in `taskset` and /proc/cpuinfo.
    """

    socket: int
    node: int
    core: int
    number: int


def parse_ranges(text: str) -> set[int]:
    """Returns the numbers in a list in the kernel's format.

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
    """Returns numbers as a list in the kernel's format.

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
    """Returns the kernel's topology of some processors, in the order of their places.

    If the kernel provides no topology (a sandbox without /sys), each processor is a
    core of its own, and all are in one socket and one NUMA node.

    Args:
        allowed: numbers of the processors.
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
    """Returns the processors that this process, and its children, may use."""
    return read(os.sched_getaffinity(0))
