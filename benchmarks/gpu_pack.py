"""Checks and measures the CUDA pack kernels (`make gpu`); TensorFlow is not needed.

    python benchmarks/gpu_pack.py [--json report.json] [--runs 50] [--check-only]

Builds `libtfdist_cuda.so` with nvcc where there is one, calls it through ctypes,
compares every pair of types bitwise with NumPy (and with PyTorch where it sees the
GPU), then prints bandwidths beside that of a device-to-device copy, and the time that
PyTorch takes to pack the same tensors. Without nvcc or without a GPU it says what it
skipped, and exits with 0.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

try:
    import numpy as np
except ImportError:
    sys.exit("Expected NumPy for this Python. Run: make setup, or pip install numpy")

try:
    import ml_dtypes  # for bfloat16; without it, `from_float32` rounds
except ImportError:
    ml_dtypes = None

import gpu_library
import gpu_torch
from gpu_library import DTYPES, Batch, CudaError, Library, Tensor

# Pairs (type of the tensors, type of the buffer) that have a kernel.
PAIRS = [(name, name) for name in DTYPES] + [
    *itertools.permutations(("float32", "float16", "bfloat16"), 2)
]
GAP = 0xA5  # what the memory between tensors holds, before and after


def to_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values as float32, exactly; bfloat16 is held as uint16."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values rounded once to `dtype`, to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            return values.astype(DTYPES[dtype].storage)
        if ml_dtypes is not None:
            return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def expected(values: np.ndarray, source: str, target: str, scale: float) -> np.ndarray:
    """The result that the kernels promise for `cast(values * scale)`."""
    if source == target and scale == 1:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if source == "float64":
            return values * scale
        scaled = to_float32(values, source) * np.float32(scale)
    return from_float32(scaled, target)


def same(a: np.ndarray, b: np.ndarray, dtype: str, *, copied: bool) -> bool:
    """Bitwise equality; after a conversion any NaN equals any NaN."""
    bits = f"u{a.itemsize}"
    equal = a.view(bits) == b.view(bits)
    if not copied and not dtype.startswith("int"):
        widen = (
            (lambda x: to_float32(x, dtype)) if dtype != "float64" else (lambda x: x)
        )
        equal |= np.isnan(widen(a)) & np.isnan(widen(b))
    return bool(np.all(equal))


def sample(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Random bits of `dtype`: infinities, NaNs, subnormals and both zeros included."""
    storage = np.dtype(DTYPES[dtype].storage)
    return rng.integers(0, 256, count * storage.itemsize, np.uint8).view(storage)


class Layout:
    """Tensors of given sizes in one arena of memory, and their places in a buffer.

    Args:
        sizes: elements of each tensor.
        tensor_dtype: type of the tensors.
        shift: elements by which every tensor and place is off a 16-byte boundary.
    """

    def __init__(self, sizes: list[int], tensor_dtype: str, *, shift: int) -> None:
        itemsize = np.dtype(DTYPES[tensor_dtype].storage).itemsize
        self.sizes = sizes
        self.offsets: list[int] = []  # in the buffer, elements
        self.starts: list[int] = []  # in the arena, bytes
        offset = start = 0
        for size in sizes:
            self.offsets.append(offset + shift)
            self.starts.append(start + shift * itemsize)
            room = -(-(size + shift) // 16) * 16 + 16  # a gap after each
            offset += room
            start += room * itemsize
        self.buffer_elements, self.arena_bytes = max(offset, 16), max(start, 16)

    def tensors(self, arena: int) -> Any:
        """The ctypes array of tensors, for an arena at device address `arena`."""
        rows = zip(self.starts, self.sizes, self.offsets, strict=True)
        return (Tensor * len(self.sizes))(
            *(Tensor(arena + s, n, o) for s, n, o in rows)
        )


def check_case(
    library: Library, layout: Layout, pair: tuple[str, str], scale: float
) -> str | None:
    """Packs and unpacks one layout; what is wrong with it, or None."""
    tensor_dtype, buffer_dtype = pair
    tensor_type = np.dtype(DTYPES[tensor_dtype].storage)
    buffer_type = np.dtype(DTYPES[buffer_dtype].storage)
    rng = np.random.default_rng(len(layout.sizes))
    arena = np.full(layout.arena_bytes, GAP, np.uint8)
    buffer = np.full(layout.buffer_elements * buffer_type.itemsize, GAP, np.uint8)
    packed, source = buffer.copy(), buffer.view(buffer_type).copy()
    unpacked = arena.copy()
    for start, size, offset in zip(
        layout.starts, layout.sizes, layout.offsets, strict=True
    ):
        values = sample(rng, size, tensor_dtype)
        place = slice(start, start + size * tensor_type.itemsize)
        arena[place] = values.view(np.uint8)
        packed.view(buffer_type)[offset : offset + size] = expected(
            values, tensor_dtype, buffer_dtype, scale
        )
        values = sample(rng, size, buffer_dtype)
        source[offset : offset + size] = values
        unpacked[place] = expected(values, buffer_dtype, tensor_dtype, scale).view(
            np.uint8
        )
    copied = tensor_dtype == buffer_dtype and scale == 1
    with library.memory(arena) as arena_at, library.memory(buffer) as buffer_at:
        batch = Batch.of(
            layout.tensors(arena_at), pair, buffer_at, layout.buffer_elements, scale
        )
        library.pack(batch)
        result = library.download(buffer_at, packed).view(buffer_type)
        if not same(result, packed.view(buffer_type), buffer_dtype, copied=copied):
            return "pack differs from NumPy"
        library.upload(buffer_at, source)
        library.unpack(batch)
        result = library.download(arena_at, unpacked).view(tensor_type)
        if not same(result, unpacked.view(tensor_type), tensor_dtype, copied=copied):
            return "unpack differs from NumPy"
    return None


def check_all(library: Library) -> tuple[int, list[str]]:
    """Checks all combinations; returns the number of cases, and what failed."""
    lists = [
        [0, 1, 2, 3, 7, 8, 9, 0, 255, 256, 4095, 4096, 4097, 8191, 8192, 8193],
        [1_000_003, 17],
        [(i * 37) % 300 for i in range(700)],  # more than fit into one launch
        [0],
    ]
    failed = []
    cases = list(itertools.product(PAIRS, (1.0, 0.25, 1 / 3), (0, 1), lists))
    run = 0
    for pair, scale, shift, sizes in cases:
        if pair[0].startswith("int") and scale != 1:
            continue
        run += 1
        wrong = check_case(library, Layout(sizes, pair[0], shift=shift), pair, scale)
        if wrong:
            failed.append(
                f"{len(sizes)} {pair[0]} tensors, {pair[1]} buffer, "
                f"scale {scale:.3g}, shift {shift}: {wrong}"
            )
    return run, failed


def check_refusals(library: Library) -> list[str]:
    """Checks that bad batches raise an error instead of running."""
    layout = Layout([16], "float32", shift=0)
    wrong = []
    bad = {
        "int32 with scale 0.5": (("int32", "int32"), layout.buffer_elements, 0.5),
        "int32 to float32": (("int32", "float32"), layout.buffer_elements, 1.0),
        "a buffer too small": (("float32", "float32"), 8, 1.0),
    }
    for name, (pair, elements, scale) in bad.items():
        batch = Batch.of(layout.tensors(256), pair, 256, elements, scale)
        try:
            library.pack(batch)
        except CudaError as error:
            if error.code != gpu_library.INVALID_ARGUMENT:
                wrong.append(f"{name}: expected invalid argument, got {error}")
        else:
            wrong.append(f"{name}: accepted")
    return wrong


# name → sizes in elements
MEASURED = {
    "1 tensor": [16 << 20],
    "like ResNet-50": [
        *(9408, 64, 64, 2048 * 1000, 1000),
        *[64 * 64, 64 * 64 * 9, 64 * 256] * 3,
        *[256 * 128, 128 * 128 * 9, 128 * 512] * 4,
        *[512 * 256, 256 * 256 * 9, 256 * 1024] * 6,
        *[1024 * 512, 512 * 512 * 9, 512 * 2048] * 3,
        *[256, 512, 1024, 2048] * 26,
    ],
    "1000 of 4 KiB": [1024] * 1000,
}
MEASURED_PAIRS = [
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
]


def measure(library: Library, runs: int) -> list[dict[str, Any]]:
    """Bandwidths of pack, unpack, a plain copy and PyTorch's pack.

    In GB/s: bytes read plus bytes written.
    """
    rows = []
    for (name, sizes), pair in itertools.product(MEASURED.items(), MEASURED_PAIRS):
        layout = Layout(sizes, pair[0], shift=0)
        itemsizes = [np.dtype(DTYPES[dtype].storage).itemsize for dtype in pair]
        moved = sum(sizes) * sum(itemsizes)
        arena = np.zeros(max(layout.arena_bytes, moved // 2), np.uint8)
        buffer = np.zeros(
            max(layout.buffer_elements * itemsizes[1], moved // 2), np.uint8
        )
        with library.memory(arena) as arena_at, library.memory(buffer) as buffer_at:
            batch = Batch.of(
                layout.tensors(arena_at), pair, buffer_at, layout.buffer_elements, 0.5
            )
            copy = Batch.of(
                (Tensor * 1)(Tensor(arena_at, moved // 2 // itemsizes[0], 0)),
                (pair[0], pair[0]),
                buffer_at,
                moved // 2 // itemsizes[0],
                1.0,
            )
            times = {
                "pack": library.time(gpu_library.TIME_PACK, batch, runs),
                "unpack": library.time(gpu_library.TIME_UNPACK, batch, runs),
                "copy": library.time(gpu_library.TIME_MEMCPY, copy, runs),
            }
        in_torch = gpu_torch.pack_times(sizes, pair, runs)
        if in_torch is not None:
            times["torch"] = in_torch
        row: dict[str, Any] = {
            "case": name,
            "tensors": len(sizes),
            "tensor_dtype": pair[0],
            "buffer_dtype": pair[1],
            "bytes_moved": moved,
        }
        for what, ms in times.items():
            low, median, high = np.percentile(ms, [10, 50, 90])
            row[f"{what}_us"] = round(float(median) * 1e3, 2)
            row[f"{what}_us_p10_p90"] = [round(float(x) * 1e3, 2) for x in (low, high)]
            row[f"{what}_gb_s"] = round(moved / float(median) / 1e6, 1)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """The measured rows, nccl-tests style: one line each, units in the head."""
    print(
        f"{'case':16}{'tensors':>8} {'tensor':>9} {'buffer':>9}{'MiB moved':>11}"
        f"{'pack GB/s':>11}{'unpack GB/s':>13}{'copy GB/s':>11}{'pack us':>10}"
        f"{'PyTorch us':>12}"
    )
    for row in rows:
        print(
            f"{row['case']:16}{row['tensors']:>8} {row['tensor_dtype']:>9} "
            f"{row['buffer_dtype']:>9}{row['bytes_moved'] / 2**20:>11.1f}"
            f"{row['pack_gb_s']:>11.0f}{row['unpack_gb_s']:>13.0f}"
            f"{row['copy_gb_s']:>11.0f}{row['pack_us']:>10.1f}"
            f"{row.get('torch_us', float('nan')):>12.1f}"
        )


def main() -> int:
    """Builds, checks, measures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--runs", type=int, default=50, help="of a case (default 50)")
    parser.add_argument("--check-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    library, reason = gpu_library.load()
    if library is None:
        print(f"skipped: {reason}")
        return 0
    device = library.device()
    print(f"device: {device['name']}, compute capability {device['capability']}")
    count, failed = check_all(library)
    failed += check_refusals(library)
    torch_says = gpu_torch.check(library)
    print(f"checks: {count} cases against NumPy, {len(failed)} wrong")
    print(f"PyTorch: {torch_says}")
    print("".join(f"  WRONG {line}\n" for line in failed), end="")
    rows = [] if options.check_only else measure(library, options.runs)
    if rows:
        print_table(rows)
    if options.json:
        report = {"device": device, "cases": count, "wrong": failed, "rows": rows}
        options.json.write_text(json.dumps(report | {"pytorch": torch_says}, indent=1))
    return 1 if failed or "DIFFERENT" in torch_says else 0


if __name__ == "__main__":
    sys.exit(main())
