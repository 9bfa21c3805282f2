"""Formats results as a table like that of nccl-tests, or as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfdist.core import native
from tfdist.core.version import __version__
from tfdist.tools.bench import output
from tfdist.tools.bench.limits import Limits
from tfdist.tools.bench.measure import Result
from tfdist.tools.bench.operations import OPERATIONS

FORMAT = "tfdist bench"
_GIGA = 1e9
HEADER = (
    f"# {'size':>11} {'count':>11} {'type':>9} {'algorithm':>18} {'time':>11} "
    f"{'algbw':>8} {'busbw':>8} {'limit':>7} {'wrong':>7}\n"
    f"# {'(B)':>11} {'(elements)':>11} {'':>9} {'':>18} {'(us)':>11} "
    f"{'(GB/s)':>8} {'(GB/s)':>8} {'(%)':>7} {'':>7}"
)


def bus_bandwidth(result: Result, ranks: int) -> float:
    """Returns the bus bandwidth as defined by nccl-tests, in bytes per second.

    References:
        NVIDIA, nccl-tests, doc/PERFORMANCE.md, "Bus Bandwidth".
    """
    return result.algbw * OPERATIONS[result.operation].bus(ranks)


def percent(result: Result, limits: Limits) -> float:
    """Returns the bus bandwidth as a percentage of the machine's limit."""
    bus = bus_bandwidth(result, sum(limits.hosts))
    return 100.0 * bus / limits.bus(result.operation)


def line(result: Result, limits: Limits) -> str:
    """Returns a line of the table; "auto:" precedes an algorithm chosen by auto."""
    name = f"auto:{result.algorithm}" if result.auto else result.algorithm
    bus = bus_bandwidth(result, sum(limits.hosts))
    return (
        f"  {result.size_bytes:>11} {result.count:>11} {result.dtype:>9} {name:>18} "
        f"{result.seconds * 1e6:>11.1f} {result.algbw / _GIGA:>8.3f} "
        f"{bus / _GIGA:>8.3f} {percent(result, limits):>7.1f} {result.wrong:>7}"
    )


def heading(limits: Limits, transports: Sequence[str]) -> list[str]:
    """Returns lines of text that describe the measured system."""
    counters = native.counters()
    hosts = ", ".join(map(str, limits.hosts))
    lines = [
        f"# tfdist {__version__}: {sum(limits.hosts)} ranks, on each host: {hosts}; "
        f"{os.cpu_count()} cores here; {', '.join(transports) or 'no links'}",
        f"# memory, each rank while all work: d=a+b {limits.add / _GIGA:.2f} GB/s, "
        f"copy {limits.copy / _GIGA:.2f} GB/s",
    ]
    if limits.line is not None:
        lines.append(
            f"# between hosts: {limits.line / _GIGA:.3f} GB/s "
            f"({limits.line * 8 / _GIGA:.2f} Gbit/s)"
        )
    if counters.get("tuning"):
        lines.append(f"# tuning file in force: {counters['tuning']}")
    return lines


def machine() -> dict[str, Any]:
    """Returns a description of the machine, the versions and the time, for files."""
    return {
        "host": platform.node(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tfdist": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_json(results: Sequence[Result], limits: Limits) -> dict[str, Any]:
    """Returns all results of a run, with rates in bytes per second and times in s."""
    rows = [
        {
            "operation": result.operation,
            "size_bytes": result.size_bytes,
            "count": result.count,
            "type": result.dtype,
            "algorithm": result.algorithm,
            "auto": result.auto,
            "seconds": result.seconds,
            "repetitions": result.repetitions,
            "algbw": result.algbw,
            "busbw": bus_bandwidth(result, sum(limits.hosts)),
            "limit_percent": percent(result, limits),
            "wrong": result.wrong,
        }
        for result in results
    ]
    config = {
        name: row["value"] for name, row in native.config().items() if row["agreed"]
    }
    return {
        "format": FORMAT,
        "version": 1,
        "machine": machine(),
        "ranks": sum(limits.hosts),
        "hosts": list(limits.hosts),
        "limits": {"add": limits.add, "copy": limits.copy, "line": limits.line},
        "tuning": native.counters().get("tuning", ""),
        "config": config,
        "rows": rows,
    }


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    with output.atomic_write(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n")
