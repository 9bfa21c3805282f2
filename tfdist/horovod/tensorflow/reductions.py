"""allreduce, reducescatter and their grouped forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.collectives.tf_ops.op_names import operation_name
from tfdist.core.process_sets import id_of
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.sparse import reduce_rows
from tfdist.horovod.common.process_sets import global_process_set, own, size_of
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
    """Reduces a tensor over all ranks; every rank gets the same bits.

    Args:
        tensor: tensor, NumPy array, variable, or `tf.IndexedSlices`, of which the rows
            of all ranks are gathered and those of equal index added.
        average: deprecated: True is `op=Average`, False `op=Sum`.
        device_dense: device for the operation of a dense tensor, default TensorFlow's
            choice. The reduction itself runs on the CPU.
        device_sparse: the same for `tf.IndexedSlices`.
        compression: `Compression.none` (default), `Compression.fp16`, or a class of
            your own. Not used for `tf.IndexedSlices`.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: factor before the reduction; integers are multiplied in
            float64 and cut towards zero.
        postscale_factor: factor after it.
        name: pairs the calls of the ranks; default the place in the traced function.
        process_set: the ranks that take part, which alone call it.
        ignore_name_scope: whether name scopes of TensorFlow around the call are left
            out of `name`. Default names have none.

    Returns:
        Tensor like `tensor`, or `tf.IndexedSlices` that have every index once. The
        average of integer `tf.IndexedSlices` is of floating-point numbers (float64, of
        8 and 16 bits float32), that of integer tensors is cut towards zero.

    Raises:
        ValueError: `op` and `average` are given, or `op` is no reduction.
        TypeError: `compression` is none.
        NotImplementedError: Adasum, or `tf.IndexedSlices` with another reduction than
            `Sum` and `Average`, or with a factor other than 1.
        tf.errors.FailedPreconditionError: shapes, dtypes or options differ between the
            ranks (on every rank), or `hvd.init()` was not called.

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
            "Make it dense first: tf.convert_to_tensor(value)."
        )
    base = name or operation_name("allreduce_rows", None, process_set=id_of(members))
    options = ReduceOptions(op, process_set=members)
    if op is tfdist.ReduceOp.AVERAGE and slices.values.dtype.is_integer:
        # Horovod divides with `/`, which makes floating-point numbers of integers.
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
    """Reduces a list of tensors, in few operations instead of one for each.

    Args:
        tensors: as in `allreduce`; the same number, shapes and dtypes on every rank.
        average: as there, and so the others.
        device_dense: device for the operations of the dense tensors.
        device_sparse: device for those of `tf.IndexedSlices`.
        compression: for the dense tensors.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.
        process_set: the ranks that take part, which alone call it.
        ignore_name_scope: whether name scopes around the call are left out of `name`.
        name: pairs the calls of the ranks.

    Returns:
        The reduced tensors, in the order of `tensors`.

    Raises:
        ValueError: as `allreduce`.
        NotImplementedError: as `allreduce`.
        tf.errors.FailedPreconditionError: as `allreduce`.
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
    """One call of tfdist for the tensors of equal factors."""
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
    """Reduces a tensor over all ranks; each rank gets its part of the rows.

    Args:
        tensor: tensor, NumPy array or variable of shape `[rows, ...]`, the same on
            every rank. The first `rows % size` ranks get one row more than the others.
        device_dense: device for the operation.
        compression: as in `allreduce`, and so the others.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        name: pairs the calls of the ranks.
        process_set: the ranks that take part, which alone call it.
        ignore_name_scope: whether name scopes around the call are left out of `name`.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.

    Returns:
        The reduced rows of this rank. Gradients are Horovod's: those of all parts, one
        after the other, for `Sum` times the number of ranks, for `Average` as they are.
        `tfdist.reduce_scatter` has those divided by the number of ranks.

    Raises:
        tf.errors.InvalidArgumentError: the tensor is a scalar.
        ValueError: `op` is no reduction.
        NotImplementedError: Adasum.
        tf.errors.FailedPreconditionError: shapes, dtypes or options differ between the
            ranks, on every rank.

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
        # Horovod's gradient (_reducescatter_grad) is tfdist's times the size.
        sent, context = compression.compress(scale_gradient(tensor, size_of(members)))
        if sent.shape.rank == 0:
            raise invalid(
                "Expected a tensor of at least one dimension in hvd.reducescatter, got "
                "a scalar. Use hvd.allreduce."
            )
        one = scaled(sent, chosen, prescale_factor, postscale_factor)
        name = scoped(name, ignore_name_scope)
        reduced = _reduced_by(tfdist.reduce_scatter, one, chosen, name, members)
        return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """`reducescatter` of every tensor of a list.

    Args:
        tensors: as in `reducescatter`; as many on every rank.
        device_dense: as there, and so the others.
        compression: of what is sent.
        op: `Average` (default), `Sum`, `Min`, `Max` or `Product`.
        process_set: the ranks that take part, which alone call it.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.

    Returns:
        The parts of this rank, in the order of `tensors`.

    Raises:
        tf.errors.InvalidArgumentError: a tensor is a scalar.
        ValueError: as `reducescatter`.
        NotImplementedError: as `reducescatter`.
        tf.errors.FailedPreconditionError: as `reducescatter`.
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
