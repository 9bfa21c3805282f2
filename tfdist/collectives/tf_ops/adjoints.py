"""The gradients of the operations.

The differentiated function is the sum of the losses of all ranks: the gradient of a
rank's tensor is the derivative of this sum, even if the tensor was sent to other ranks.
A collective is a linear function of the tensors of all ranks; the gradient of one that
is not, such as `MIN`, raises an error. The gradient of a collective is therefore the
transpose of its matrix, which is again a collective (J. Utke, L. Hascoet, P. Heimbach,
C. Hill, P. Hovland, U. Naumann, "Toward Adjoinable MPI", IPDPS 2009). Here `x[r]` and
`y[r]` are the input and output of rank `r`, `dx[r]` and `dy[r]` their gradients, and
`f` the product of the factors. For AVERAGE, `f` is divided by the number of ranks that
make the call. A rank that has joined contributes 0. The gradients are:

    y[r] = f sum(x)                            dx[r] = f sum(dy)
    allgather: y[r] = concat(x)                dx = reduce_scatter(SUM, dy)
    broadcast: y[r] = x[root]                  dx = reduce(SUM, dy) on root, 0 elsewhere
    reduce: y[root] = f sum(x), y[r] = x[r]    dx[r] = f dy[root], + dy[r] if not root
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

from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.eager_call import attributes_of
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.collectives.tf_ops.op_names import operation_name

_Gradient = Callable[..., Any]


def _gradient_of(kind: str) -> Callable[[_Gradient], _Gradient]:
    """Returns a decorator that registers the gradient of an operation."""

    def register(function: _Gradient) -> _Gradient:
        @functools.wraps(function)
        def gradient(node: Any, *grads: Any) -> Any:
            found = function(_Node(node), *grads)
            found = list(found) if isinstance(found, list | tuple) else [found]
            return [*found, *([None] * (len(node.inputs) - len(found)))]

        tf.RegisterGradient(kind)(gradient)
        return function

    return register


@_gradient_of("TfdistAllreduce")
def _allreduce_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """Reduces the gradients in the same way: sum and average are linear."""
    op = _linear_op(node)
    found = emit.allreduce(
        _dense(node, grads),
        _name(node),
        op,
        _text(node, "prescale"),
        _text(node, "postscale"),
        _timeout_s(node),
        tensor_indices=node.get_attr("tensor_indices"),
        process_set=_process_set(node),
    )
    return found


@_gradient_of("TfdistAllgather")
def _allgather_gradient(node: Any, grad: Any, _splits_grad: Any) -> tf.Tensor:
    """Returns this rank's rows of the sum of all ranks' gradients."""
    rows, splits = node.outputs
    own = emit.reduce_scatter(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        splits,
        _name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        _timeout_s(node),
        process_set=_process_set(node),
    )
    return _shaped_like_input(node, own)


@_gradient_of("TfdistBroadcast")
def _broadcast_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """Returns the sum of all ranks' gradients on the root, zeros on other ranks."""
    summed = emit.reduce(
        _dense(node, grads),
        node.get_attr("root"),
        _name(node),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        _timeout_s(node),
        process_set=_process_set(node),
    )
    is_root = _is_root(node)
    return [tf.where(is_root, g, tf.zeros_like(g)) for g in summed]


@_gradient_of("TfdistReduce")
def _reduce_gradient(node: Any, *grads: Any) -> list[tf.Tensor]:
    """Returns the root's gradient times the factors; other ranks add their own."""
    op = _linear_op(node)
    own = _dense(node, grads)
    is_root = _is_root(node)
    # Reduce the root's gradient with zeros from the other ranks, so that an average is
    # again over the ranks that make the call.
    of_root = emit.allreduce(
        [tf.where(is_root, g, tf.zeros_like(g)) for g in own],
        _name(node),
        op,
        _text(node, "prescale"),
        _text(node, "postscale"),
        _timeout_s(node),
        process_set=_process_set(node),
    )
    return [
        tf.where(is_root, tf.zeros_like(g), g) + r
        for g, r in zip(own, of_root, strict=True)
    ]


@_gradient_of("TfdistReduceScatter")
def _reduce_scatter_gradient(
    node: Any, grad: Any, _splits_grad: Any
) -> list[tf.Tensor | None]:
    """Returns the gradients of all parts, concatenated, times the factors."""
    op = _linear_op(node)
    rows, splits = node.outputs
    gathered = emit.allgather(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        _name(node),
        _timeout_s(node),
        process_set=_process_set(node),
    )
    all_rows = _scatter_rows(gathered.rows, gathered.splits, splits)
    factor = _factor(node)
    if op is ReduceOp.AVERAGE:
        factor /= _callers(node)
    return [_shaped_like_input(node, all_rows * tf.cast(factor, all_rows.dtype)), None]


@_gradient_of("TfdistGather")
def _gather_gradient(node: Any, grad: Any, _splits_grad: Any) -> tf.Tensor:
    """Returns the part of the root's gradient that belongs to this rank's rows."""
    rows, splits = node.outputs
    own = emit.scatter(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        node.get_attr("root"),
        splits,
        _name(node),
        _timeout_s(node),
        process_set=_process_set(node),
    )
    return _shaped_like_input(node, own)


@_gradient_of("TfdistScatter")
def _scatter_gradient(node: Any, grad: Any) -> list[tf.Tensor | None]:
    """Returns the concatenated gradients of all parts on the root, zeros elsewhere."""
    gathered = emit.gather(
        tf.convert_to_tensor(grad),
        node.get_attr("root"),
        _name(node),
        _timeout_s(node),
        process_set=_process_set(node),
    )
    counts = gathered.splits

    def on_root() -> tf.Tensor:
        splits = _splits_of_input(node, counts)
        all_rows = _scatter_rows(gathered.rows, counts, splits)
        return _shaped_like_input(node, all_rows)

    def elsewhere() -> tf.Tensor:
        # Use the gathered rows, although this rank has none. Otherwise this rank would
        # not take part in the gradient of this gradient.
        shape = tf.shape(gathered.rows)
        count = tf.reduce_prod(tf.shape(node.inputs[0])[:1])
        zeros = tf.zeros(tf.concat([[count], shape[1:]], axis=0), gathered.rows.dtype)
        return _shaped_like_input(node, tf.concat([gathered.rows, zeros], axis=0))

    return [tf.cond(_is_root(node), on_root, elsewhere), None]


@_gradient_of("TfdistAlltoall")
def _alltoall_gradient(
    node: Any, grad: Any, _splits_grad: Any
) -> list[tf.Tensor | None]:
    """Sends the gradients of the received rows back to the ranks they came from."""
    rows, received_splits = node.outputs
    back, counts = emit.alltoall(
        tf.zeros_like(rows) if grad is None else tf.convert_to_tensor(grad),
        received_splits,
        _name(node),
        _timeout_s(node),
        process_set=_process_set(node),
    )
    all_rows = _scatter_rows(back, counts, _splits_of_input(node, counts))
    return [_shaped_like_input(node, all_rows), None]


@_gradient_of("TfdistSend")
def _send_gradient(node: Any, _grad: Any) -> tf.Tensor:
    """Receives the gradient of a send from the destination rank."""
    dst = node.get_attr("dst")
    (tensor,) = node.inputs
    return emit.recv(
        tf.shape(tensor, out_type=tf.int64),
        tensor.dtype,
        dst,
        _name(node, partner=f"from {dst}"),
        _timeout_s(node),
    )


@_gradient_of("TfdistRecv")
def _recv_gradient(node: Any, grad: Any) -> list[tf.Tensor | None]:
    """Sends the gradient back to the sender; the tensors of `after` get zeros."""
    src = node.get_attr("src")
    emit.send(
        tf.convert_to_tensor(grad),
        src,
        _name(node, partner=f"to {src}"),
        _timeout_s(node),
    )
    _, *after = node.inputs
    return [None, *(tf.zeros_like(tensor) for tensor in after)]


class _Node:
    """Stand-in for a node: the values in its input `call` appear as attributes.

    Args:
        node: node that TensorFlow passes to the gradient of an operation.
    """

    def __init__(self, node: Any) -> None:
        inputs = list(node.inputs)
        self._node = node
        self._in_call: dict[str, Any] = {}
        if inputs and inputs[-1].dtype == tf.string:
            self._in_call = attributes_of(inputs.pop())
        self.inputs = inputs
        self.outputs = node.outputs
        self.type = node.type

    def get_attr(self, name: str) -> Any:
        if name in self._in_call:
            return self._in_call[name]
        return self._node.get_attr(name)


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


def _callers(node: Any) -> tf.Tensor:
    """Returns how many ranks of the set make this call; excludes joined ranks."""
    [count] = emit.allreduce(
        [tf.constant(1.0, tf.float64)],
        _name(node, of="callers"),
        ReduceOp.SUM,
        "1.0",
        "1.0",
        _timeout_s(node),
        process_set=_process_set(node),
    )
    return count


def _is_root(node: Any) -> tf.Tensor:
    return tf.equal(ops().tfdist_topology()[0], node.get_attr("root"))


def _splits_of_input(node: Any, counts: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows for each rank; by default as even as possible."""
    tensor, given = node.inputs
    rows = tf.reduce_prod(tf.shape(tensor, out_type=tf.int64)[:1])  # 1 for a scalar
    size = tf.size(counts, out_type=tf.int64)
    even = rows // size + tf.cast(tf.range(size) < rows % size, tf.int64)
    return tf.cond(tf.size(given) > 0, lambda: given, lambda: even)


def _scatter_rows(rows: tf.Tensor, counts: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all ranks in order, with zeros for ranks that have joined.

    Args:
        rows: received rows, in rank order.
        counts: number of rows received from each rank.
        splits: number of rows that each rank has in the result.
    """
    total = tf.reduce_sum(splits)
    shape = tf.shape(rows, out_type=tf.int64)

    def spread() -> tf.Tensor:
        ranks = tf.searchsorted(tf.cumsum(splits), tf.range(total), side="right")
        places = tf.where(tf.gather(counts > 0, ranks))
        return tf.scatter_nd(places, rows, tf.concat([[total], shape[1:]], axis=0))

    return tf.cond(tf.equal(shape[0], total), lambda: rows, spread)


def _shaped_like_input(node: Any, rows: tf.Tensor) -> tf.Tensor:
    """Reshapes rows to the shape of the input; a scalar input was one row."""
    return tf.reshape(rows, tf.shape(node.inputs[0], out_type=tf.int64))


def _dense(node: Any, grads: Sequence[Any]) -> list[tf.Tensor]:
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, node.outputs, strict=True)
    ]


def _name(node: Any, *, partner: str = "", of: str = "gradient") -> str:
    name = f"{_text(node, 'tensor_name')}.{of}"
    process_set = 0 if partner else _process_set(node)  # send and recv have no set
    return operation_name(of, name, process_set=process_set, partner=partner)


def _process_set(node: Any) -> int:
    return int(node.get_attr("process_set"))


def _timeout_s(node: Any) -> float | None:
    return node.get_attr("timeout_s") or None


def _text(node: Any, attribute: str) -> str:
    value = node.get_attr(attribute)
    return value.decode() if isinstance(value, bytes) else str(value)
