"""One rank of gloo, as PyTorch gives it: float32 sums in place."""

from __future__ import annotations

from typing import Any

import measuring
import torch
import torch.distributed as dist
from exact import brought, check

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


def main() -> None:
    """Measures."""
    task = measuring.task()
    found = {"sizes": sizes}[task["task"]](task)
    measuring.leave(task, RANK, SIZE, {"torch": torch.__version__}, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
