"""The gradients of the operations.

What is differentiated is the sum of the losses of all ranks: the gradient that a rank
gets for its tensor says how that sum changes with it, whichever ranks it has gone to.
A collective is linear in the tensors of all ranks together (where it is not, as for
`MIN`, its gradient is refused), so its gradient is the transposed matrix, which is a
collective again (J. Utke, L. Hascoet, P. Heimbach, C. Hill, P. Hovland, U. Naumann,
"Toward Adjoinable MPI", IPDPS 2009). With `x[r]`, `y[r]` the input and output of rank
`r`, `dx[r]`, `dy[r]` their gradients, `f` the product of the factors (for AVERAGE
divided by the number of ranks):

    y[r] = f sum(x)                            dx[r] = f sum(dy)
    allgather: y[r] = concat(x)                dx = reduce_scatter(SUM, dy)
    broadcast: y[r] = x[root]                  dx = reduce(SUM, dy); 0 but on root
    reduce: y[root] = f sum(x), y[r] = x[r]    dx[r] = f dy[root], + dy[r] but on root
    reduce_scatter: y[r] = f sum(x)[part r]    dx[r] = f concat(dy)
    gather: y[root] = concat(x)                dx[r] = dy[root][part r]
    scatter: y[r] = x[root][part r]            dx[root] = concat(dy), 0 elsewhere
    alltoall: y[r] = concat(x[s][part r])      dx[r] = concat(dy[s][part r])
    send, recv: y[dst] = x[src]                dx[src] = dy[dst]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _operations
from tfdist._library import ops
from tfdist._names import operation_name
from tfdist._operations import ReduceOp
from tfdist._process_sets import size_of

_Gradient = Callable[..., Any]


def _gradient_of(kind: str) -> Callable[[_Gradient], _Gradient]:
    """Registers the gradient of an operation.

    A collective that is differentiated, and its gradient, reduce none of the gradients
    of what is computed around it: they count for none.
    """

    def register(function: _Gradient) -> _Gradient:
        @functools.wraps(function)
        def gradient(node: Any, *grads: Any) -> Any:
            if isinstance(node, tf.Operation) and "counted" in node.node_def.attr:
                node._set_attr("counted", tf.compat.v1.AttrValue(i=0))
            with _operations.counted_as(0):
                return function(node, *grads)

        tf.RegisterGradient(kind)(gradient)
        return function

    return register


@_gradient_of("TfdistAllreduce")
def _allreduce_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """Sum and average are linear and the same on all ranks: reduce the gradients so."""
    op = _linear_op(node)
    found = _operations.allreduce(
        _dense(node, grads),
        _name(node),
        op,
        _text(node, "prescale"),
        _text(node, "postscale"),
        _timeout_s(node),
        hints=node.get_attr("hints"),
        process_set=_set(node),
    )
    return found


@_gradient_of("TfdistAllgather")
def _allgather_gradient(node: Any, grad: Any, _splits_grad: Any) -> tf.Tensor:
    """The own rows of the sum of all ranks' gradients."""
    rows, splits = node.outputs
    own = _operations.reduce_scatter(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        splits,
        _name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        _timeout_s(node),
        process_set=_set(node),
    )
    return _shaped_like_input(node, own)


@_gradient_of("TfdistBroadcast")
def _broadcast_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """The sum of all ranks' gradients on the root, zeros elsewhere."""
    summed = _operations.reduce(
        _dense(node, grads),
        node.get_attr("root"),
        _name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        _timeout_s(node),
        process_set=_set(node),
    )
    is_root = _is_root(node)
    return [tf.where(is_root, g, tf.zeros_like(g)) for g in summed]


@_gradient_of("TfdistReduce")
def _reduce_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """The root's gradient, times the factors, on all ranks; elsewhere plus the own."""
    op = _linear_op(node)
    own = _dense(node, grads)
    of_root = _operations.broadcast(
        own,
        node.get_attr("root"),
        _name(node),
        _timeout_s(node),
        process_set=_set(node),
    )
    factor = _factor(node)
    if op is ReduceOp.AVERAGE:
        factor /= _size(node)
    is_root = _is_root(node)
    return [
        tf.where(is_root, tf.zeros_like(g), g) + r * tf.cast(factor, r.dtype)
        for g, r in zip(own, of_root, strict=True)
    ]


@_gradient_of("TfdistReduceScatter")
def _reduce_scatter_gradient(
    node: Any, grad: Any, _splits_grad: Any
) -> list[tf.Tensor | None]:
    """The gradients of all parts, one after the other, times the factors."""
    op = _linear_op(node)
    rows, splits = node.outputs
    whole = _operations.allgather(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        _name(node),
        _timeout_s(node),
        process_set=_set(node),
    )
    factor = _factor(node)
    if op is ReduceOp.AVERAGE:
        factor /= tf.cast(tf.size(splits), tf.float64)
    return [_shaped_like_input(node, whole * tf.cast(factor, whole.dtype)), None]


@_gradient_of("TfdistGather")
def _gather_gradient(node: Any, grad: Any, _splits_grad: Any) -> tf.Tensor:
    """The part of the root's gradient that belongs to the own rows."""
    rows, splits = node.outputs
    own = _operations.scatter(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        node.get_attr("root"),
        splits,
        _name(node),
        _timeout_s(node),
        process_set=_set(node),
    )
    return _shaped_like_input(node, own)


@_gradient_of("TfdistScatter")
def _scatter_gradient(node: Any, grad: Any) -> list[tf.Tensor | None]:
    """On the root the gradients of all parts, one after the other; zeros elsewhere."""
    gathered = _operations.gather(
        tf.convert_to_tensor(grad),
        node.get_attr("root"),
        _name(node),
        _timeout_s(node),
        process_set=_set(node),
    )
    # As many rows as the input has: on the root they are all there, elsewhere none is.
    missing = tf.reduce_prod(tf.shape(node.inputs[0])[:1]) - tf.shape(gathered)[0]
    row_shape = tf.shape(gathered)[1:]
    zeros = tf.zeros(tf.concat([[missing], row_shape], axis=0), gathered.dtype)
    return [_shaped_like_input(node, tf.concat([gathered, zeros], axis=0)), None]


@_gradient_of("TfdistAlltoall")
def _alltoall_gradient(
    node: Any, grad: Any, _splits_grad: Any
) -> list[tf.Tensor | None]:
    """The gradients of the rows that were sent, back from where they went."""
    rows, received_splits = node.outputs
    back, _ = _operations.alltoall(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        received_splits,
        _name(node),
        _timeout_s(node),
        process_set=_set(node),
    )
    return [_shaped_like_input(node, back), None]


@_gradient_of("TfdistSend")
def _send_gradient(node: Any, _grad: Any) -> tf.Tensor:
    """What the receiver sends back."""
    dst = node.get_attr("dst")
    (tensor,) = node.inputs
    return _operations.recv(
        tf.shape(tensor, out_type=tf.int64),
        tensor.dtype,
        dst,
        _name(node, partner=f"from {dst}"),
        _timeout_s(node),
    )


@_gradient_of("TfdistRecv")
def _recv_gradient(node: Any, grad: Any) -> list[tf.Tensor | None]:
    """Goes back to the sender; what was only waited for gets zeros."""
    src = node.get_attr("src")
    _operations.send(
        tf.convert_to_tensor(grad),
        src,
        _name(node, partner=f"to {src}"),
        _timeout_s(node),
    )
    _, *after = node.inputs
    return [None, *(tf.zeros_like(tensor) for tensor in after)]


def _linear_op(node: Any) -> ReduceOp:
    op = ReduceOp(node.get_attr("reduce_op"))
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(
            f"The gradient of {_kind(node)} with ReduceOp.{op.name} "
            f"({_text(node, 'tensor_name')}) is not defined: expected SUM or AVERAGE. "
            "Use tf.stop_gradient on its input."
        )
    return op


def _kind(node: Any) -> str:
    return {
        "TfdistAllreduce": "an allreduce",
        "TfdistReduce": "a reduce",
        "TfdistReduceScatter": "a reduce_scatter",
    }[str(node.type)]


def _factor(node: Any) -> tf.Tensor:
    product = float(_text(node, "prescale")) * float(_text(node, "postscale"))
    return tf.constant(product, tf.float64)


def _is_root(node: Any) -> tf.Tensor:
    return tf.equal(ops().tfdist_topology()[0], node.get_attr("root"))


def _shaped_like_input(node: Any, rows: tf.Tensor) -> tf.Tensor:
    """The same numbers; a scalar input was one row."""
    return tf.reshape(rows, tf.shape(node.inputs[0], out_type=tf.int64))


def _dense(node: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, node.outputs, strict=True)
    ]


def _name(node: Any, *, partner: str = "") -> str:
    name = f"{_text(node, 'tensor_name')}.gradient"
    process_set = 0 if partner else _set(node)  # send and recv are of all ranks
    return operation_name("gradient", name, process_set=process_set, partner=partner)


def _set(node: Any) -> int:
    return int(node.get_attr("process_set"))


def _size(node: Any) -> tf.Tensor:
    """How many ranks take part: of the job when the graph runs, of a set always."""
    members = size_of(_set(node))
    if members is not None:
        return tf.constant(members, tf.float64)
    return tf.cast(ops().tfdist_topology()[1], tf.float64)


def _timeout_s(node: Any) -> float | None:
    return node.get_attr("timeout_s") or None


def _text(node: Any, attribute: str) -> str:
    value = node.get_attr(attribute)
    return value.decode() if isinstance(value, bytes) else str(value)
