"""Compares weights within training steps, unless a tfdist callback compares them.

The ranks compare the weights that the step updates and, in a job without process sets,
the other weights of the same model. They do so in the 2nd, 4th, 8th, ..., 1024th step
that reduces the same gradient list, and then in every 1024th such step. In a
`tf.function` the comparison is a branch of the graph. All ranks count the reductions of
a gradient list, so all ranks take the branch in the same step. The first step is
skipped: programs may broadcast the initial weights only after the first step, when the
optimizer has created its variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.collectives import ReduceOp, after_join, allgather, allreduce
from tfdist.collectives.consistency.comparison import compare, is_on, only_warns
from tfdist.collectives.consistency.explanation import (
    STATE,
    TRAINED,
    RankState,
    explain,
)
from tfdist.collectives.consistency.fingerprint import (
    combine_in_graph,
    fingerprints,
    fingerprints_in_graph,
)
from tfdist.collectives.local_variables import identity
from tfdist.collectives.per_rank_variables import (
    broadcast_with,
    is_declared,
    shared_weights,
    were_broadcast,
)
from tfdist.collectives.signature import path_of
from tfdist.collectives.tf_ops.op_library import native_ops
from tfdist.core import engines, runtime
from tfdist.core.process_sets import ProcessSet, id_of, members_of
from tfdist.core.rendezvous import renewal

FIRST_CHECK = 2
_DENSE_UP_TO = 1024
# Largest number of bytes of a variable that are hashed, so that a step stays fast.
_LIMIT_BYTES = 64 << 20

_Key = tuple[int, str]  # number of the process set, id of the gradient list


class _Counts:
    """The number of reductions of each gradient list in this world.

    Several threads may count at the same time. Each thread reduces its own gradient
    lists, and the dictionaries are read, changed and copied by atomic operations only.
    """

    def __init__(self) -> None:
        self._eager: dict[_Key, int] = {}
        self._graph: dict[_Key, tf.Variable] = {}

    def add_eager(self, key: _Key) -> int:
        """Counts a reduction in eager mode; returns the number of reductions."""
        count = self._eager[key] = self._eager.get(key, 0) + 1
        return count

    def in_graph(self, key: _Key) -> tf.Variable:
        """Returns the count that all traces of a function share."""
        if key not in self._graph:
            # A later trace of a tf.function must not create a tf.Variable.
            with tf.init_scope():
                self._graph[key] = ResourceVariable(0, dtype=tf.int64, trainable=False)
        return self._graph[key]

    def of_graphs(self) -> dict[_Key, tf.Variable]:
        """Returns the counts that graphs increment."""
        return self._graph.copy()

    def take_over(self, of_graphs: Mapping[_Key, tf.Variable]) -> None:
        """Takes over the counts that an earlier world's graphs increment; resets them.

        Args:
            of_graphs: result of `of_graphs` in the earlier world.
        """
        for key, count in of_graphs.items():
            count.assign(0)
            self._graph[key] = count

    def reset(self, set_id: int) -> None:
        """Resets the counts of a process set."""
        for key in list(self._eager):
            if key[0] == set_id:
                self._eager[key] = 0
        for key, count in list(self._graph.items()):
            if key[0] == set_id:
                count.assign(0)

    def close(self) -> None:
        """Does nothing, because nothing is open."""


def is_due(count: int) -> bool:
    """Returns whether the ranks compare their weights in this reduction of a list.

    Args:
        count: number of the reduction, starting with 1.

    Example:
        >>> [n for n in range(1, 100) if is_due(n)]
        [2, 4, 8, 16, 32, 64]
    """
    if count > _DENSE_UP_TO:
        return count % _DENSE_UP_TO == 0
    return count > 1 and count & (count - 1) == 0


def compare_in_step(
    variables: Sequence[Any],
    reduced: list[Any],
    list_id: str,
    process_set: ProcessSet | None,
    *,
    advice: str = "",
) -> list[Any]:
    """Compares weights in some steps; called in every step, or when a step is traced.

    Args:
        variables: variables whose gradients are reduced, without local variables.
        reduced: the reduced gradients; entries may be None. In a graph, the step fails
            only after they are reduced, so that no rank cancels an operation for which
            other ranks wait.
        list_id: id of the gradient list.
        process_set: ranks that reduce; None: all ranks.
        advice: sentences at the end of the error message.

    Returns:
        `reduced`. In a graph, one of the gradients depends on the comparison, so that
        a check of the gradients in the program cannot fail the step while other ranks
        wait for this rank in the comparison.

    Raises:
        tfdist.MismatchError: on all ranks in eager mode, if the weights differ. In a
            graph, the step raises `tf.errors.FailedPreconditionError`.
    """
    if not (variables and is_on() and may_have_other_ranks(process_set)):
        return reduced
    key = (id_of(process_set), list_id)
    if tf.executing_eagerly():
        count = _counts().add_eager(key)
        if is_due(count) and not _callbacks_compare():
            _compare_now(
                _variables_to_compare(variables, process_set),
                count,
                key,
                process_set,
                advice,
            )
        return reduced
    graph = tf.compat.v1.get_default_graph()
    # Other engines have no operation that fails a step.
    can_fail = graph.building_function and engines.chosen() is None
    if can_fail and not _callbacks_compare():
        to_compare = _variables_to_compare(variables, process_set)
        return _compare_when_run(to_compare, reduced, key, process_set, advice)
    return reduced


def may_have_other_ranks(process_set: ProcessSet | None = None) -> bool:
    """Returns whether a step that is traced now may run with other ranks."""
    return len(members_of(process_set)) > 1 or renewal.is_elastic(os.environ)


def _compare_now(
    to_compare: list[tuple[Any, str]],
    count: int,
    key: _Key,
    process_set: ProcessSet | None,
    advice: str,
) -> None:
    state = RankState(
        rank=runtime.rank(),
        names=[path_of(v) for v, _ in to_compare],
        kinds=[kind for _, kind in to_compare],
        fingerprints=fingerprints([v for v, _ in to_compare]),
        were_broadcast=were_broadcast([v for v, _ in to_compare]),
    )
    compare(
        state,
        _moment(count),
        process_set,
        is_first=count == FIRST_CHECK,
        name=_name(key),
        advice=advice,
    )


def _compare_when_run(
    to_compare: list[tuple[Any, str]],
    reduced: list[Any],
    key: _Key,
    process_set: ProcessSet | None,
    advice: str,
) -> list[Any]:
    names = [path_of(v) for v, _ in to_compare]
    kinds = [kind for _, kind in to_compare]
    count = _counts().in_graph(key).assign_add(1)

    def explain_rows(rows: np.ndarray, number: np.ndarray) -> bytes:
        were_sent = were_broadcast([v for v, _ in to_compare])
        states = [
            RankState(
                int(rank),
                names,
                kinds,
                [int(one) for one in own],
                were_broadcast=were_sent,
            )
            for rank, *own in rows
        ]
        is_first = int(number) == FIRST_CHECK
        text = explain(states, _moment(int(number)), is_first=is_first)
        text = f"{text} {advice}".rstrip()
        return b"" if only_warns(text) else text.encode()

    def differ(hashes: tf.Tensor) -> tf.Tensor:
        own_rank = tf.numpy_function(
            lambda: np.int64(runtime.rank()), [], tf.int64, stateful=True
        )
        row = tf.concat([[tf.reshape(own_rank, [])], hashes], 0)
        rows = allgather(
            row[tf.newaxis], name=f"{_name(key)}.states", process_set=process_set
        )
        return tf.ensure_shape(
            tf.numpy_function(explain_rows, [rows, count], tf.string), []
        )

    def check() -> tf.Tensor:
        hashes = fingerprints_in_graph([v for v, _ in to_compare], _LIMIT_BYTES)
        own = combine_in_graph(hashes)
        largest = allreduce(
            tf.stack([own, tf.bitwise.invert(own)]),
            op=ReduceOp.MAX,
            name=_name(key),
            process_set=process_set,
        )
        is_equal = tf.equal(largest[0], tf.bitwise.invert(largest[1]))
        return tf.cond(is_equal, lambda: tf.constant(""), lambda: differ(hashes))

    message = tf.cond(_is_due_in_graph(count), check, lambda: tf.constant(""))
    with tf.control_dependencies([g for g in reduced if g is not None]):
        native_ops().tfdist_fail(message=message)
    for place, gradient in enumerate(reduced):
        if isinstance(gradient, tf.Tensor):
            with tf.control_dependencies([message]):
                checked = tf.identity(gradient)
            return [*reduced[:place], checked, *reduced[place + 1 :]]
    return reduced


def _variables_to_compare(
    variables: Sequence[Any], process_set: ProcessSet | None
) -> list[tuple[Any, str]]:
    """Returns the variables to compare and their kinds, in one order on all ranks."""
    found = {identity(v): (v, TRAINED) for v in variables}
    # In a job with process sets, a subset of the ranks may train a part of a model.
    if process_set is None and not runtime.live_sets():
        model = _model_in_step()
        others = broadcast_with(variables) if model is None else shared_weights(model)
        for v in others:
            kind = TRAINED if getattr(v, "trainable", False) else STATE
            found.setdefault(identity(v), (v, kind))
    return [(v, kind) for v, kind in found.values() if not is_declared(v)]


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _model_in_step() -> keras.Model | None:
    """Returns the model whose `train_step` is running or being traced, or None."""
    for frame in _frames():
        if frame.f_code.co_name == "train_step":
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model):
                return model
    return None


def _callbacks_compare() -> bool:
    """Returns whether a tfdist callback of the running `fit` compares the weights."""
    for frame in _frames():
        if frame.f_code.co_name != "fit":
            continue
        listed = getattr(frame.f_locals.get("callbacks"), "callbacks", ())
        if any(hasattr(one, "settings_of_all_ranks") for one in listed):
            return True
    return False


def _is_due_in_graph(count: tf.Tensor) -> tf.Tensor:
    is_power = tf.equal(tf.bitwise.bitwise_and(count, count - 1), 0)
    in_beginning = (count > 1) & (count <= _DENSE_UP_TO) & is_power
    return in_beginning | ((count > _DENSE_UP_TO) & tf.equal(count % _DENSE_UP_TO, 0))


def _counts() -> _Counts:
    return runtime.get_resource("consistency/counts", _Counts)


def counts_in_graphs() -> dict[_Key, tf.Variable]:
    """Returns the counts that traced functions of this world increment."""
    return _counts().of_graphs()


def restart_counts(of_graphs: Mapping[_Key, tf.Variable]) -> None:
    """Lets traced functions of an earlier world count from 0 in the current world.

    Args:
        of_graphs: result of `counts_in_graphs` in the earlier world.
    """
    _counts().take_over(of_graphs)


def _reset_counts(set_id: int) -> None:
    """Resets the counts after a join: ranks without data have not counted."""
    _counts().reset(set_id)


after_join.append(_reset_counts)


def _name(key: _Key) -> str:
    return f"comparison of weights.{key[1][:8]}"


def _moment(count: int) -> str:
    return f"before the update of step {count}"
