"""How optimizers update variables whose old values a snapshot keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

# Operations whose result may be a sum, and operations that Grappler looks through.
_SUMS = ("Add", "AddV2", "AddN", "PartitionedCall", "StatefulPartitionedCall")
_TRANSPARENT = ("Identity", "Neg")


def update_out_of_place(objects: Iterable[Any]) -> None:
    """Lets Keras optimizers write new values of variables to new memory.

    Keras's optimizers add to a variable in place (`assign_add`, `assign_sub`). If a
    `Snapshot` keeps the old value, TensorFlow first copies it, which for large
    variables takes as long as the update. After this call, they compute the sum in new
    memory instead and assign it, which has the same bits and copies nothing. Steps that
    were traced before are not affected. Updates by rows and Keras's weight decay stay
    as they are, and so do optimizers with an `assign_add` or `assign_sub` of their own.

    Args:
        objects: Keras optimizers, or models that were compiled with one; all other
            objects are ignored.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfdist.elastic.updates import update_out_of_place
        >>> w, sgd = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5)
        >>> update_out_of_place([sgd])
        >>> sgd.apply([tf.constant([1.0, 1.0])], [w])
        >>> w.numpy().tolist()
        [0.5, 1.5]
    """
    for one in objects:
        is_model = isinstance(one, keras.Model)
        optimizer = getattr(one, "optimizer", None) if is_model else one
        for part in _parts_of(optimizer):
            if not _has_own_updates(part):
                # Not by setattr: Keras tracks the attributes of optimizers.
                vars(part).update(assign_add=_assign_add, assign_sub=_assign_sub)


def _parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizer, and those inside of a wrapper or a `MultiOptimizer`."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return []
    inner = [getattr(optimizer, "inner_optimizer", None)]
    inner += getattr(optimizer, "_inner_optimizers", ())
    return [optimizer, *(part for one in inner for part in _parts_of(one))]


def _has_own_updates(optimizer: Any) -> bool:
    """Returns whether the class or the object replaces a method of Keras."""
    base, known = keras.optimizers.Optimizer, (_assign_add, _assign_sub)
    for name in ("assign_add", "assign_sub"):
        method = vars(optimizer).get(name, getattr(type(optimizer), name))
        if method is not getattr(base, name) and method not in known:
            return True
    return False


def _assign_add(variable: Any, value: Any) -> None:
    _assign(variable, value, lambda old, x: old + x, lambda old, x: old.scatter_add(x))


def _assign_sub(variable: Any, value: Any) -> None:
    _assign(variable, value, lambda old, x: old - x, lambda old, x: old.scatter_sub(x))


def _assign(
    variable: Any,
    value: Any,
    of_tensor: Callable[[Any, Any], Any],
    by_rows: Callable[[Any, Any], Any],
) -> None:
    if isinstance(variable, keras.Variable):
        variable = variable.value
    value = tf.cast(value, variable.dtype)
    if isinstance(value, tf.IndexedSlices):
        by_rows(variable, value)
    else:
        variable.assign(of_tensor(variable, _keep_together(value)))


def _keep_together(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose terms Grappler does not add to the variable one by one.

    Grappler, which optimizes graphs, replaces a + (b + c) by (a + b) + c, whose
    rounding differs. It does not look through a Snapshot operation, which copies
    nothing unless other operations use the value too.
    """
    op = getattr(value, "op", None)  # eager tensors have none
    while op is not None and op.type in _TRANSPARENT:
        op = op.inputs[0].op
    is_sum = op is not None and op.type in _SUMS
    return tf.raw_ops.Snapshot(input=value) if is_sum else value
