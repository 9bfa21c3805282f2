"""Inputs whose sums are exact in float32, for workers that have NumPy."""

from __future__ import annotations

import numpy as np

PERIOD = 17
# Where TensorFlow's and PyTorch's tensors begin. Large arrays of NumPy begin 16 bytes
# after a page; what is written there holds up reading at the beginning of another page,
# since a processor compares the last 12 bits of addresses first.
ALIGNMENT = 64


def zeros(elements: int) -> np.ndarray:
    """Float32 of memory that begins as that of tensors does."""
    memory = np.zeros(4 * elements + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + 4 * elements].view(np.float32)


def brought(elements: int, rank: int, shift: int = 0) -> np.ndarray:
    """What `rank` brings: small integers that differ by place and by rank."""
    places = np.arange(shift, shift + elements, dtype=np.int64)
    found = zeros(elements)
    found[:] = places % PERIOD + rank
    return found


def total(elements: int, size: int, shift: int = 0) -> np.ndarray:
    """The sum of what all ranks bring."""
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
