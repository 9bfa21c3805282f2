"""One rank of gloo, as PyTorch gives it: float32 sums in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measuring
import torch
import torch.distributed as dist
from exact import brought, check

BUCKET_BYTES = 25 << 20

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def agree(value: float) -> float:
    """The mean over the ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / SIZE


def sizes(task: dict[str, Any]) -> dict[str, list[float]]:
    """One allreduce of each size."""
    seconds = {}
    for size_bytes in task["sizes"]:
        values = torch.from_numpy(brought(size_bytes // 4, RANK))
        dist.all_reduce(values)
        check(values.numpy(), SIZE, f"{size_bytes} bytes")
        values.zero_()  # sums of sums would end at infinity
        seconds[f"allreduce/{size_bytes}"] = measuring.measure(
            measuring.repeated(lambda values=values: dist.all_reduce(values)),
            agree,
            task["cap_s"],
        )
    return seconds


def one_by_one(tensors: list[torch.Tensor]) -> None:
    """Reduces the tensors, each after the one before is done."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def asynchronous(tensors: list[torch.Tensor]) -> None:
    """Starts all reductions, then waits for them."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def buckets(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Copies into buckets of 25 MiB, like DistributedDataParallel, and back."""
    cut: list[list[torch.Tensor]] = [[]]
    for tensor in reversed(tensors):
        if sum(one.nbytes for one in cut[-1]) >= BUCKET_BYTES:
            cut.append([])
        cut[-1].append(tensor.view(-1))
    flats = [torch.cat(bucket) for bucket in cut]

    def reduced() -> None:
        works = []
        for bucket, flat in zip(cut, flats, strict=True):
            torch.cat(bucket, out=flat)
            works.append(dist.all_reduce(flat, async_op=True))
        for bucket, flat, work in zip(cut, flats, works, strict=True):
            work.wait()
            parts = flat.split([one.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                one.copy_(part)

    return reduced


def gradients(task: dict[str, Any]) -> dict[str, list[float]]:
    """The whole list, in place."""
    tensors = [torch.empty(shape) for shape in task["shapes"]]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    ways = {
        "one by one": lambda: one_by_one(tensors),
        "asynchronous": lambda: asynchronous(tensors),
        "25 MiB buckets": buckets(tensors),
    }
    seconds = {}
    for name, way in ways.items():
        for i, tensor in enumerate(tensors):
            values = torch.from_numpy(brought(tensor.numel(), RANK, shift=i))
            tensor.copy_(values.view(tensor.shape))
        way()
        for i, tensor in enumerate(tensors):
            check(tensor.numpy(), SIZE, f"{name}, tensor {i}", shift=i)
            tensor.zero_()  # sums of sums would end at infinity
        seconds[f"{name}/{size_bytes}"] = measuring.measure(
            measuring.repeated(way), agree, task["cap_s"]
        )
    return seconds


def main() -> None:
    """Measures."""
    task = measuring.task()
    found = {"sizes": sizes, "gradients": gradients}[task["task"]](task)
    measuring.leave(task, RANK, SIZE, {"torch": torch.__version__}, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
