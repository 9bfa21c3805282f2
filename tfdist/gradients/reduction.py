"""Reduction of a gradient list, with one operation per bucket.

A gradient list is also called a *group*. The ranks agree on a group once, when it is
traced (or in the first eager call). They compare their variables before anything is
reduced, and all ranks raise an error if the variables differ. Each bucket of the group
is one operation, which TensorFlow's executor starts when the bucket's last gradient is
ready.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.consistency.in_step import compare_in_step
from tfdist.collectives.per_rank_variables import declare
from tfdist.collectives.signature import agree, describe_variable, path_of
from tfdist.collectives.tf_ops import xla_context
from tfdist.core import runtime
from tfdist.gradients.agreement import BY_OPERATIONS, BY_XLA, agree_on_gradients
from tfdist.gradients.bucket_ops import gated, reduce_buckets
from tfdist.gradients.bucket_plan import plan_buckets
from tfdist.gradients.double_buffer import DoubleBuffer
from tfdist.gradients.options import ReduceOptions, size_may_change
from tfdist.gradients.sample_weights import check_weightable, share_of, weighted
from tfdist.gradients.sparse import by_rows, reduce_rows, rows_of
from tfdist.gradients.xla import reduced_by_xla

_logger = logging.getLogger("tfdist")
_WEIGHTED = "a weight is given"


@tf.autograph.experimental.do_not_convert
def reduce_gradients(
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: ReduceOptions | None = None,
    *,
    weight: Any = None,
    buffer: DoubleBuffer | None = None,
    is_share: bool = False,
) -> list[Any]:
    """Reduces the gradients of `variables` over all ranks.

    A gradient that is `None` on this rank is treated as zeros if another rank has a
    gradient for the same variable; if no rank has a gradient, the result is `None`.
    `tf.IndexedSlices` of a large table are reduced by rows, unless a rank has a dense
    gradient for the table. Other `tf.IndexedSlices` are converted to dense tensors,
    with duplicate rows summed, before they are reduced.

    Args:
        grads: one gradient for each variable: a tensor of the variable's shape, a
            `tf.IndexedSlices`, or `None`.
        variables: Keras or TensorFlow variables, the same on every rank.
        options: options of the reduction; default: the average over all ranks,
            uncompressed.
        weight: this rank's number of samples (`sample_weights.share_of`). Either all
            ranks pass a weight or none does. With weights, the result is the average
            over all samples. Default: all ranks have equal weight.
        buffer: required with `options.double_buffering`. It stores `grads` and returns
            the gradients of the previous step, which are reduced instead. Default:
            none.
        is_share: whether `grads` were already multiplied by this rank's share of the
            weights.

    Returns:
        The reduced gradients, in the order of `variables`, equal on all ranks.
        Gradients reduced by rows are `tf.IndexedSlices` without duplicate indices.

    Raises:
        tfdist.MismatchError: the ranks' variables or options differ.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
        InsideXlaError: XLA compiles the graph, but cannot compile this reduction
            (`xla.reduced_by_xla`).
        ValueError: the lists differ in length, a variable has no static shape, or a
            buffer is used with `TFDIST_ATOMIC_STEPS=1`. If a weight is given, also: it
            is not a scalar, `op` is not AVERAGE, `scale_local_gradients` is False, or
            the variables belong to a model with synchronized batch normalization.
        NotImplementedError: a variable is overwritten by its gradient (float8).
    """
    runtime.check_initialized()
    runtime.note_gradients()
    options = options or ReduceOptions()
    is_weighted = weight is not None or is_share
    in_xla = reduced_by_xla(
        [
            "xla='off' was given" if options.xla == "off" else None,
            _WEIGHTED if weight is not None else None,
            "TFDIST_ATOMIC_STEPS=1" if gated() else None,
            "op=tfdist.ReduceOp.ADASUM is used"
            if options.op is ReduceOp.ADASUM
            else None,
            "double_buffering=True is used" if buffer is not None else None,
            "local variables are used in an elastic job"
            if options.local_variables is not None
            and size_may_change(options.process_set)
            else None,
        ]
    )
    use = BY_XLA if in_xla else BY_OPERATIONS
    if weight is not None:
        check_weights(variables, options)
        use += " weighted"
    full, group_id = _complete(grads, variables, options, use, in_xla=in_xla)
    # None for zeros that replace a missing gradient: this rank's graph does not compute
    # them.
    traced = [None if own is None else g for own, g in zip(grads, full, strict=True)]
    local = {i: grads[i] for i in options.local_places(variables)}
    if weight is not None:
        share = share_of(weight, options.process_set, options.name)
        full = [weighted(g, share) for g in full]
        local = {i: weighted(g, share) for i, g in local.items()}
        options = options.summing()
    if buffer is not None:
        _check_not_gated()
        full = buffer.exchange(full, is_weighted=is_weighted)
    reduced = _reduce_complete(
        full, traced, variables, group_id, options, in_xla=in_xla
    )
    part = options.local_factor() if local else None
    for i, grad in local.items():
        reduced[i] = grad if part is None else weighted(grad, part)
    if not in_xla:
        shared = [i for i in range(len(variables)) if i not in local]
        compared = compare_in_step(
            [variables[i] for i in shared],
            [reduced[i] for i in shared],
            group_id,
            options.process_set,
        )
        for i, grad in zip(shared, compared, strict=True):
            reduced[i] = grad
    return reduced


def _reduce_complete(
    grads: Sequence[Any],
    traced: Sequence[Any],
    variables: Sequence[Any],
    group_id: str,
    options: ReduceOptions,
    *,
    in_xla: bool,
) -> list[Any]:
    """Encodes, reduces and decodes gradients, after missing ones were replaced.

    Args:
        grads: tensors, `tf.IndexedSlices` (reduced by rows), or None for gradients that
            are not reduced.
        traced: the gradients that this rank's graph computes; None for missing ones.
        variables: the variables of the list.
        group_id: id of the list.
        options: options of the reduction.
        in_xla: whether XLA compiles the reduction.
    """
    codec = options.codec()
    sent = [
        None if g is None or isinstance(g, tf.IndexedSlices) else codec.encode(g)
        for g in grads
    ]
    plan = plan_buckets(sent, traced, variables, group_id, options, in_xla=in_xla)
    reduced: list[Any] = reduce_buckets(plan, sent, in_xla=in_xla)
    for i, grad in enumerate(grads):
        if isinstance(grad, tf.IndexedSlices):
            name = f"{options.name or 'gradients'}.{group_id[:8]}.rows{i}"
            reduced[i] = reduce_rows(grad, options, name)
        elif grad is not None:
            reduced[i] = codec.decode(reduced[i], grad.dtype)
    return reduced


@tf.autograph.experimental.do_not_convert
def weighted_gradients(
    gradient: Callable[[tf.Tensor], Sequence[Any]],
    variables: Sequence[Any],
    options: ReduceOptions,
    weight: Any,
    buffer: DoubleBuffer | None = None,
) -> list[Any]:
    """Computes and reduces gradients, with weights applied before the backward pass.

    The result is therefore also correct for layers that sum gradients over the ranks in
    the backward pass, unlike with `reduce_gradients`.

    Args:
        gradient: function that accepts this rank's share of the weights and returns
            the gradients of the loss times this share.
        variables: Keras or TensorFlow variables, the same on every rank.
        options: options of the reduction, which has to be an average.
        weight: this rank's number of samples.
        buffer: as in `reduce_gradients`.
    """
    runtime.check_initialized()
    xla_context.check_not_xla(_WEIGHTED)
    _check_average(options)
    # Checked before the ranks exchange weights, because some ranks may lack a weight.
    agree(
        _lines(variables, [None for _ in variables], options.local_places(variables)),
        f"{options.describe(variables)} weighted",
        process_set=options.process_set,
    )
    share = share_of(weight, options.process_set, options.name)
    # On a rank without samples the mean may be NaN; multiplying by 0 has to give 0.
    counts = tf.cast(share > 0, share.dtype)
    local = [weighted(g, counts) for g in gradient(share)]
    options = options.summing()
    return reduce_gradients(local, variables, options, buffer=buffer, is_share=True)


@tf.autograph.experimental.do_not_convert
def fill_missing(
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: ReduceOptions,
    *,
    is_weighted: bool = False,
    why: str = "gradients are accumulated",
) -> list[tf.Tensor | None]:
    """Replaces missing gradients with zeros if another rank has the gradient.

    Used for gradients that each rank accumulates, or applies in a local step, before
    anything is reduced. For arguments and errors, see `reduce_gradients`. `is_weighted`
    has to be equal on all ranks. Inside XLA, this function raises an error that gives
    `why` as the reason.

    Returns:
        Dense gradients; `None` for variables without a gradient on any rank.
    """
    xla_context.check_not_xla(why)
    options = dataclasses.replace(options, sparse_as_dense=True)
    use = "accumulated weighted" if is_weighted else "accumulated"
    full: list[Any] = _complete(grads, variables, options, use)[0]
    for i in options.local_places(variables):
        full[i] = grads[i]
    return full


def _complete(
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: ReduceOptions,
    use: str,
    *,
    in_xla: bool = False,
) -> tuple[list[Any], str]:
    """Returns the gradients to reduce, with zeros for missing ones, and the group id.

    Gradients of local variables are replaced with `None`.
    """
    runtime.check_initialized()
    local = set(options.local_places(variables))
    declare(options.local_members(variables))
    _check_arguments(grads, variables, local)
    # Not with atomic steps, which would have to commit rows together with the buckets.
    # By default, not in an elastic loop either: failed allgathers are not hidden.
    choice = options.sparse_as_dense
    if gated() or (choice is None and runtime.state.hides_failures):
        choice = True
    tables = [
        i
        for i, v in enumerate(variables)
        if i not in local and by_rows(v.shape, _dtype(v).size, choice)
    ]
    if in_xla and any(isinstance(grads[i], tf.IndexedSlices) for i in tables):
        raise xla_context.InsideXlaError(
            "large tables are reduced by rows (pass sparse_as_dense=True to avoid this)"
        )
    shared = [None if i in local else g for i, g in enumerate(grads)]
    known = [
        g if i in tables and isinstance(g, tf.IndexedSlices) else _dense(g, v)
        for i, (g, v) in enumerate(zip(shared, variables, strict=True))
    ]
    lines = _lines(variables, known, local)
    group_id, found = agree_on_gradients(
        lines + [f"{lines[i]} dense" for i in tables],
        f"{options.describe(variables)} {use}",
        [i in local or g is not None for i, g in enumerate(known)]
        + [_is_dense(known[i]) for i in tables],
        options.process_set,
    )
    dense_somewhere = dict(zip(tables, found[len(lines) :], strict=True))
    full: list[Any] = []
    for i, (grad, variable) in enumerate(zip(known, variables, strict=True)):
        if i in local or (grad is None and not found[i]):
            full.append(None)
        elif not dense_somewhere.get(i, True):
            full.append(rows_of(grad, variable))
        elif grad is None:
            full.append(tf.zeros(variable.shape, variable.dtype))
        else:
            full.append(_dense(grad, variable))
    return full, group_id


def check_weights(variables: Sequence[Any], options: ReduceOptions) -> None:
    """Raises ValueError if the gradients of these variables cannot be weighted."""
    _check_average(options)
    check_weightable(variables)


def _check_average(options: ReduceOptions) -> None:
    if not options.scale_local_gradients:
        raise ValueError(
            "weight cannot be used with scale_local_gradients=False. The weight would "
            "apply to only some of a rank's gradients. Omit weight or "
            "scale_local_gradients."
        )
    if options.op is not ReduceOp.AVERAGE:
        remedy = "Multiply this rank's loss by the weight instead."
        if options.op is ReduceOp.ADASUM:
            remedy = "Give all ranks batches of the same size."
        raise ValueError(
            "Expected op=tfdist.ReduceOp.AVERAGE with weight, got "
            f"{options.op.name}, which does not use weights. {remedy}"
        )


def _check_not_gated() -> None:
    if gated():
        raise ValueError(
            "TFDIST_ATOMIC_STEPS=1 cannot be used with double_buffering=True, which "
            "splits a step. Unset the variable, or omit double_buffering."
        )


def _is_dense(grad: Any) -> bool:
    return grad is not None and not isinstance(grad, tf.IndexedSlices)


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(variable.dtype)


def _check_arguments(
    grads: Sequence[Any], variables: Sequence[Any], local: Collection[int]
) -> None:
    if len(grads) != len(variables):
        raise ValueError(
            f"Expected one gradient for each of {len(variables)} variables, got "
            f"{len(grads)} gradients."
        )
    for i, variable in enumerate(variables):
        if i in local:
            continue
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"Variable {path_of(variable)} is overwritten by its gradient "
                "(float8 training), which must not be averaged. This is not supported "
                "in this release. Use a float32, bfloat16 or float16 policy."
            )
        if not tf.TensorShape(variable.shape).is_fully_defined():
            raise ValueError(
                f"Expected a variable of known shape, got {path_of(variable)} with "
                f"shape {variable.shape}. Give the variable a static shape."
            )


def _dense(grad: Any, variable: Any) -> tf.Tensor | None:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        _log_dense_once(path_of(variable))
        grad = rows_of(grad, variable)  # adds the dense shape, which may be missing
    tensor = tf.convert_to_tensor(grad)
    if tensor.shape.is_fully_defined():
        return tensor
    # Buckets are cut by static sizes, which some traced gradients lack.
    return tf.ensure_shape(tensor, variable.shape)


@functools.lru_cache(maxsize=4096)
def _log_dense_once(path: str) -> None:
    _logger.info(
        "The gradient of %s is sparse (tf.IndexedSlices). It is reduced as a dense "
        "tensor. With sparse_as_dense=False it is reduced by rows, which is faster for "
        "a large table if a step uses only a few rows.",
        path,
    )


def _lines(
    variables: Sequence[Any], grads: Sequence[Any], local: Collection[int]
) -> list[str]:
    """Returns one line per variable, which the ranks compare.

    The line of a local variable omits its shape, which may differ between ranks.
    """
    return [
        f"{path_of(v)} local"
        if i in local
        else describe_variable(v, None if g is None else g.dtype)
        for i, (v, g) in enumerate(zip(variables, grads, strict=True))
    ]
