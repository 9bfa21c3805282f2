"""Packs the tensors of the pack kernels with PyTorch, where it sees the GPU."""

from typing import Any

import numpy as np
from gpu_library import Batch, Library, Tensor

try:
    import torch
except ImportError:
    torch = None


def missing() -> str | None:
    """Why PyTorch cannot be compared with, or None."""
    if torch is None:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def check(library: Library) -> str:
    """Compares one large bfloat16 pack with PyTorch's own on the GPU."""
    if reason := missing():
        return f"skipped: {reason}"
    sizes = [100_003, 4096, 1, 77_777]
    tensors = [torch.randn(n, device="cuda") for n in sizes]
    buffer = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = zip(tensors, sizes, offsets, strict=True)
    table = (Tensor * 4)(*(Tensor(t.data_ptr(), n, o) for t, n, o in rows))
    pair = ("float32", "bfloat16")
    batch = Batch.of(table, pair, buffer.data_ptr(), sum(sizes), 0.125)
    library.pack(batch)
    torch.cuda.synchronize()
    reference = (torch.cat(tensors) * 0.125).to(torch.bfloat16)
    equal = torch.equal(reference.view(torch.int16), buffer.view(torch.int16))
    return "equal, bit by bit" if equal else "DIFFERENT from PyTorch"


def pack_times(
    sizes: list[int], pair: tuple[str, str], runs: int
) -> np.ndarray[Any, Any] | None:
    """Milliseconds of `runs` packs by PyTorch, without a scale; None without PyTorch.

    The faster of `torch._foreach_copy_` into views of the buffer (as DDP's buckets
    are views) and, where no type changes, `torch.cat(out=)`.
    """
    if missing():
        return None
    source, target = (getattr(torch, name) for name in pair)
    tensors = [torch.ones(n, dtype=source, device="cuda") for n in sizes]
    buffer = torch.zeros(sum(sizes), dtype=target, device="cuda")
    views = list(torch.split(buffer, sizes))
    ways = [lambda: torch._foreach_copy_(views, tensors)]
    if pair[0] == pair[1]:
        ways.append(lambda: torch.cat(tensors, out=buffer))
    found = []
    for way in ways:
        buffer.zero_()
        for _ in range(3):
            way()
        if not bool((buffer == 1).all()):
            raise RuntimeError("PyTorch did not pack all tensors")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        events[0].record()
        for event in events[1:]:
            way()
            event.record()
        torch.cuda.synchronize()
        pairs = zip(events, events[1:], strict=False)
        found.append(np.array([a.elapsed_time(b) for a, b in pairs]))
    return min(found, key=lambda times: float(np.median(times)))
