"""Gradients that need no reduction any more.

Who has reduced gradients says so here, for two questions: whether an optimizer that
takes a step was given reduced ones (`tfdist.horovod`), and whether one that reduces
them itself was.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_library import native_ops
from tfdist.core import native
from tfdist.core.process_sets import ProcessSet, id_of
from tfdist.gradients.graph_walk import key_of, origins
from tfdist.gradients.options import ReduceOptions

_logger = logging.getLogger("tfdist")

# Attributes of a graph: names of tensors → what is known of them.
_SETTLED, _BY_TAPE = "_tfdist_settled", "_tfdist_by_tape"
# How a tape has reduced: the process set, and whether it was a sum.
_How = tuple[int, bool]
# Of eager tensors: id → reference, and that.
_eager_by_tape: dict[int, tuple[weakref.ref[Any], _How]] = {}
# Ids of those of them that an optimizer was given.
_used: set[int] = set()
# How many tensors are looked at between a tape and an optimizer: clipping and scaling
# make a few.
_BETWEEN = 64


def elements_of(grads: Iterable[Any]) -> int:
    """Elements of gradients whose shapes are known; None and others count for 0."""
    sizes = [values_of(g).shape.num_elements() for g in grads if g is not None]
    return sum(size or 0 for size in sizes)


def whole_elements_of(grads: Iterable[Any]) -> int:
    """The same, with those of the whole table for `tf.IndexedSlices`."""
    total = 0
    for grad in grads:
        table = table_elements_of(grad)
        total += elements_of([grad]) if table is None else table
    return total


def table_elements_of(grad: Any) -> int | None:
    """Elements of the table of a sparse gradient, where that is known; else None."""
    shape = grad.dense_shape if isinstance(grad, tf.IndexedSlices) else None
    known = None if shape is None else tf.get_static_value(shape)
    return None if known is None else math.prod(map(int, known))


def values_of(grad: Any) -> Any:
    """The tensor of a gradient, of `tf.IndexedSlices` that of their values."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def elements_at_run(grads: Sequence[Any]) -> tf.Tensor:
    """Elements of gradients of which some may have shapes that are known later.

    Those of tables first as the whole table, as which their reductions count, then as
    rows, which the script may have reduced by itself.
    """

    def total(known: int, others: Iterable[Any]) -> tf.Tensor:
        later = [v for v in map(values_of, others) if not v.shape.is_fully_defined()]
        sizes = [tf.size(v, out_type=tf.int64) for v in later]
        return tf.add_n([tf.constant(known, tf.int64), *sizes])

    no_tables = [g for g in grads if table_elements_of(g) is None]
    whole = total(whole_elements_of(grads), no_tables)
    return tf.stack([whole, total(elements_of(grads), grads)])


def mark_local(grads: Iterable[Any], *, counted: bool = True) -> list[Any]:
    """Says of gradients that they shall stay those of this rank.

    Args:
        grads: None and `tf.IndexedSlices` among them.
        counted: whether they count as reduced ones do; False: a reduction that they
            come with counts for them too.

    Returns:
        The gradients, to be used in their place.
    """
    return [None if g is None else _settled(g, counted) for g in grads]


def _settled(grad: Any, counted: bool) -> Any:
    values = values_of(grad)
    counted = counted and emit.is_counting()
    if not tf.is_symbolic_tensor(values):
        if counted:
            native.count_reduced(whole_elements_of([grad]))
        return grad
    if counted and not emit.inside_xla():
        # When the function runs; what takes its gradients comes after it.
        with tf.control_dependencies(
            [native_ops().tfdist_count_reduced(elements_at_run([grad])[0])]
        ):
            values = tf.identity(values)
    _notes(values, _SETTLED)[values.name] = True
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return values


def is_settled(tensor: Any) -> bool:
    """Whether `settle` was told of a symbolic tensor."""
    return tensor.name in getattr(tensor.graph, _SETTLED, ())


def note_tape(
    grads: Iterable[Any], process_set: ProcessSet | None, op: ReduceOp
) -> None:
    """Remembers that a DistributedGradientTape has reduced these gradients."""
    how = id_of(process_set), op is ReduceOp.SUM
    for grad in grads:
        if grad is None:
            continue
        values = values_of(grad)
        if tf.is_symbolic_tensor(values):
            _notes(values, _BY_TAPE)[values.name] = how
        elif isinstance(values, tf.Tensor):
            key = id(values)
            gone = functools.partial(_forget, key)
            _eager_by_tape[key] = (weakref.ref(values, gone), how)


def consume_tape_gradients(grads: Iterable[Any]) -> bool | None:
    """Notes of eager gradients that a step uses them.

    Args:
        grads: of one step; None and `tf.IndexedSlices` among them.

    Returns:
        True: all come as they are from a DistributedGradientTape, and no other step has
        used one; False: all do, and another has; None: of some it is not known.
    """
    values = [values_of(g) for g in grads if g is not None]
    if any(tf.is_symbolic_tensor(v) or _by_tape(v) is None for v in values):
        return None
    keys = set(map(id, values))
    is_new = not keys & _used
    _used.update(keys)
    return is_new


def check_reduced_once(grads: Iterable[Any], options: ReduceOptions, name: str) -> None:
    """Raises if an optimizer would add up what a tape has added up over the same ranks.

    Where one of the two is an average, the other reduction is only in vain (the
    average of equal gradients, or the sum of averages), which is said once.

    Args:
        grads: that the optimizer is given.
        options: how it reduces them.
        name: of the optimizer.

    Raises:
        ValueError: both add up: they would be too large by the number of ranks.
    """
    members = id_of(options.process_set)
    found = {_by_tape(values_of(g)) for g in grads if g is not None}
    found &= {(members, True), (members, False)}
    if not found:
        return
    twice = (
        f"The gradients of optimizer {name!r} are reduced twice: by a "
        "DistributedGradientTape and by DistributedOptimizer"
    )
    remove = (
        "Remove one of the two: with tape.gradient() and optimizer.apply() in a loop "
        "of your own keep the DistributedGradientTape, and give it the optimizer "
        "without DistributedOptimizer"
    )
    if options.op is ReduceOp.SUM and (members, True) in found:
        raise ValueError(
            f"{twice}, both with op=Sum, which makes them too large by the number of "
            f"ranks. {remove}."
        )
    warn_once(f"{twice}, of which one changes nothing and costs time. {remove}.")


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Logs a warning, unless it was logged before."""
    _logger.warning("%s", text)


def _by_tape(tensor: Any) -> _How | None:
    """How a tape has reduced a tensor; None: none has.

    In a graph also where the tensor was clipped or scaled since.
    """
    if not tf.is_symbolic_tensor(tensor):
        known = _eager_by_tape.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None
    seen: set[tuple[int, str]] = set()
    waiting = collections.deque([tensor])
    while waiting and len(seen) < _BETWEEN:
        one = waiting.popleft()
        if key_of(one) in seen:
            continue
        seen.add(key_of(one))
        how: _How | None = getattr(one.graph, _BY_TAPE, {}).get(one.name)
        if how is not None:
            return how
        # A gradient keeps its shape; what is of another one is no part of it.
        waiting += [t for t in origins(one) if _same_shape(t, tensor)]
    return None


def _same_shape(one: Any, other: Any) -> bool:
    known: bool = one.shape.rank is not None and other.shape.rank is not None
    return known and one.shape.as_list() == other.shape.as_list()


def _forget(key: int, _reference: Any) -> None:
    _eager_by_tape.pop(key, None)
    _used.discard(key)


def _notes(tensor: Any, attribute: str) -> dict[str, Any]:
    notes: dict[str, Any] | None = getattr(tensor.graph, attribute, None)
    if notes is None:
        notes = {}
        setattr(tensor.graph, attribute, notes)
    return notes
