"""One rank of tfdist's core without TensorFlow: one thread, timed from C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import measuring
import numpy as np
from exact import brought, check, zeros
from helpers import core_client
from native import looped

from tfdist.core import native as native_library
from tfdist.core import runtime, world
from tfdist.gradients.bucketing import cut_buckets


def agree(value: float) -> float:
    """The mean over the ranks."""
    mean = core_client.allreduce(np.array([value]), name="agree")[0]
    return float(mean) / runtime.size()


def function_of(name: str) -> ctypes.c_void_p:
    """Address of a function of the core."""
    return ctypes.cast(getattr(native_library.library(), name), ctypes.c_void_p)


class Group:
    """A registered group of gradients, which needs no negotiation after its first step.

    Args:
        name: of the group.
        buckets: for each bucket the inputs and the outputs of its tensors, and their
            places in the whole list.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[tuple[list[np.ndarray], list[np.ndarray], list[int]]],
    ) -> None:
        shapes = [x.shape for inputs, _, _ in buckets for x in inputs]
        lines = [f"{name}/{i} float32 {list(s)}" for i, s in enumerate(shapes)]
        text = "\n".join([*lines, "op=sum"])
        group, _ = native_library.register_gradient_list(text, [True] * len(lines))
        self._keep: list[Any] = [buckets]
        self._requests = (native_library.Request * len(buckets))()
        for number, (inputs, outputs, places) in enumerate(buckets):
            self._requests[number] = native_library.Request(
                kind=native_library.ALLREDUCE,
                name=f"{name}.{number}".encode(),
                dtype=core_client.DTYPES[np.float32],
                op=core_client.SUM,
                prescale=1.0,
                postscale=1.0,
                group=group.encode(),
                bucket=number,
                bucket_count=len(buckets),
                tensors=self._tensors(inputs, outputs, places),
                tensor_count=len(inputs),
            )

    def _tensors(
        self, inputs: list[np.ndarray], outputs: list[np.ndarray], places: list[int]
    ) -> ctypes.Array[Any]:
        tensors = (native_library.Tensor * len(inputs))()
        for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            dims = (ctypes.c_int64 * max(1, x.ndim))(*x.shape)
            tensors[i] = native_library.Tensor(
                input=x.ctypes.data,
                output=y.ctypes.data,
                rank=x.ndim,
                dims=dims,
                hint=places[i],
            )
            self._keep.append(dims)
        self._keep.append(tensors)
        return tensors

    def repeat(self, loops: str) -> measuring.Repeat:
        """Submits all buckets, then waits for them, timed from C."""
        return looped(
            loops,
            "time_core",
            [
                function_of("tfdist_submit"),
                function_of("tfdist_run"),
                self._requests,
                ctypes.c_int32(len(self._requests)),
            ],
        )


def sizes(task: dict[str, Any]) -> dict[str, list[float]]:
    """One allreduce of each size, out of place and in place."""
    rank, size = runtime.rank(), runtime.size()
    seconds = {}
    for size_bytes in task["sizes"]:
        source = brought(size_bytes // 4, rank)
        target = zeros(source.size)
        for series, output in (("allreduce", target), ("in place", source)):
            name = f"{series.replace(' ', '_')}.{size_bytes}"
            repeat = Group(name, [([source], [output], [0])]).repeat(task["loops"])
            repeat(1)
            check(output, size, f"{size_bytes} bytes {series}")
            if output is source:
                source.fill(0.0)  # sums of sums would end at infinity
            seconds[f"{series}/{size_bytes}"] = measuring.measure(
                repeat, agree, task["cap_s"], measuring.MOST_IN_C
            )
            if output is target:
                check(target, size, f"{size_bytes} bytes, at the end")
    return seconds


def gradients(task: dict[str, Any]) -> dict[str, list[float]]:
    """The whole list in tfdist's buckets, also in place, and as one vector."""
    rank, size = runtime.rank(), runtime.size()
    inputs = [
        brought(int(np.prod(shape)), rank, shift=i).reshape(shape)
        for i, shape in enumerate(task["shapes"])
    ]
    size_bytes = sum(x.nbytes for x in inputs)
    rows = native_library.config()
    cut = cut_buckets(
        [x.nbytes for x in inputs],
        ["float32"] * len(inputs),
        first_bytes=rows["TFDIST_FIRST_BUCKET_BYTES"]["value"],
        bucket_bytes=rows["TFDIST_BUCKET_BYTES"]["value"],
        fusion_bytes=rows["TFDIST_FUSION_BYTES"]["value"],
    )
    seconds = {}
    for series in ("buckets", "buckets, in place"):
        outputs = inputs
        if series == "buckets":
            outputs = [zeros(x.size).reshape(x.shape) for x in inputs]
        lists = [([inputs[i] for i in b], [outputs[i] for i in b], b) for b in cut]
        repeat = Group(series, lists).repeat(task["loops"])
        repeat(1)
        for i, found in enumerate(outputs):
            check(found, size, f"{series}, tensor {i}", shift=i)
            if outputs is inputs:
                found.fill(0.0)  # sums of sums would end at infinity
        seconds[f"{series}/{size_bytes}"] = measuring.measure(
            repeat, agree, task["cap_s"]
        )
    source = brought(size_bytes // 4, rank)
    target = zeros(source.size)
    repeat = Group("flat", [([source], [target], [0])]).repeat(task["loops"])
    repeat(1)
    check(target, size, "flat")
    seconds[f"flat/{size_bytes}"] = measuring.measure(repeat, agree, task["cap_s"])
    return seconds


def main() -> None:
    """Measures."""
    task = measuring.task()
    world.start()
    found = {"sizes": sizes, "gradients": gradients}[task["task"]](task)
    versions = {"tfdist": str(native_library.build_info()["version"])}
    rank, size = runtime.rank(), runtime.size()
    measuring.leave(
        task, rank, size, versions, found, counters=native_library.counters()
    )
    world.shutdown()


if __name__ == "__main__":
    main()
