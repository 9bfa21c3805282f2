"""This machine: what it is, how fast its memory is now, and programs compiled on it."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTROL_BYTES = 64 << 20
CONTROL_S = 0.5  # for each of the two rates


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tfdist-peers-")


def _compiled(source: str, target: str, *options: str) -> Path:
    path = Path(_folder().name, target)
    command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-Wall", "-pthread"]
    subprocess.run(
        [
            *command,
            *options,
            f"-I{ROOT / 'tfdist_ops'}",
            str(HERE / source),
            "-o",
            path,
        ],
        check=True,
        timeout=60,
    )
    return path


@functools.cache
def loops() -> Path:
    """The shared library of loops.c."""
    return _compiled("loops.c", "loops.so", "-shared", "-fPIC")


@functools.cache
def _memory() -> Path:
    return _compiled("memory.c", "memory")


def control(processes: int) -> dict[str, list[float]]:
    """GB/s of processes that run at once and add, then copy, 64 MiB at a time.

    Returns:
        "add_gb_s" and "copy_gb_s", one rate for each process.
    """
    out = subprocess.run(
        [_memory(), str(CONTROL_BYTES), str(CONTROL_S), str(processes)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    return dict(json.loads(out))


def description() -> dict[str, Any]:
    """Processor, number of cores, kernel and load of this machine."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }
