"""Assigns CPUs to the ranks of a host (--bind-to).

All functions except `here` are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tfdist.launch.topology import Processor, own, ranges

KINDS = ("none", "core", "numa", "socket", "slice")
THREADS = "TF_NUM_INTRAOP_THREADS"


class BindingError(ValueError):
    """The ranks of a host cannot be bound as requested."""


def divide(
    processors: Sequence[Processor], ranks: int, kind: str
) -> list[tuple[int, ...]]:
    """Divides the CPUs of one host among its ranks.

    Args:
        processors: CPUs that may be used, sorted by socket, NUMA node and core.
        ranks: number of ranks on this host.
        kind: an entry of `KINDS`. "none": each rank may use all CPUs. "core": one core
            per rank, with all its hardware threads. "numa", "socket": the CPUs of one
            NUMA node or socket; the number of ranks on each is proportional to its
            share of the CPUs. "slice": the same number of neighboring CPUs for each
            rank. A remainder is left unused, since results of ranks with different
            numbers of threads are not bitwise identical.

    Returns:
        CPU IDs of each rank, ascending, by local rank.

    Raises:
        BindingError: there are more ranks than cores ("core") or CPUs ("slice"). Ranks
            bound to the same CPU would wait for each other even while another CPU is
            idle; ranks that are not bound can move to it.

    Example:
        >>> from tfdist.launch.binding import divide
        >>> from tfdist.launch.topology import Processor
        >>> four = [Processor(socket=0, node=0, core=n, number=n) for n in range(4)]
        >>> divide(four, 2, "slice")
        [(0, 1), (2, 3)]
    """
    everything = [one.number for one in processors]
    if kind == "none":
        return [tuple(sorted(everything))] * ranks
    if kind == "slice":
        return _slices(processors, ranks)
    if kind == "core":
        cores = _cores(processors)
        if ranks > len(cores):
            raise _too_many(kind, ranks, len(cores), "core", everything)
        return [tuple(sorted(core)) for core in cores[:ranks]]
    by_place: dict[int, list[int]] = {}
    for one in processors:
        place = one.node if kind == "numa" else one.socket
        by_place.setdefault(place, []).append(one.number)
    firsts = [processors[rank * len(processors) // ranks] for rank in range(ranks)]
    places = [one.node if kind == "numa" else one.socket for one in firsts]
    return [tuple(sorted(by_place[place])) for place in places]


def _cores(processors: Sequence[Processor]) -> list[list[int]]:
    """Returns the CPU IDs of each core."""
    grouped = groupby(processors, key=lambda one: (one.socket, one.node, one.core))
    return [[one.number for one in core] for _, core in grouped]


def _slices(processors: Sequence[Processor], ranks: int) -> list[tuple[int, ...]]:
    cores = _cores(processors)
    units = [[one.number] for one in processors]
    if ranks > len(units):
        numbers = [one.number for one in processors]
        raise _too_many("slice", ranks, len(units), "processor", numbers)
    # Use whole cores, unless that would leave more CPUs idle.
    threads = len(cores[0])
    alike = all(len(core) == threads for core in cores)
    if alike and len(cores) // ranks * threads == len(units) // ranks:
        units = cores
    each = len(units) // ranks
    firsts = [rank * len(units) // ranks for rank in range(ranks)]
    return [tuple(sorted(sum(units[f : f + each], []))) for f in firsts]


def _too_many(
    kind: str, ranks: int, there: int, what: str, numbers: Sequence[int]
) -> BindingError:
    some = f"{there} {what}{'s' if there > 1 else ''}"
    return BindingError(
        f"--bind-to {kind}: expected at most one rank for each {what}, got {ranks} "
        f"ranks for {some} available on this host (processors "
        f"{ranges(numbers)}); start fewer ranks, or do not bind them: --bind-to none"
    )


def here(slots: int, kind: str) -> list[tuple[int, ...]]:
    """Divides the CPUs that this process may use among the slots of this host.

    Returns:
        CPU IDs of each slot.

    Raises:
        BindingError: as in `divide`.
    """
    return divide(own(), slots, kind) if slots else []


def of_slot(bound: Sequence[Sequence[int]], index: int) -> Sequence[int]:
    """Returns the CPU IDs of one slot.

    Args:
        bound: CPU IDs of each slot that the host had when it was added.
        index: number of the slot. Slots that were added later share the CPUs of these
            slots.
    """
    return bound[index % len(bound)]


def lines(bound: Mapping[int, Sequence[int]], host_of: Mapping[int, str]) -> list[str]:
    """Returns the lines that --report-bindings prints.

    Args:
        bound: CPU IDs, by rank.
        host_of: name of the host, by rank.

    Example:
        >>> from tfdist.launch import binding
        >>> binding.lines({0: (0, 1, 2)}, {0: "a"})
        ['rank 0 on a may use processors 0-2']
    """
    return [
        f"rank {rank} on {host_of[rank]} may use processor"
        f"{'s' if len(bound[rank]) > 1 else ''} {ranges(bound[rank])}"
        for rank in sorted(bound)
    ]


def warnings(bound: Mapping[int, Sequence[int]], asked: Mapping[int, str]) -> list[str]:
    """Returns warnings about the number of threads that TensorFlow will use.

    Args:
        bound: CPU IDs, by rank.
        asked: value of the variable `THREADS` for each rank; "" if it is not set.
    """
    threads, excess = {}, []
    for rank in sorted(bound):
        there = len(bound[rank])
        text = asked[rank]
        # TensorFlow starts one thread per CPU if the value is 0 or not a number.
        number = int(text) if text.isdecimal() else 0
        threads[rank] = number or there
        if number > there:
            excess.append(rank)
    found = []
    if excess:
        rank = excess[0]
        found.append(
            f"{THREADS}={threads[rank]}, but rank {rank} may use "
            f"{len(bound[rank])} of the processors: its threads wait for each other; "
            "unset the variable, or lower it"
        )
    if len(set(threads.values())) > 1:
        fewest = min(threads, key=lambda rank: threads[rank])
        most = max(threads, key=lambda rank: threads[rank])
        found.append(
            f"rank {fewest} will have {threads[fewest]} TensorFlow threads, rank "
            f"{most} will have {threads[most]}: results of the same computation may "
            "differ in their last bits, and the slowest rank sets the pace; "
            f"-x {THREADS}={threads[fewest]} makes the numbers of threads equal"
        )
    return found
