"""Inputs whose sums are exact in float32, for workers that have NumPy."""

from __future__ import annotations

import numpy as np

PERIOD = 17
# TensorFlow's and PyTorch's tensors begin at multiples of this. Large NumPy arrays
# begin 16 bytes after the start of a page. Writing there delays reads at the start of
# another page, because a processor first compares only the last 12 bits of addresses.
ALIGNMENT = 64


def zeros(elements: int) -> np.ndarray:
    """Float32 zeros, aligned like the memory of tensors."""
    memory = np.zeros(4 * elements + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + 4 * elements].view(np.float32)


def brought(elements: int, rank: int, shift: int = 0) -> np.ndarray:
    """The input of `rank`: small integers that differ by position and by rank."""
    places = np.arange(shift, shift + elements, dtype=np.int64)
    found = zeros(elements)
    found[:] = places % PERIOD + rank
    return found


def total(elements: int, size: int, shift: int = 0) -> np.ndarray:
    """The sum of the inputs of all ranks."""
    places = np.arange(shift, shift + elements, dtype=np.int64)
    return (size * (places % PERIOD) + size * (size - 1) // 2).astype(np.float32)


def check(found: np.ndarray, size: int, what: str, shift: int = 0) -> None:
    """Ends this rank unless every bit of the sum is right."""
    found = np.ascontiguousarray(found).reshape(-1)
    wanted = total(found.size, size, shift)
    if found.dtype != np.float32 or not np.array_equal(
        found.view(np.uint32), wanted.view(np.uint32)
    ):
        wrong = np.flatnonzero(found != wanted)[:4]
        raise SystemExit(
            f"{what}: wrong sums at {wrong.tolist()}: expected "
            f"{wanted[wrong].tolist()}, got {found[wrong].tolist()}"
        )
