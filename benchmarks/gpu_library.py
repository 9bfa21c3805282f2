"""Builds libtfdist_cuda.so with nvcc and wraps it for Python, without TensorFlow."""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tfdist_ops"
LIBRARY = ROOT / "build" / "gpu" / "libtfdist_cuda.so"
BUILD_TIMEOUT_S = 600
INVALID_ARGUMENT = 3
TIME_PACK, TIME_UNPACK, TIME_MEMCPY = 0, 1, 2


class DType(NamedTuple):
    """Number of a type in base/dtype.h, and how NumPy holds it."""

    number: int
    storage: str


DTYPES = {
    "float32": DType(1, "float32"),
    "float16": DType(19, "float16"),
    "bfloat16": DType(14, "uint16"),
    "float64": DType(2, "float64"),
    "int32": DType(3, "int32"),
    "int64": DType(9, "int64"),
}


class CudaError(RuntimeError):
    """A call of the library failed; `code` is that of base/status.h."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Tensor(ctypes.Structure):
    """tfdist_cuda_tensor: device address, elements, offset in the buffer."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class Batch(ctypes.Structure):
    """tfdist_cuda_batch: tensors, their place, types and scale."""

    _fields_ = (
        ("tensors", ctypes.POINTER(Tensor)),
        ("count", ctypes.c_int64),
        ("tensor_dtype", ctypes.c_int32),
        ("buffer_dtype", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("buffer_elements", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )

    @classmethod
    def of(
        cls,
        tensors: Any,
        pair: tuple[str, str],
        buffer: int,
        buffer_elements: int,
        scale: float,
    ) -> Self:
        """A batch of a ctypes array of tensors; `pair` names tensor and buffer type."""
        numbers = [DTYPES[name].number for name in pair]
        batch = cls(tensors, len(tensors), *numbers, buffer, buffer_elements, scale)
        batch.keep_alive = tensors
        return batch


class Library:
    """The functions of tfdist_ops/cuda/pack_kernels.h; errors become CudaError."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.tfdist_cuda_last_error.restype = ctypes.c_char_p
        self._lib.tfdist_cuda_device_json.restype = ctypes.c_char_p
        self._lib.tfdist_cuda_alloc.restype = ctypes.c_void_p
        self._lib.tfdist_cuda_alloc.argtypes = [ctypes.c_int64]
        self._lib.tfdist_cuda_free.argtypes = [ctypes.c_void_p]
        self._lib.tfdist_cuda_free.restype = None
        copy = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._lib.tfdist_cuda_copy.argtypes = copy

    def _error(self) -> str:
        return self._lib.tfdist_cuda_last_error().decode()

    def _check(self, code: int) -> None:
        if code != 0:
            raise CudaError(code, self._error())

    def device_count(self) -> tuple[int, str]:
        """Usable devices, and why there are none."""
        count = self._lib.tfdist_cuda_device_count()
        return count, "" if count else self._error()

    def device(self) -> dict[str, Any]:
        """Name, compute capability, memory and versions of the current device."""
        text = self._lib.tfdist_cuda_device_json()
        if text is None:
            raise CudaError(-1, self._error())
        return json.loads(text)

    @contextlib.contextmanager
    def memory(self, content: np.ndarray) -> Iterator[int]:
        """Device memory that holds the bytes of `content`; yields its address."""
        address = self._lib.tfdist_cuda_alloc(content.nbytes)
        if not address:
            raise CudaError(-1, self._error())
        try:
            self.upload(address, content)
            yield address
        finally:
            self._lib.tfdist_cuda_free(address)

    def upload(self, address: int, content: np.ndarray) -> None:
        """Copies the bytes of `content` to the device."""
        self._check(
            self._lib.tfdist_cuda_copy(address, content.ctypes.data, content.nbytes)
        )

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        """As many bytes as `like` has, from the device; waits for its work."""
        result = np.empty_like(like)
        self._check(
            self._lib.tfdist_cuda_copy(result.ctypes.data, address, result.nbytes)
        )
        return result

    def pack(self, batch: Batch) -> None:
        """Tensors to buffer, in the default stream."""
        self._check(self._lib.tfdist_cuda_pack(ctypes.byref(batch), None))

    def unpack(self, batch: Batch) -> None:
        """Buffer to tensors, in the default stream."""
        self._check(self._lib.tfdist_cuda_unpack(ctypes.byref(batch), None))

    def time(self, what: int, batch: Batch, runs: int) -> np.ndarray:
        """Device times of `runs` runs, in milliseconds."""
        times_ms = (ctypes.c_float * runs)()
        self._check(
            self._lib.tfdist_cuda_time(what, ctypes.byref(batch), runs, times_ms)
        )
        return np.array(times_ms)


def find_nvcc() -> str | None:
    """Path of nvcc: $NVCC, the PATH, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda."""
    homes = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        "/usr/local/cuda",
    ]
    candidates = [os.environ.get("NVCC"), "nvcc"]
    candidates += [f"{home}/bin/nvcc" for home in homes if home]
    found = (shutil.which(candidate) for candidate in candidates if candidate)
    return next((path for path in found if path), None)


def build(nvcc: str) -> Path:
    """Compiles the library if a source is newer; returns its path.

    Raises:
        RuntimeError: nvcc failed; the message holds what it said.
    """
    units = [
        SOURCES / name
        for name in ("cuda/pack_kernels.cu", "base/dtype.cc", "base/status.cc")
    ]
    headers = [*SOURCES.glob("cuda/*.h"), *SOURCES.glob("base/*.h")]
    newest = max(path.stat().st_mtime for path in [*units, *headers])
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= newest:
        return LIBRARY
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(nvcc, "-O3", "-std=c++17", "-shared", f"-I{SOURCES}", "-arch=all-major"),
        # A static runtime: without CUDA, the library loads and reports what is missing.
        *("-cudart", "static", "-Werror", "all-warnings"),
        *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
        *("-o", str(LIBRARY), *map(str, units)),
    ]
    print(f"building {LIBRARY.relative_to(ROOT)} with {nvcc}", flush=True)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")
    return LIBRARY


def load() -> tuple[Library | None, str]:
    """The library on a machine that can run it; else None and the reason."""
    nvcc = find_nvcc()
    if nvcc is None:
        places = "$NVCC, PATH, $CUDA_HOME, $CUDA_PATH, /usr/local/cuda"
        return None, f"no nvcc found ({places})"
    library = Library(build(nvcc))
    count, reason = library.device_count()
    if count == 0:
        return None, f"no CUDA device ({reason}); the kernels were compiled"
    return library, ""
