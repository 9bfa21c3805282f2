"""A rank without TensorFlow: collectives through the core's C interface.

Starts in a tenth of a second, so that faults can be tried by the hundred. As a
program it is one rank of a job: `python -m helpers.core_client ACTION [NUMBER...]`,
started by tfdistrun or mpirun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.core import native, runtime, world

SUM, AVERAGE, MIN, MAX = range(4)
# TensorFlow's numbers of the types.
DTYPES = {np.float32: 1, np.float64: 2, np.int32: 3, np.int64: 9, np.float16: 19}


@dataclass
class Pending:
    """An operation that was handed over. Keeps its buffers alive."""

    request: native.Request
    outputs: list[np.ndarray]
    keep: list[Any]
    ended: threading.Event = field(default_factory=threading.Event)
    error: native.CoreError | None = None
    done_count: int = 0

    def wait(self, timeout_s: float = 60.0) -> list[np.ndarray]:
        """Waits for the end; returns the results or raises CoreError."""
        if not self.ended.wait(timeout_s):
            raise TimeoutError(f"`done` of {self.request.name!r} never came")
        if self.error is not None:
            raise self.error
        return self.outputs


def submit(
    inputs: list[np.ndarray],
    *,
    name: str,
    kind: int = native.ALLREDUCE,
    op: int = SUM,
    root: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    timeout_s: float = 0.0,
    group: str | None = None,
    bucket: int = 0,
    bucket_count: int = 1,
    in_place: bool = False,
) -> Pending:
    """Hands over an allreduce, broadcast or barrier; see c_api.h."""
    inputs = [np.ascontiguousarray(x) for x in inputs]
    outputs = inputs if in_place else [np.empty_like(x) for x in inputs]
    dims = [(ctypes.c_int64 * max(1, x.ndim))(*x.shape) for x in inputs]
    tensors = (native.Tensor * max(1, len(inputs)))()
    for i, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
        tensors[i] = native.Tensor(
            input=x.ctypes.data,
            output=y.ctypes.data,
            rank=x.ndim,
            dims=dims[i],
            hint=i,
        )
    request = native.Request(
        kind=kind,
        name=name.encode(),
        dtype=DTYPES[inputs[0].dtype.type] if inputs else 1,
        op=op,
        root=root,
        prescale=prescale,
        postscale=postscale,
        timeout_s=timeout_s,
        group=group.encode() if group else None,
        bucket=bucket,
        bucket_count=bucket_count,
        tensors=tensors,
        tensor_count=len(inputs),
    )
    pending = Pending(request, outputs, [inputs, dims, tensors])

    def done(context: int | None, status: Any) -> None:
        del context
        found = status.contents
        pending.done_count += 1
        if found.code != 0:
            pending.error = native.to_core_error(found)
        pending.ended.set()

    request.done = native.DoneCallback(done)
    native.check(native.library().tfdist_submit(ctypes.byref(request), None))
    return pending


def allreduce(x: np.ndarray, *, name: str, op: int = SUM, **more: Any) -> np.ndarray:
    """Reduces one array over all ranks and waits for the result."""
    return submit([x], name=name, op=op, **more).wait()[0]


def barrier(name: str = "barrier") -> None:
    """Waits until all ranks are here."""
    submit([], name=name, kind=native.BARRIER).wait()


def meet() -> None:
    """A barrier of ranks that fail right after it; one may before others have left."""
    with contextlib.suppress(native.CoreError):
        barrier()


@contextlib.contextmanager
def hiding(on: bool) -> Iterator[None]:
    """Hides the loss of a rank, or does not, and counts anew; off afterwards."""
    native.hide_failures(on)
    native.take_hidden()
    try:
        yield
    finally:
        native.hide_failures(False)


# ---- as a program ----


def steps(count: int, *, pause_s: float = 0.01) -> None:
    """Training, as far as the core can tell: sums of changing arrays, checked."""
    rank, size = runtime.rank(), runtime.size()
    for step in range(count):
        x = np.arange(1000, dtype=np.float32) % 17 + rank + step % 5
        total = allreduce(x, name="gradients")
        base = np.arange(1000, dtype=np.float32) % 17 + step % 5
        expected = size * base + size * (size - 1) // 2
        if not np.array_equal(total, expected):
            raise ValueError(f"step {step}: wrong sum")
        time.sleep(pause_s)


def _fault(action: str, victim: int) -> None:
    """What goes wrong on one rank in the middle of its steps."""
    if runtime.rank() != victim:
        steps(10_000)
        return
    steps(5)
    if action == "kill":
        time.sleep(0.5)  # the others have begun their next step, and wait in it
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ValueError("the user's own mistake")
    elif action == "exit":
        sys.exit(9)


def main(action: str, *numbers: str) -> None:
    """One rank of a job."""
    before = time.monotonic()
    world.start()
    print(f"init took {(time.monotonic() - before) * 1e3:.0f} ms", flush=True)
    if action == "steps":
        steps(int(numbers[0]), pause_s=0.0)
        print(f"rank {runtime.rank()} of {runtime.size()}: all sums are right")
    elif action == "again":
        for _ in range(int(numbers[0])):
            world.shutdown()
            world.start()
            steps(3, pause_s=0.0)
        print("again and again")
    elif action == "wait":
        steps(int(numbers[0]) * 100)
    else:
        _fault(action, int(numbers[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
