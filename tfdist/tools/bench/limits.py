"""Measures the machine's limits on all ranks at the same time.

Inside a host, memory is the limit. With K ranks, each rank reduces (K - 1) / K of the
data and copies as much. Let S be the rate at which a process computes d = a + b, and C
the rate for d = a, while all ranks do the same. Both rates are in bytes of d per
second. For K = 2 and n bytes, the time is n/2 (1/S + 1/C) seconds. The bus bandwidth is
2 / (1/S + 1/C) for any K. Between hosts, the line rate is the limit. Data that fit into
the processor's caches can be faster than memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tfdist.core import native
from tfdist.tools.bench.calls import Agreement, Call
from tfdist.tools.bench.operations import Place

_MEMORY_BYTES = 64 << 20
_LINE_BYTES = 8 << 20
_ROUNDS = 7
_REDUCING = ("reduce", "reduce_scatter")
_ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True)
class Limits:
    """Measured rates, in bytes per second.

    Attributes:
        add: rate S of d = a + b, the mean over the ranks while all ranks work.
        copy: rate C of d = a, measured in the same way.
        line: rate between two hosts in each direction; None if there is only one host.
        hosts: number of ranks on each host.
    """

    add: float
    copy: float
    line: float | None
    hosts: tuple[int, ...]

    def bus(self, operation: str) -> float:
        """Returns the highest possible bus bandwidth, in bytes per second."""
        if self.line is None:
            if operation == "allreduce":
                return 2 / (1 / self.add + 1 / self.copy)
            return self.add if operation in _REDUCING else self.copy
        if operation in _ROOTED:
            return self.line
        ranks, hosts = sum(self.hosts), len(self.hosts)
        largest_host = max(self.hosts)
        if operation == "alltoall":
            return self.line * (ranks - 1) / (largest_host * (ranks - largest_host))
        if operation in ("gather", "scatter"):  # limited by the host of the root
            return self.line * (ranks - 1) / (ranks - self.hosts[0])
        # A host sends (hosts - 1) / hosts of the data once (allreduce: twice).
        return self.line * (ranks - 1) / ranks * hosts / (hosts - 1)


def _rate(work: Callable[[], object], size_bytes: int, agreement: Agreement) -> float:
    work()
    times_s = []
    agreement.meet()
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin)
    return agreement.mean(size_bytes / float(np.median(times_s)))


def memory_rates(agreement: Agreement) -> tuple[float, float]:
    """Returns S and C, measured with private arrays of 64 MiB each on every rank."""
    count = _MEMORY_BYTES // 4
    a, b = np.ones(count, np.float32), np.ones(count, np.float32)
    c = np.zeros(count, np.float32)
    add = _rate(lambda: np.add(a, b, out=c), _MEMORY_BYTES, agreement)
    copy = _rate(lambda: np.copyto(c, a), _MEMORY_BYTES, agreement)
    return add, copy


def line_rate(place: Place, host_of: tuple[int, ...], agreement: Agreement) -> float:
    """Returns the rate in bytes per second from rank 0 to a rank on another host."""
    other = next(rank for rank, host in enumerate(host_of) if host != host_of[0])
    return pair_rate(place, 0, other, agreement)


def pair_rate(place: Place, first: int, other: int, agreement: Agreement) -> float:
    """Returns the rate between two ranks in bytes per second; all ranks call it.

    The rate is computed from half the median time of an 8 MiB ping-pong.
    """
    outgoing = np.zeros(_LINE_BYTES, np.uint8)
    incoming = np.zeros(_LINE_BYTES, np.uint8)
    int8 = 6  # TensorFlow's number for the dtype
    calls = []
    for source, target in ((first, other), (other, first)):
        if place.rank == source:
            calls.append(_pair(int8, outgoing, None, source, target))
        elif place.rank == target:
            calls.append(_pair(int8, None, incoming, source, target))
    times_s = []
    agreement.meet()
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        for call in calls:
            call.run()
        times_s.append(time.perf_counter() - begin)
    seconds = float(np.median(times_s[1:])) / 2 if calls else 0.0
    slowest = float(agreement.largest(np.array([seconds]))[0])
    return _LINE_BYTES / slowest


def _pair(
    dtype: int,
    input_array: np.ndarray | None,
    output_array: np.ndarray | None,
    source: int,
    target: int,
) -> Call:
    return Call(
        native.SENDRECV,
        dtype,
        input_array,
        output_array,
        name=f"bench line {source}",
        root=source,
        peer=target,
    )


def measure(
    place: Place,
    host_of: tuple[int, ...],
    agreement: Agreement,
    given_line: float | None,
) -> Limits:
    """Measures all limits of the job's machines.

    Args:
        place: rank and number of ranks.
        host_of: for each rank, the index of its host.
        agreement: object that reduces numbers over all ranks.
        given_line: known rate between hosts, in bytes per second; None: measure it.
    """
    add, copy = memory_rates(agreement)
    hosts = tuple(host_of.count(host) for host in range(max(host_of) + 1))
    line = None
    if len(hosts) > 1:
        line = given_line or line_rate(place, host_of, agreement)
    return Limits(add=add, copy=copy, line=line, hosts=hosts)
