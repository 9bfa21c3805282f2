"""The operations of tfdist, built from Horovod's.

Functions and arguments have the names of the operations that tfdist's own library
registers, so that `collectives.tf_ops.emit` can call either. Operations that Horovod
lacks are built from others: a gather is an alltoall in which all rows go to the root,
and a scatter is an alltoall in which all rows come from the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import tensorflow as tf

from tfdist.collectives.engines.horovod import _types, _waits
from tfdist.collectives.engines.horovod._call import Call
from tfdist.collectives.engines.horovod._counts import Counts
from tfdist.collectives.engines.horovod._forms import (
    check_equal_parts,
    divide,
    even_splits,
    is_default,
    make_unfoldable,
    rows_of,
    times,
)
from tfdist.collectives.engines.horovod._sets import Sets
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core import engines, runtime
from tfdist.core.native import Topology


class _Gathered:
    """Rows and, on request, the number of rows received from each rank."""

    def __init__(self, rows: tf.Tensor, splits: Callable[[], tf.Tensor]) -> None:
        self.rows = rows
        self._splits = splits

    @property
    def splits(self) -> tf.Tensor:
        return self._splits()


class Operations:
    """The operations, which are added to the traced function or run eagerly.

    Args:
        sets: process sets, which the engine adds and removes.
    """

    def __init__(self, sets: Sets) -> None:
        self.sets = sets
        self._horovod: ModuleType | None = None
        self._topology: Topology | None = None
        self.counts = Counts()

    # ---- start and end ----

    def start(self, horovod: ModuleType, topology: Topology) -> None:
        """Allows operations to be called, after Horovod has started."""
        self._horovod, self._topology = horovod, topology
        self.counts.reset()  # a failed world leaves unfinished operations

    def end(self) -> None:
        """Makes later operations raise an error, because Horovod has stopped."""
        self._topology = None

    # ---- the operations ----

    def tfdist_topology(self) -> tf.Tensor:
        """Returns rank, size, local rank, local size, cross rank, cross size; int32."""
        hvd, place = self.running()
        cross = [tf.constant(place.cross_rank), tf.constant(place.cross_size)]
        local = [hvd.local_rank_op(), hvd.local_size_op()]
        return tf.stack([hvd.rank_op(), hvd.size_op(), *local, *cross])

    def tfdist_allreduce(self, **arguments: Any) -> list[tf.Tensor]:
        """Reduces tensors of one dtype."""
        call = self._call("TfdistAllreduce", arguments)
        return call.run(
            arguments["tensors"], lambda *tensors: self._reduce(call, tensors)
        )

    def tfdist_reduce(self, **arguments: Any) -> list[tf.Tensor]:
        """Reduces tensors to the root; other ranks keep their own."""
        call = self._call("TfdistReduce", arguments)

        def forward(*tensors: tf.Tensor) -> list[tf.Tensor]:
            hvd, _ = self.running()
            is_root = tf.equal(hvd.rank_op(), call.root())
            reduced = self._reduce(call, tensors)
            return [
                tf.where(is_root, ours, own)
                for ours, own in zip(reduced, tensors, strict=True)
            ]

        return call.run(arguments["tensors"], forward)

    def tfdist_broadcast(self, **arguments: Any) -> list[tf.Tensor]:
        """Sends the root's tensors, all of one dtype, in one operation."""
        call = self._call("TfdistBroadcast", arguments)

        def forward(*tensors: tf.Tensor) -> list[tf.Tensor]:
            hvd, _ = self.running()
            shapes = [tf.shape(t, out_type=tf.int64) for t in tensors]
            flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
            (merged,) = self._move(
                flat,
                lambda sent: [hvd.broadcast(sent, call.root(), **call.options())],
            )
            sizes = [tf.reduce_prod(shape) for shape in shapes]
            parts = tf.split(merged, tf.stack(sizes), num=len(tensors))
            found = []
            for part, shape, own in zip(parts, shapes, tensors, strict=True):
                shaped = tf.reshape(part, shape)
                shaped.set_shape(own.shape)
                found.append(shaped)
            return found

        return call.run(arguments["tensors"], forward)

    def tfdist_allgather(self, **arguments: Any) -> Any:
        """Concatenates the rows of all ranks."""
        call = self._call("TfdistAllgather", arguments)

        def forward(tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            return self._move(
                rows_of(tensors),
                lambda sent: [self._hvd.allgather(sent, **call.options())],
            )

        def splits() -> tf.Tensor:
            own = tf.shape(rows_of(arguments["tensor"]), out_type=tf.int64)[:1]
            number = arguments["process_set"]
            name = operation_name(
                "splits", f"{arguments['tensor_name']}.splits", process_set=number
            )
            lengths = self.tfdist_allgather(
                tensor=own, tensor_name=name, timeout_s=0.0, process_set=number
            )
            return lengths.rows

        (rows,) = call.run(
            [arguments["tensor"]], forward, lambda found: (*found, splits())
        )
        return _Gathered(rows, splits)

    def tfdist_gather(self, **arguments: Any) -> Any:
        """Concatenates the rows of all ranks on the root."""
        call = self._call("TfdistGather", arguments)
        received_splits: list[tf.Tensor] = []

        def forward(tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            value = rows_of(tensors)
            own = tf.shape(value)[0]
            to_root = tf.one_hot(call.place_of_root(), call.size(), dtype=tf.int32)
            rows, received = self._exchange_rows(call, value, own * to_root)
            received_splits[:] = [received]
            return [rows]

        (rows,) = call.run(
            [arguments["tensor"]], forward, lambda found: (*found, *received_splits)
        )
        return _Gathered(rows, lambda: received_splits[0])

    def tfdist_scatter(self, **arguments: Any) -> tf.Tensor:
        """Sends each rank its part of the root's rows."""
        call = self._call("TfdistScatter", arguments)
        splits = arguments["splits"]

        def forward(tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            value = rows_of(tensors)
            is_root = tf.equal(self._hvd.rank_op(), call.root())
            parts = splits
            if is_default(splits):
                parts = even_splits(tf.shape(value)[0], call.size())
            nothing = tf.zeros([call.size()], tf.int32)
            sent = tf.cond(is_root, lambda: tf.cast(parts, tf.int32), lambda: nothing)
            own_rows = tf.cond(is_root, lambda: value, lambda: value[:0])
            own_rows.set_shape([None, *value.shape[1:]])
            rows, _ = self._exchange_rows(call, own_rows, sent)
            return [rows]

        return call.run([arguments["tensor"]], forward)[0]

    def tfdist_alltoall(self, **arguments: Any) -> Any:
        """Sends a part of the rows to each rank."""
        call = self._call("TfdistAlltoall", arguments)
        splits = arguments["splits"]
        received_splits: list[tf.Tensor] = []

        def forward(tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            value = rows_of(tensors)
            parts = splits
            if is_default(splits):
                rows, size = tf.shape(value)[0], call.size()
                with tf.control_dependencies([check_equal_parts(rows, size)]):
                    parts = tf.fill([size], rows // size)
            rows, received = self._exchange_rows(call, value, tf.cast(parts, tf.int32))
            received_splits[:] = [received]
            return rows, received

        rows, received = call.run(
            [arguments["tensor"]], forward, lambda found: (found[0], *received_splits)
        )
        return SimpleNamespace(rows=rows, received_splits=received)

    def tfdist_reduce_scatter(self, **arguments: Any) -> Any:
        """Reduces a tensor; each rank gets its part of the rows."""
        call = self._call("TfdistReduceScatter", arguments)
        splits = arguments["splits"]
        op = ReduceOp(arguments["reduce_op"])

        def parts_of(value: tf.Tensor) -> tf.Tensor:
            if not is_default(splits):
                return tf.cast(splits, tf.int64)
            return tf.cast(even_splits(tf.shape(value)[0], call.size()), tf.int64)

        def forward(tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            value = rows_of(tensors)
            sums = op in (ReduceOp.SUM, ReduceOp.AVERAGE)
            if is_default(splits) and sums and value.dtype in _types.SCATTERED:
                return self._reduce(call, [value], self._horovod_reducescatter)
            (merged,) = self._reduce(call, [value])
            parts, own = parts_of(value), call.place()
            fits = tf.debugging.assert_equal(
                tf.reduce_sum(parts),
                tf.shape(value, out_type=tf.int64)[0],
                "Expected splits that sum to the number of rows.",
            )
            with tf.control_dependencies([fits] if fits is not None else []):
                start = tf.reduce_sum(parts[:own])
                return [merged[start : start + parts[own]]]

        (rows,) = call.run(
            [arguments["tensor"]],
            forward,
            lambda found: (*found, parts_of(rows_of(arguments["tensor"]))),
        )
        return SimpleNamespace(rows=rows)

    def tfdist_barrier(self, **arguments: Any) -> None:
        """Waits for all ranks with the barrier of the core."""
        call = self._call("TfdistBarrier", arguments, waits=False)
        number, name = arguments["process_set"], arguments["tensor_name"]
        timeout_s = arguments["timeout_s"]
        call.check()

        def wait() -> bool:
            _waits.for_all(name, number, timeout_s)
            return True

        if tf.executing_eagerly():
            wait()
        else:
            tf.py_function(wait, [], tf.bool)  # stateful, so that program order is kept

    def tfdist_send(self, **_arguments: Any) -> tf.Tensor:
        """Raises UnsupportedError: Horovod has no operation to build a send from."""
        engines.raise_unsupported("horovod", "tfdist.send")

    def tfdist_recv(self, **_arguments: Any) -> tf.Tensor:
        """Raises UnsupportedError: Horovod has no operation to build a receive from."""
        engines.raise_unsupported("horovod", "tfdist.recv")

    # ---- building blocks ----

    def running(self) -> tuple[ModuleType, Topology]:
        if self._horovod is None or self._topology is None:
            runtime.check_initialized()
            raise RuntimeError("tfdist is initialized, but the engine is not running")
        return self._horovod, self._topology

    @property
    def _hvd(self) -> ModuleType:
        return self.running()[0]

    def _call(self, kind: str, arguments: Any, *, waits: bool = True) -> Call:
        self.running()
        return Call(self, kind, arguments, waits=waits)

    def _reduce(
        self,
        call: Call,
        tensors: Sequence[tf.Tensor],
        reduce: Callable[..., Sequence[tf.Tensor]] | None = None,
    ) -> list[tf.Tensor]:
        """Reduces tensors of one dtype; applies the factors and the average."""
        dtype, op = tensors[0].dtype, ReduceOp(call.arguments["reduce_op"])
        way = _types.way_of(dtype, op)
        if way is None:
            raise TypeError(_types.refusal(dtype, op))
        if way.truth:
            sent = [tf.cast(tf.cast(t, tf.bool), tf.uint8) for t in tensors]
        else:
            factor = float(call.arguments["prescale"])
            sent = [times(t, factor) for t in tensors]
        number = getattr(self._hvd, way.op)
        found = (reduce or self._horovod_allreduce)(make_unfoldable(sent), number, call)
        if way.truth:
            return [tf.cast(tf.cast(t & 1, tf.bool), dtype) for t in found]
        if way.divides:
            size = call.size()
            found = [divide(t, size) for t in found]
        return [times(t, float(call.arguments["postscale"])) for t in found]

    def _horovod_allreduce(
        self, sent: Sequence[tf.Tensor], number: int, call: Call
    ) -> Sequence[tf.Tensor]:
        if len(sent) == 1:
            one = self._hvd._allreduce(sent[0], op=number, **call.options())
            return [one]
        many = self._hvd._grouped_allreduce(list(sent), op=number, **call.options())
        return list(many)

    def _horovod_reducescatter(
        self, sent: Sequence[tf.Tensor], number: int, call: Call
    ) -> Sequence[tf.Tensor]:
        return [self._hvd._reducescatter(sent[0], op=number, **call.options())]

    def _exchange_rows(
        self, call: Call, value: tf.Tensor, splits: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, received = self._move(
            value,
            lambda sent: self._hvd.alltoall(sent, splits=splits, **call.options()),
        )
        return rows, tf.cast(received, tf.int64)

    def _move(
        self,
        value: tf.Tensor,
        send: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    ) -> Sequence[tf.Tensor]:
        """Sends rows with `send`; as bytes if Horovod does not support their dtype."""
        (unfoldable,) = make_unfoldable([value])
        if value.dtype in _types.MOVED:
            return list(send(unfoldable))
        first, *rest = send(tf.bitcast(unfoldable, tf.uint8))
        return [tf.bitcast(first, value.dtype), *rest]
