"""Collectives through the core, submitted and awaited by one thread."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tfdist.core import native
from tfdist.tools.bench.operations import DType, Operation, Place

_SUM, _MAX = 0, 3


class Call:
    """One operation that can be run again and again, on its own memory.

    An allreduce that is measured is a bucket of a gradient list of its own, as in
    training: from the second time on it starts without a word between the ranks. All
    ranks must make the same calls in the same order.
    """

    def __init__(
        self,
        operation: Operation | int,
        dtype: DType | int,
        given: np.ndarray | None,
        taken: np.ndarray | None,
        *,
        name: str,
        algorithm: str = "",
        op: int = _SUM,
        root: int = 0,
        peer: int = -1,
    ) -> None:
        kind = operation if isinstance(operation, int) else operation.kind
        self._given, self._taken = given, taken
        self._error: native.CoreError | None = None
        request = native.Request(
            kind=kind,
            name=name.encode(),
            dtype=dtype if isinstance(dtype, int) else dtype.number,
            op=op,
            root=root,
            peer=peer,
            prescale=1.0,
            postscale=1.0,
            algorithm=algorithm.encode(),
        )
        if given is not None or taken is not None:
            self._add_tensor(request)
        if not isinstance(operation, int) and kind == native.ALLREDUCE:
            count = 0 if given is None else len(given)
            list_id, _ = native.register_gradient_list(
                f"{name} [{count}]\nbench", [True]
            )
            request.group, request.bucket, request.bucket_count = list_id.encode(), 0, 1
        request.done = native.DoneCallback(self._done)
        if not isinstance(operation, int) and operation.rows:
            request.allocate = native.AllocateCallback(self._allocate)
        self._request = request

    def _add_tensor(self, request: native.Request) -> None:
        shaped = self._given if self._given is not None else self._taken
        if shaped is None:
            return
        self._dims = (ctypes.c_int64 * 1)(len(shaped))
        self._tensor = native.Tensor(rank=1, dims=self._dims)
        if self._given is not None:
            self._tensor.input = self._given.ctypes.data
        if self._taken is not None:
            self._tensor.output = self._taken.ctypes.data
        request.tensors = ctypes.pointer(self._tensor)
        request.tensor_count = 1

    def _done(self, context: int | None, status: Any) -> None:
        del context
        found = status.contents
        self._error = native.to_core_error(found) if found.code != 0 else None

    def _allocate(
        self, context: int | None, rows: Any, size: int, output_rows: int
    ) -> int:
        del context, rows, size
        if output_rows == 0 or self._taken is None:
            return ctypes.addressof(self._dims)  # any address will do for no bytes
        return int(self._taken.ctypes.data) if len(self._taken) == output_rows else 0

    def run(self) -> None:
        """Once, to its end.

        Raises:
            CoreError: it failed.
        """
        native.check(native.library().tfdist_run(ctypes.byref(self._request)))
        if self._error is not None:
            raise self._error


class Agreement:
    """Numbers that all ranks know alike."""

    def __init__(self, place: Place) -> None:
        self._size = place.size
        self._barrier = Call(native.BARRIER, 1, None, None, name="bench barrier")

    def _reduced(self, numbers: np.ndarray, op: int) -> np.ndarray:
        given = np.ascontiguousarray(numbers, np.float64)
        taken = np.empty_like(given)
        name = "bench agreement"
        Call(native.ALLREDUCE, 2, given, taken, name=name, op=op).run()
        return taken

    def largest(self, numbers: np.ndarray) -> np.ndarray:
        """Element by element, over all ranks."""
        return self._reduced(numbers, _MAX)

    def total(self, number: float) -> float:
        """Over all ranks."""
        return float(self._reduced(np.array([number]), _SUM)[0])

    def mean(self, number: float) -> float:
        """Over all ranks."""
        return self.total(number) / self._size

    def meet(self) -> None:
        """Waits for all ranks."""
        self._barrier.run()
