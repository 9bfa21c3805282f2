"""Checks the clocks, speeds and allreduce results of the ranks of a job."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.core import native
from tfdist.tools.bench.calls import Agreement, Call
from tfdist.tools.bench.limits import pair_rate
from tfdist.tools.bench.operations import DTYPES, OPERATIONS, Place, pattern
from tfdist.tools.doctor.finding import ERROR, OK, WARNING, Finding

SIZES_BYTES = (1 << 10, 1 << 20, 16 << 20)
BATCH = 5  # allreduces of each size between two readings of the clock
COMPARED = ("speed", "clock")  # checks that compare a host with the others
MOST_SKEW_S = 1.0
SLOW = 0.5  # fraction of the median; a slower host or link is reported
_MEMORY_BYTES = 64 << 20
_TEXT_BYTES = 16 << 10  # size of a rank's report
_INT32 = 3  # TensorFlow's number for the dtype


@dataclass(frozen=True)
class Rank:
    """The report of a rank about itself.

    Attributes:
        host: name of its host.
        findings: findings of its machine; empty for all but the first rank of a host.
        clock_s: system time of the rank after a barrier, in seconds.
        memory_rate: rate at which the rank adds arrays while all ranks do, in bytes per
            second.
    """

    host: str
    findings: list[Finding]
    clock_s: float
    memory_rate: float


@dataclass(frozen=True)
class Sums:
    """The number, wrong elements and total time of the allreduces of a trial."""

    count: int
    wrong: int
    seconds: float


class Trial:
    """The collectives of `tfdist doctor`, on a rank of a connected job."""

    def __init__(self, topology: native.Topology) -> None:
        self.place = Place(topology.rank, topology.size)
        self._host_of = topology.host_of
        self._agreement = Agreement(self.place)

    def exchange(self, findings: Sequence[Finding]) -> list[Rank]:
        """Returns the reports of all ranks, in rank order; the same on all ranks."""
        is_first = self._host_of.index(self._host_of[self.place.rank])
        rate = self._memory_rate()
        self._agreement.meet()
        own = {
            "host": host_name(),
            "findings": [
                one.as_json() for one in findings if is_first == self.place.rank
            ],
            "clock_s": time.time(),
            "memory_rate": rate,
        }
        return [
            Rank(**{**one, "findings": [Finding(**f) for f in one["findings"]]})
            for one in self._gather(own)
        ]

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(own).encode()
        if len(text) > _TEXT_BYTES:  # keep the first 12 warnings and errors, shortened
            short = [
                {**one, "text": one["text"][:300], "remedy": one["remedy"][:300]}
                for one in own["findings"]
                if one["level"] != OK
            ]
            text = json.dumps({**own, "findings": short[:12]}).encode()
        mine = np.zeros((self.place.size, _TEXT_BYTES), np.int32)
        mine[self.place.rank, : len(text)] = np.frombuffer(text, np.uint8)
        every = np.empty(mine.size, np.int32)
        name = "doctor exchange"
        Call(native.ALLREDUCE, _INT32, mine.reshape(-1), every, name=name).run()
        rows = every.reshape(mine.shape).astype(np.uint8)
        return [json.loads(row.tobytes().rstrip(b"\0")) for row in rows]

    def _memory_rate(self) -> float:
        count = _MEMORY_BYTES // 4
        a, c = np.ones(count, np.float32), np.zeros(count, np.float32)
        times_s = []
        self._agreement.meet()
        for _ in range(5):
            begin_s = time.perf_counter()
            np.add(a, a, out=c)
            times_s.append(time.perf_counter() - begin_s)
        return _MEMORY_BYTES / statistics.median(times_s)

    def line_rates(self) -> dict[tuple[int, int], float]:
        """Returns the rates between the first ranks of adjacent hosts, in bytes/s."""
        firsts = [
            self._host_of.index(host)
            for host in range(max(self._host_of, default=0) + 1)
        ]
        others = firsts[1:] + firsts[:1] if len(firsts) > 2 else firsts[1:]
        return {
            (first, other): pair_rate(self.place, first, other, self._agreement)
            for first, other in zip(firsts, others, strict=False)
        }

    def sums(self, seconds: float) -> Sums:
        """Reduces arrays of several sizes for some time, and checks every element."""
        calls = []
        for size_bytes in SIZES_BYTES:
            count = size_bytes // 4
            own = np.resize(pattern(self.place, self.place.rank), count)
            output = np.empty(count, np.float32)
            call = Call(
                OPERATIONS["allreduce"],
                DTYPES["float32"],
                own.astype(np.float32),
                output,
                name=f"doctor {size_bytes}",
            )
            right = OPERATIONS["allreduce"].result(self.place, count)
            calls.append((call, output, np.asarray(right, np.float32)))
        begin_s = time.monotonic()
        count, wrong, elapsed_s = 0, 0, 0.0
        while count == 0 or elapsed_s < seconds:
            for call, output, right in calls:
                for _ in range(BATCH):
                    output.fill(np.nan)
                    call.run()
                    wrong += int(np.count_nonzero(output != right))
            count += BATCH * len(calls)
            own_s = np.array([time.monotonic() - begin_s])
            elapsed_s = float(self._agreement.largest(own_s)[0])
        return Sums(count, int(self._agreement.total(wrong)), elapsed_s)


def host_name() -> str:
    """Returns the name of this host; under Slurm, the name that `srun` uses."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def about_ranks(ranks: Sequence[Rank]) -> list[tuple[str, Finding]]:
    """Returns the findings about single hosts, each with the host's name."""
    found = [(rank.host, one) for rank in ranks for one in rank.findings]
    slowest: dict[str, Rank] = {}
    for rank in ranks:
        known = slowest.setdefault(rank.host, rank)
        slowest[rank.host] = min(known, rank, key=lambda one: one.memory_rate)
    middle = statistics.median(rank.memory_rate for rank in slowest.values())
    for host, rank in slowest.items():
        if rank.memory_rate < SLOW * middle:
            text = (
                f"adds {rank.memory_rate / 1e9:.1f} GB/s in memory, the median of the "
                f"hosts is {middle / 1e9:.1f}"
            )
            remedy = "Look for other programs on the host, or exclude it from the job."
            found.append((host, Finding("speed", WARNING, text, remedy)))
        skew_s = rank.clock_s - ranks[0].clock_s
        if abs(skew_s) > MOST_SKEW_S:
            text = f"is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} "
            text += f"that of {ranks[0].host}"
            remedy = "Set the clock by NTP: logs and timelines show wrong times."
            found.append((host, Finding("clock", WARNING, text, remedy)))
    return found


def about_lines(
    rates: dict[tuple[int, int], float], ranks: Sequence[Rank]
) -> list[Finding]:
    """Returns findings about the network between the hosts, from `line_rates`."""
    if not rates:
        return []
    middle = statistics.median(rates.values())
    slow = [
        Finding(
            "network",
            WARNING,
            f"{ranks[first].host} to {ranks[other].host}: {rate * 8 / 1e9:.2f} Gbit/s, "
            f"the median of the hosts is {middle * 8 / 1e9:.2f}",
            "Check the cable, the interface (TFDIST_ADDRESS) and other traffic.",
        )
        for (first, other), rate in rates.items()
        if rate < SLOW * middle
    ]
    text = f"{middle * 8 / 1e9:.2f} Gbit/s between two hosts"
    return slow or [Finding("network", OK, text)]


def about_sums(sums: Sums, ranks: Sequence[Rank]) -> Finding:
    """Returns the finding about the allreduces."""
    hosts = len({rank.host for rank in ranks})
    text = f"{sums.count} allreduces of 1 KiB to 16 MiB on {len(ranks)} ranks"
    text += f", {hosts} hosts" if hosts > 1 else ""
    text += f" in {sums.seconds:.1f} s"
    if sums.wrong:
        remedy = "The memory, a processor or the network of a host is damaged."
        text += f": {sums.wrong} elements were wrong"
        return Finding("collectives", ERROR, text, remedy)
    return Finding("collectives", OK, f"{text}, all exact")
