"""Calls of the core's collectives, submitted and awaited by a single thread."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tfdist.core import native
from tfdist.tools.bench.operations import DType, Operation, Place

_SUM, _MAX = 0, 3


class Call:
    """An operation on given arrays, which can be run repeatedly.

    As in training, a measured allreduce is a bucket of a gradient list; here, the list
    has only one bucket. From the second run on, the allreduce therefore starts without
    messages between the ranks. All ranks must make the same calls in the same order.
    """

    def __init__(
        self,
        operation: Operation | int,
        dtype: DType | int,
        input_array: np.ndarray | None,
        output_array: np.ndarray | None,
        *,
        name: str,
        algorithm: str = "",
        op: int = _SUM,
        root: int = 0,
        peer: int = -1,
    ) -> None:
        kind = operation if isinstance(operation, int) else operation.kind
        self._input, self._output = input_array, output_array
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
        if input_array is not None or output_array is not None:
            self._add_tensor(request)
        if not isinstance(operation, int) and kind == native.ALLREDUCE:
            count = 0 if input_array is None else len(input_array)
            list_id, _ = native.register_gradient_list(
                f"{name} [{count}]\nbench", [True]
            )
            request.group, request.bucket, request.bucket_count = list_id.encode(), 0, 1
        request.done = native.DoneCallback(self._done)
        if not isinstance(operation, int) and operation.rows:
            request.allocate = native.AllocateCallback(self._allocate)
        self._request = request

    def _add_tensor(self, request: native.Request) -> None:
        array = self._input if self._input is not None else self._output
        if array is None:
            return
        self._dims = (ctypes.c_int64 * 1)(len(array))
        self._tensor = native.Tensor(rank=1, dims=self._dims)
        if self._input is not None:
            self._tensor.input = self._input.ctypes.data
        if self._output is not None:
            self._tensor.output = self._output.ctypes.data
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
        if output_rows == 0 or self._output is None:
            return ctypes.addressof(self._dims)  # for 0 bytes any address is valid
        return int(self._output.ctypes.data) if len(self._output) == output_rows else 0

    def run(self) -> None:
        """Runs the operation once and waits until it has finished.

        Raises:
            CoreError: the operation failed.
        """
        native.check(native.library().tfdist_run(ctypes.byref(self._request)))
        if self._error is not None:
            raise self._error


class Agreement:
    """Object that reduces numbers over all ranks."""

    def __init__(self, place: Place) -> None:
        self._size = place.size
        self._barrier = Call(native.BARRIER, 1, None, None, name="bench barrier")

    def _allreduce(self, numbers: np.ndarray, op: int) -> np.ndarray:
        input_array = np.ascontiguousarray(numbers, np.float64)
        output_array = np.empty_like(input_array)
        name = "bench agreement"
        Call(native.ALLREDUCE, 2, input_array, output_array, name=name, op=op).run()
        return output_array

    def largest(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the elementwise maximum over all ranks."""
        return self._allreduce(numbers, _MAX)

    def total(self, number: float) -> float:
        """Returns the sum over all ranks."""
        return float(self._allreduce(np.array([number]), _SUM)[0])

    def mean(self, number: float) -> float:
        """Returns the mean over all ranks."""
        return self.total(number) / self._size

    def meet(self) -> None:
        """Waits for all ranks."""
        self._barrier.run()
