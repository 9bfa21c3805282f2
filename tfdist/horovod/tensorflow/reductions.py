"""allreduce, reducescatter and their grouped versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import id_of
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.sparse import reduce_rows
from tfdist.horovod.common.process_sets import global_process_set, own
from tfdist.horovod.common.reduce_ops import (
    Average,
    handle_average_backwards_compatibility,
)
from tfdist.horovod.tensorflow._arguments import (
    Scaled,
    invalid,
    reduce_op,
    scale_gradient,
    scaled,
    scoped,
)
from tfdist.horovod.tensorflow.compression import Compression, check_methods


@tf.autograph.experimental.do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over all ranks; results are bitwise identical on all ranks.

    Args:
        tensor: tensor, NumPy array, variable or `tf.IndexedSlices`. The rows of
            `tf.IndexedSlices` are gathered from all ranks, and rows with equal indices
            are added.
        average: deprecated; True: `op=Average`, False: `op=Sum`.
        device_dense: device for the operation on a dense tensor; default: TensorFlow's
            choice. The reduction itself runs on the CPU.
        device_sparse: device for the operations on `tf.IndexedSlices`.
        compression: `Compression.none` (default), `Compression.fp16` or a custom class.
            Not used for `tf.IndexedSlices`.
        op: `Average` (default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: factor applied before the reduction; integers are multiplied in
            float64 and truncated toward zero.
        postscale_factor: factor applied after the reduction.
        name: operation name; calls with the same name on different ranks are matched.
            Default: derived from the position of the call in the traced function.
        process_set: the ranks that take part; only these ranks call the function.
        ignore_name_scope: whether surrounding TensorFlow name scopes are omitted from
            `name`. Default names do not include them.

    Returns:
        Tensor like `tensor`, or `tf.IndexedSlices` with every index once. An average of
        integer tensors is truncated toward zero. The average of integer
        `tf.IndexedSlices` is floating-point: float32 for 8 and 16 bits, else float64.

    Raises:
        ValueError: both `op` and `average` are given, or `op` is not a reduction.
        TypeError: `compression` has no methods `compress` and `decompress`.
        NotImplementedError: `tensor` is a `tf.IndexedSlices`, and the reduction is not
            `Sum` or `Average`, or a factor is not 1.
        tf.errors.FailedPreconditionError: shapes, dtypes or options differ between the
            ranks (raised on every rank), or `hvd.init()` was not called.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum).numpy().tolist()
        [1.0, 2.0]
    """
    chosen = reduce_op(handle_average_backwards_compatibility(op, average))
    members = own(process_set)
    check_methods(compression)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            _refuse_scales_of_rows(prescale_factor, postscale_factor)
            name = scoped(name, ignore_name_scope)
            return _allreduce_rows(tensor, chosen, name, members)
    with tf.device(device_dense):
        sent, context = compression.compress(tf.convert_to_tensor(tensor))
        one = scaled(sent, chosen, prescale_factor, postscale_factor)
        name = scoped(name, ignore_name_scope)
        reduced = _reduced_by(tfdist.allreduce, one, chosen, name, members)
        return compression.decompress(reduced, context)


def _reduced_by(
    reduce: Callable[..., tf.Tensor],
    one: Scaled,
    op: tfdist.ReduceOp,
    name: str | None,
    members: tfdist.ProcessSet | None,
) -> tf.Tensor:
    return one.finish(
        reduce(
            one.value,
            op=op,
            name=name,
            prescale=one.prescale,
            postscale=one.postscale,
            process_set=members,
        )
    )


def _allreduce_rows(
    slices: tf.IndexedSlices,
    op: tfdist.ReduceOp,
    name: str | None,
    members: tfdist.ProcessSet | None,
) -> tf.IndexedSlices:
    if op not in (tfdist.ReduceOp.SUM, tfdist.ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"Expected op=hvd.Sum or hvd.Average for tf.IndexedSlices, got {op.name}. "
            "Convert it to a dense tensor first: tf.convert_to_tensor(value)."
        )
    base = name or operation_name("allreduce_rows", None, process_set=id_of(members))
    options = ReduceOptions(op, process_set=members)
    if op is tfdist.ReduceOp.AVERAGE and slices.values.dtype.is_integer:
        # Horovod divides with `/`, which converts integers to floating point.
        values = slices.values / tf.ones([], slices.values.dtype)
        slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
    return reduce_rows(slices, options, base)


def _refuse_scales_of_rows(prescale: float, postscale: float) -> None:
    if prescale != 1 or postscale != 1:
        raise NotImplementedError(
            "Expected prescale_factor=1 and postscale_factor=1 for tf.IndexedSlices, "
            f"got {prescale} and {postscale}: Horovod does not scale them either. "
            "Multiply the values: tf.IndexedSlices(slices.values * factor, "
            "slices.indices, slices.dense_shape)."
        )


@tf.autograph.experimental.do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces a list of tensors in a few operations instead of one per tensor.

    Args:
        tensors: list of tensors, each as in `allreduce`; number, shapes and dtypes must
            be the same on every rank.
        average: as in `allreduce`.
        device_dense: device for the operations on dense tensors.
        device_sparse: device for the operations on `tf.IndexedSlices`.
        compression: compression of the dense tensors.
        op: `Average` (default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after the reduction.
        process_set: the ranks that take part; only these ranks call the function.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        name: operation name, as in `allreduce`.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        ValueError: as in `allreduce`.
        NotImplementedError: as in `allreduce`.
        tf.errors.FailedPreconditionError: as in `allreduce`.
    """
    chosen = reduce_op(handle_average_backwards_compatibility(op, average))
    members = own(process_set)
    check_methods(compression)
    base = scoped(name, ignore_name_scope)
    found: list[Any] = list(tensors)
    rows = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(found)) if i not in rows]
    with tf.device(device_sparse):
        if rows:
            _refuse_scales_of_rows(prescale_factor, postscale_factor)
        for i in rows:
            named = f"{base}.rows{i}" if base else None
            found[i] = _allreduce_rows(found[i], chosen, named, members)
    with tf.device(device_dense):
        pairs = [compression.compress(tf.convert_to_tensor(found[i])) for i in dense]
        ready = [
            scaled(sent, chosen, prescale_factor, postscale_factor) for sent, _ in pairs
        ]
        reduced = _grouped(ready, chosen, base, members)
        for i, (_, context), end in zip(dense, pairs, reduced, strict=True):
            found[i] = compression.decompress(end, context)
    return found


def _grouped(
    ready: Sequence[Scaled],
    op: tfdist.ReduceOp,
    name: str | None,
    members: tfdist.ProcessSet | None,
) -> list[tf.Tensor]:
    """Calls `tfdist.grouped_allreduce` once for each pair of scale factors."""
    ends: list[Any] = [None] * len(ready)
    factors = dict.fromkeys((one.prescale, one.postscale) for one in ready)
    for number, (before, after) in enumerate(factors):
        places = [
            i
            for i, one in enumerate(ready)
            if (one.prescale, one.postscale) == (before, after)
        ]
        reduced = tfdist.grouped_allreduce(
            [ready[i].value for i in places],
            op=op,
            name=f"{name}.factor{number}" if name and number else name,
            prescale=before,
            postscale=after,
            process_set=members,
        )
        for i, end in zip(places, reduced, strict=True):
            ends[i] = ready[i].finish(end)
    return ends


@tf.autograph.experimental.do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks; each rank receives some of the reduced rows.

    Args:
        tensor: tensor, NumPy array or variable of shape `[rows, ...]`, with the same
            shape on every rank. The first `rows % size` ranks receive one row more.
        device_dense: device for the operation.
        compression: as in `allreduce`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        name: operation name, as in `allreduce`.
        process_set: the ranks that take part; only these ranks call the function.
        ignore_name_scope: whether surrounding name scopes are omitted from `name`.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after the reduction.

    Returns:
        The reduced rows of this rank. As in Horovod, the gradient of `tensor` is the
        concatenation of the gradients that the ranks have for their rows; with `Sum` it
        is multiplied by the number of ranks. The gradient of `tfdist.reduce_scatter`
        is smaller by a factor of the number of ranks.

    Raises:
        tf.errors.InvalidArgumentError: the tensor is a scalar.
        ValueError: `op` is not a reduction, or is `Adasum`.
        tf.errors.FailedPreconditionError: shapes, dtypes or options differ between the
            ranks; raised on every rank.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(tf.constant([1.0, 2.0])).numpy().tolist()
        [1.0, 2.0]
    """
    chosen = reduce_op(op)
    members = own(process_set)
    check_methods(compression)
    with tf.device(device_dense):
        # Horovod's gradient (_reducescatter_grad) is tfdist's multiplied by the size.
        tensor = scale_gradient(tensor, members, lambda size: size)
        sent, context = compression.compress(tensor)
        if sent.shape.rank == 0:
            raise invalid(
                "Expected a tensor of at least one dimension in hvd.reducescatter, got "
                "a scalar. Use hvd.allreduce."
            )
        one = scaled(sent, chosen, prescale_factor, postscale_factor)
        name = scoped(name, ignore_name_scope)
        reduced = _reduced_by(tfdist.reduce_scatter, one, chosen, name, members)
        return compression.decompress(reduced, context)


@tf.autograph.experimental.do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Calls `reducescatter` for every tensor of a list.

    Args:
        tensors: list of tensors, each as in `reducescatter`; the same number on every
            rank.
        device_dense: as in `reducescatter`.
        compression: as in `reducescatter`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: the ranks that take part; only these ranks call the function.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after the reduction.

    Returns:
        This rank's reduced rows of each tensor, in the order of `tensors`.

    Raises:
        tf.errors.InvalidArgumentError: a tensor is a scalar.
        ValueError: as in `reducescatter`.
        tf.errors.FailedPreconditionError: as in `reducescatter`.
    """
    return [
        reducescatter(
            tensor,
            device_dense=device_dense,
            compression=compression,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for tensor in tensors
    ]
