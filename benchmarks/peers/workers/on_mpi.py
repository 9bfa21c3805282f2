"""One rank of an MPI, float32 sums out of place; timed from C."""

from __future__ import annotations

import ctypes
from typing import Any

import measuring
import numpy as np
from exact import brought, check, zeros
from mpi4py import MPI
from native import looped

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def handle(thing: Any) -> ctypes.c_void_p:
    """A handle of the library behind mpi4py: an int (MPICH) or a pointer."""
    kind = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[MPI._sizeof(thing)]
    return ctypes.c_void_p(kind.from_address(MPI._addressof(thing)).value)


def library() -> ctypes.CDLL:
    """The MPI that mpi4py has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi.so" in line}
    return ctypes.CDLL(paths.pop())


def agree(value: float) -> float:
    """The mean over the ranks."""
    return WORLD.allreduce(value) / SIZE


def calls(
    task: dict[str, Any], inputs: list[int], outputs: list[int], elements: list[int]
) -> measuring.Repeat:
    """One MPI_Allreduce after the other, between addresses."""
    count = len(elements)
    return looped(
        task["loops"],
        "time_mpi",
        [
            library().MPI_Allreduce,
            (ctypes.c_void_p * count)(*inputs),
            (ctypes.c_void_p * count)(*outputs),
            (ctypes.c_int32 * count)(*elements),
            ctypes.c_int32(count),
            handle(MPI.FLOAT),
            handle(MPI.SUM),
            handle(WORLD),
        ],
    )


def sizes(task: dict[str, Any]) -> dict[str, list[float]]:
    """One allreduce of each size."""
    seconds = {}
    for size_bytes in task["sizes"]:
        elements = size_bytes // 4
        source, target = brought(elements, RANK), zeros(elements)
        repeat = calls(task, [source.ctypes.data], [target.ctypes.data], [elements])
        repeat(1)
        check(target, SIZE, f"{size_bytes} bytes")
        seconds[f"allreduce/{size_bytes}"] = measuring.measure(
            repeat, agree, task["cap_s"], measuring.MOST_IN_C
        )
        check(target, SIZE, f"{size_bytes} bytes, at the end")
    return seconds


def gradients(task: dict[str, Any]) -> dict[str, list[float]]:
    """The whole list in place: one tensor after the other, and as one vector."""
    counts = [int(np.prod(shape)) for shape in task["shapes"]]
    flat = zeros(sum(counts))
    ways = {
        "one by one, in place": np.split(flat, np.cumsum(counts)[:-1]),
        "flat, in place": [flat],
    }
    seconds = {}
    for name, parts in ways.items():
        for i, part in enumerate(parts):
            part[:] = brought(part.size, RANK, shift=i)
        repeat = calls(
            task,
            [int(MPI.IN_PLACE) % (1 << 64)] * len(parts),
            [part.ctypes.data for part in parts],
            [part.size for part in parts],
        )
        repeat(1)
        for i, part in enumerate(parts):
            check(part, SIZE, f"{name}, tensor {i}", shift=i)
        flat.fill(0.0)  # sums of sums would end at infinity
        seconds[f"{name}/{flat.nbytes}"] = measuring.measure(
            repeat, agree, task["cap_s"]
        )
    return seconds


def main() -> None:
    """Measures."""
    task = measuring.task()
    found = {"sizes": sizes, "gradients": gradients}[task["task"]](task)
    version = " ".join(MPI.Get_library_version().split())[:60]
    measuring.leave(task, RANK, SIZE, {"mpi": version}, found)


if __name__ == "__main__":
    main()
