"""From a list of gradients to one reduction operation per bucket.

A gradient list is a *group*. It is agreed on once, when it is traced (or at the first
eager call): every rank describes its variables, and a difference is an error on all
ranks before anything is reduced. From then on each bucket of the group is one
operation, and TensorFlow's executor starts it when its last gradient is ready.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _core, _operations, _runtime, errors
from tfdist._bucket_reduction import gated, reduce_buckets
from tfdist._process_sets import ProcessSet, id_of
from tfdist._xla import reduced_by_xla
from tfdist.collectives import ReduceOp
from tfdist.compression import compress, restore
from tfdist.reduce_options import ReduceOptions
from tfdist.sparse import by_rows, reduce_rows, rows_of
from tfdist.weights import check_weightable, share_of, weighted

_logger = logging.getLogger("tfdist")
_WEIGHTED = "a weight is given"
_BY_XLA = " by=xla"  # in the options of a group that is reduced in what XLA compiles
_CALLS = "tfdist/group_calls"  # graph collection: options of the groups traced there


@tf.autograph.experimental.do_not_convert
def reduce_gradients(
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: ReduceOptions | None = None,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    weight: Any = None,
) -> list[Any]:
    """Reduces the gradients of `variables` over all ranks.

    A gradient that is `None` here counts as zeros if any rank has one for that
    variable; one that no rank has stays `None`. `tf.IndexedSlices` of a large table
    are reduced by rows, unless a rank has a dense gradient for it; others are made
    dense (their duplicates summed) before they are reduced.

    Args:
        grads: one gradient for each variable: a tensor of the variable's shape, a
            `tf.IndexedSlices`, or `None`.
        variables: Keras or TensorFlow variables, the same on every rank.
        options: how; default the average over all ranks, exact.
        prescale: factor before the reduction.
        postscale: factor after it.
        weight: this rank's count of samples (`weights.share_of`), given by all ranks
            or by none: the average is then that over all samples. Default: every rank
            counts the same.

    Returns:
        The reduced gradients, in the order of `variables`, equal on all ranks. Those
        reduced by rows are `tf.IndexedSlices` that have every index once.

    Raises:
        tfdist.MismatchError: the ranks' variables or options differ.
        tfdist.NotInitializedError: before `tfdist.init()`.
        InsideXlaError: the graph is compiled by XLA, and cannot be with the reduction
            in it (`_xla.reduced_by_xla`).
        ValueError: the lists differ in length, or a weight is given for a sum,
            or for the variables of a synchronised batch normalisation.
    """
    options = options or ReduceOptions()
    use = f"prescale={prescale!r} postscale={postscale!r}"
    in_xla = reduced_by_xla(
        [
            "xla='off' was given" if options.xla == "off" else None,
            _WEIGHTED if weight is not None else None,
            "TFDIST_COMMIT_GATE=1" if gated() else None,
        ]
    )
    if in_xla:
        use += _BY_XLA
    if weight is not None:
        _check_average(options)
        check_weightable(variables)
        use += " weighted"
    full, group_id = _complete(grads, variables, options, use, in_xla=in_xla)
    if weight is not None:
        share = share_of(weight, options.process_set)
        full = [weighted(g, share) for g in full]
        options = dataclasses.replace(options, op=ReduceOp.SUM)
    is_sparse = [isinstance(g, tf.IndexedSlices) for g in full]
    dense = [None if sparse else g for g, sparse in zip(full, is_sparse, strict=True)]
    reduced: list[Any] = reduce_buckets(
        [compress(g, options.compression) for g in dense],
        group_id,
        options,
        prescale,
        postscale,
        in_xla=in_xla,
    )
    reduced = [restore(g, own) for g, own in zip(reduced, dense, strict=True)]
    for i, grad in enumerate(full):
        if is_sparse[i]:
            name = f"{options.name or 'gradients'}.{group_id[:8]}.rows{i}"
            reduced[i] = reduce_rows(grad, options, name, prescale * postscale)
    return reduced


@tf.autograph.experimental.do_not_convert
def weighted_gradients(
    gradient: Callable[[tf.Tensor], Sequence[Any]],
    variables: Sequence[Any],
    options: ReduceOptions,
    weight: Any,
) -> list[Any]:
    """As `reduce_gradients` with a weight, which the backward pass begins with.

    So it is right for layers too that add up the ranks' gradients within it.

    Args:
        gradient: makes the gradients, of a loss times the share that it is given.
        variables: Keras or TensorFlow variables, the same on every rank.
        options: how; the average over some ranks.
        weight: this rank's count of samples.
    """
    _runtime.check_initialized()
    _operations.check_not_xla(_WEIGHTED)
    _check_average(options)
    # Before the ranks tell each other their weights: a rank may have given none.
    agree(
        [describe_variable(v) for v in variables],
        f"{options.describe()} weighted",
        present=[False for _ in variables],
        process_set=options.process_set,
    )
    share = share_of(weight, options.process_set)
    # A mean over no samples may be NaN: a share of 0 counts for nothing all the same.
    counts = tf.cast(share > 0, share.dtype)
    local = [weighted(g, counts) for g in gradient(share)]
    options = dataclasses.replace(options, op=ReduceOp.SUM)
    return reduce_gradients(local, variables, options)


@tf.autograph.experimental.do_not_convert
def fill_missing(
    grads: Sequence[Any], variables: Sequence[Any], options: ReduceOptions
) -> list[tf.Tensor | None]:
    """Zeros in place of the gradients that this rank lacks and another has.

    For gradients that each rank adds up by itself before they are reduced. Arguments
    and errors are those of `reduce_gradients`.

    Returns:
        Dense gradients, `None` for the variables that no rank has one for.
    """
    _operations.check_not_xla("gradients are accumulated")
    options = dataclasses.replace(options, sparse_as_dense=True)
    return _complete(grads, variables, options, "accumulated")[0]


def _complete(
    grads: Sequence[Any],
    variables: Sequence[Any],
    options: ReduceOptions,
    use: str,
    *,
    in_xla: bool = False,
) -> tuple[list[Any], str]:
    """The gradients as they are reduced, without gaps, and the id of their group."""
    _runtime.check_initialized()
    _check_arguments(grads, variables)
    # Behind the gate all rows would have to come in one step with the buckets.
    tables = [
        i
        for i, v in enumerate(variables)
        if not gated() and by_rows(v.shape, _dtype(v).size, options.sparse_as_dense)
    ]
    if in_xla and any(isinstance(grads[i], tf.IndexedSlices) for i in tables):
        raise _operations.InsideXlaError(
            "large tables are reduced by their rows (sparse_as_dense=True does not)"
        )
    known = [
        g if i in tables and isinstance(g, tf.IndexedSlices) else _dense(g, v)
        for i, (g, v) in enumerate(zip(grads, variables, strict=True))
    ]
    lines = [_describe(v, g) for v, g in zip(variables, known, strict=True)]
    group_id, found = agree(
        lines + [f"{lines[i]} dense" for i in tables],
        f"{options.describe()} {use}",
        present=[g is not None for g in known] + [_is_dense(known[i]) for i in tables],
        process_set=options.process_set,
    )
    dense_somewhere = dict(zip(tables, found[len(lines) :], strict=True))
    full: list[Any] = []
    for i, (grad, variable) in enumerate(zip(known, variables, strict=True)):
        if grad is None and not found[i]:
            full.append(None)
        elif not dense_somewhere.get(i, True):
            full.append(rows_of(grad, variable))
        elif grad is None:
            full.append(tf.zeros(variable.shape, variable.dtype))
        else:
            full.append(_dense(grad, variable))
    return full, group_id


def _check_average(options: ReduceOptions) -> None:
    if options.op is not ReduceOp.AVERAGE:
        raise ValueError(
            "Expected op=tfdist.ReduceOp.AVERAGE with weight, got SUM: a sum has no "
            "weights. Multiply the loss of this rank by the weight instead."
        )


def _is_dense(grad: Any) -> bool:
    return grad is not None and not isinstance(grad, tf.IndexedSlices)


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(variable.dtype)


def agree(
    lines: Sequence[str],
    options: str,
    *,
    present: Sequence[bool],
    process_set: ProcessSet | None = None,
) -> tuple[str, list[bool]]:
    """Makes sure that all ranks have the same list of variables and options.

    Blocks until every rank has asked, at most `TFDIST_TIMEOUT_S`. A list that was
    agreed on before is answered at once.

    Args:
        lines: one line for each variable: path, dtype and shape.
        options: one line: what is done with them.
        present: for each variable whether this rank has a value for it.
        process_set: the ranks that ask; default all.

    Returns:
        The group's id, and for each variable whether any rank has a value.
    """
    description = "\n".join([*lines, f"{options} {_call_number(options, lines)}"])
    try:
        return _core.register_group(
            description, list(present), process_set=id_of(process_set)
        )
    except _core.CoreError as error:
        raise _public_error(error, options) from None


def _public_error(error: _core.CoreError, options: str) -> Exception:
    if error.payload.get("kind") == "mismatch":
        if options.startswith("op=broadcast "):
            error = _about_variables(error)
        hint = (
            "Keras numbers the names of layers: where only the numbers differ, call "
            "keras.utils.clear_session() on all ranks before the model is made."
        )
        if 0 < error.message.count(_BY_XLA) < error.message.count(" prescale="):
            hint = (
                "Only the ranks with by=xla reduce inside of what XLA compiles: run "
                "make xla on all hosts, or give DistributedOptimizer xla='off' on all "
                "ranks. Or their steps differ in what can run there."
            )
        message = f"{error.message} ({hint})"
        error = _core.CoreError(error.code, message, error.payload)
    public = errors.from_core(error)
    # Or AutoGraph would put a class of its own in the place of ours.
    public.ag_pass_through = True  # type: ignore[attr-defined]
    return public


def _about_variables(error: _core.CoreError) -> _core.CoreError:
    """The core takes every list for gradients; this one is sent, not reduced."""
    message = error.message.removeprefix('"gradients": ')
    cause = str(error.payload.get("cause", ""))
    payload = {
        **error.payload,
        "tensor": "variables",
        "cause": cause.replace("list of gradients", "list of variables"),
    }
    message = message.replace("list of gradients", "list of variables", 1)
    return _core.CoreError(error.code, f'"variables": {message}', payload)


def describe_variable(variable: Any, dtype: Any = None) -> str:
    """One line for a variable: path, dtype, shape; for `agree`."""
    path = " ".join(path_of(variable).split())
    dims = ",".join(str(dim) for dim in variable.shape)
    return f"{path} {tf.as_dtype(dtype or variable.dtype).name} [{dims}]"


def path_of(variable: Any) -> str:
    """The path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)


def _check_arguments(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    if len(grads) != len(variables):
        raise ValueError(
            f"Expected one gradient for each of {len(variables)} variables, got "
            f"{len(grads)} gradients."
        )
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"Variable {path_of(variable)} is overwritten by its gradient "
                "(float8 training), which must not be averaged: not supported in "
                "this release. Use a float32, bfloat16 or float16 policy."
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
        grad = rows_of(grad, variable)  # with the shape, which it may lack
    tensor = tf.convert_to_tensor(grad)
    if tensor.shape.is_fully_defined():
        return tensor
    # Buckets are cut by static sizes, which some traced gradients do not carry.
    return tf.ensure_shape(tensor, variable.shape)


@functools.lru_cache(maxsize=4096)
def _log_dense_once(path: str) -> None:
    _logger.info(
        "The gradient of %s is sparse (tf.IndexedSlices). It is reduced as a dense "
        "tensor; sparse_as_dense=False reduces its rows instead, which is faster for a "
        "large table of which a step uses few rows.",
        path,
    )


def _describe(variable: Any, grad: Any) -> str:
    return describe_variable(variable, None if grad is None else grad.dtype)


def _call_number(options: str, lines: Sequence[str]) -> str:
    """Tells apart equal groups of one graph, which may run at the same time.

    Eager calls follow each other, so they share number 0. A retrace starts again at
    0, so it finds the groups of the first trace.
    """
    if tf.executing_eagerly():
        return "call=0"
    key = "\n".join([*lines, options])
    calls = tf.compat.v1.get_default_graph().get_collection_ref(_CALLS)
    number = calls.count(key)
    calls.append(key)
    return f"call={number}"
