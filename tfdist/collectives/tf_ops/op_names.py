"""Default names of operations: the same on every rank and in every retrace.

The core matches operations of different ranks by name, so a name must not contain
anything that differs between ranks or traces. (TensorFlow's node names do.) A name
consists of the traced functions around the call and a count within each function, for
example "train_step/while_body/allreduce.2".

All eager calls of one kind have the same name, such as "allreduce.eager": they are
matched in program order.

Calls with the same name are matched in the order in which each rank makes them. This
order is the same on all ranks only if one thread makes the calls. So a name belongs to
the thread that uses it (`NameOwners`). If a second thread uses it, an error is raised
(`claim`).
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.core import native, runtime
from tfdist.core.registry import WeakRegistry

# Graph → number of uses of each base name.
_name_counts: WeakRegistry[Counter[str]] = WeakRegistry()
# Graph → names of its function and the functions around it, e.g.
# "train_step/cond_true".
_labels: WeakRegistry[str] = WeakRegistry()
_MAX_NAMES = 4096  # number of remembered names; beyond it, the oldest is dropped
Key = tuple[int, str]  # id of the process set, name


def operation_name(
    kind: str, name: str | None, *, process_set: int = 0, partner: str = ""
) -> str:
    """Returns the name for an operation that is being called or traced.

    Args:
        kind: "allreduce", "broadcast", ...
        name: the user's name; None: choose a name.
        process_set: id of the process set that makes the call; default: all ranks.
            Calls of each set are counted separately, because not all ranks make them.
        partner: direction and rank of the partner in a send or recv, e.g. "to 1"; calls
            with different partners are counted separately.

    Returns:
        In eager mode `name`, or "<kind>.eager". In a graph, `name`, with a count from
        the second use on; without `name`, the traced functions around the call, the
        kind and a count, e.g. "train_step/allreduce.0".
    """
    if tf.executing_eagerly():
        return name or f"{kind}.eager"
    graph = tf.compat.v1.get_default_graph()
    uses = _count(graph, f"{process_set} {name or kind}{partner}")
    if name is None:
        return f"{_label(graph)}/{kind}.{uses}"
    return name if uses == 0 else f"{name}.{uses}"


def batch_name(base: str, number: int) -> str:
    """Returns the name of one of several operations that reduce or send a list.

    It differs from the names of repeated calls, which end in ".1", ".2", ...

    Args:
        base: name of the call, from `operation_name`.
        number: index of the operation; the first has the name of the call.

    Example:
        >>> from tfdist.collectives.tf_ops.op_names import batch_name
        >>> batch_name("step/grouped_allreduce.0", 1)
        'step/grouped_allreduce.0[1]'
    """
    return f"{base}[{number}]" if number else base


def place_of(graph: Any) -> str:
    """Returns the traced functions around a call, e.g. "train_step/cond_true".

    Unlike the name of an operation, the result contains no counts.
    """
    outer = getattr(graph, "outer_graph", None)
    if outer is None or not getattr(outer, "name", None):
        return _graph_name(graph)
    return f"{place_of(outer)}/{_graph_name(graph)}"


def _label(graph: Any) -> str:
    if graph in _labels:
        return str(_labels.get(graph))
    own = _graph_name(graph)
    outer = getattr(graph, "outer_graph", None)
    label = own
    if outer is not None and getattr(outer, "name", None):
        uses = _count(outer, own + "/")
        label = f"{_label(outer)}/{own}" + (f".{uses}" if uses else "")
    _labels.set(graph, label)
    return label


def _graph_name(graph: Any) -> str:
    name = getattr(graph, "name", None) or "graph"
    # Branches, loop bodies and backward functions are numbered by what TensorFlow has
    # traced before, which differs between ranks. User functions are not.
    if type(graph).__name__ != "FuncGraph" or name.startswith("__"):
        name = re.sub(r"_\d+(?=_|$)", "", name)
    return str(name).strip("_")


def _count(graph: Any, key: str) -> int:
    counts = _name_counts.get(graph)
    if counts is None:
        counts = _name_counts.set(graph, Counter())
    counts[key] += 1
    return int(counts[key] - 1)


class NameOwners:
    """Record of which thread uses which name.

    A second thread may use a name if all ranks agree on the order of the two threads:

    - The second thread was started after the last use of the name. The thread that
      started it had then passed that use, on every rank.
    - The second thread is the main thread, and the first has ended. (If the main thread
      comes first on another rank, the other thread is rejected there.)

    So a use that could make ranks match calls of different threads raises an error on
    at least one rank. All threads that Python did not start (TensorFlow's threads) are
    treated as one thread.

    Attributes:
        calls: number of calls of `use`.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.RLock()  # a signal handler may also call operations
        self._uses: dict[Key, tuple[weakref.ref[threading.Thread], int]] = {}
        # A turn lasts until the list of running threads changes. Each thread is stored
        # with the turn of the first `use` that found it running.
        self._seen: list[threading.Thread] = []
        self._turn = 0
        self._first_turns: weakref.WeakKeyDictionary[threading.Thread, int] = (
            weakref.WeakKeyDictionary()
        )

    def use(self, keys: Iterable[Key]) -> tuple[Key, str] | None:
        """Records that the calling thread uses the names.

        Returns:
            None if the use is allowed. Otherwise the name in use and its thread's name.
        """
        thread = threading.current_thread()
        with self._lock:
            self.calls += 1
            turn = self._look()
            for key in keys:
                known = self._uses.get(key)
                if known is not None:
                    user, last_turn = known[0](), known[1]
                    if user is thread and last_turn == turn:
                        continue
                    if not self._may_follow(thread, user, last_turn):
                        return key, "(ended)" if user is None else user.name
                self._uses[key] = (weakref.ref(thread), turn)
                if len(self._uses) > _MAX_NAMES:
                    del self._uses[next(iter(self._uses))]
        return None

    def close(self) -> None:
        """Does nothing: there is nothing to close (`runtime.Resource`)."""

    def _look(self) -> int:
        """Returns how often the list of running threads has changed so far."""
        running = threading.enumerate()
        if running != self._seen:
            self._turn += 1
            self._seen = running
            for thread in running:
                self._first_turns.setdefault(thread, self._turn)
        return self._turn

    def _may_follow(
        self, thread: threading.Thread, user: threading.Thread | None, last_turn: int
    ) -> bool:
        if user is thread:
            return True
        if isinstance(thread, threading._DummyThread):
            return isinstance(user, threading._DummyThread)
        if self._first_turns[thread] > last_turn:
            return True
        is_main = thread is threading.main_thread()
        return is_main and (user is None or not user.is_alive())


@functools.lru_cache(maxsize=1)
def _owners(generation: int) -> NameOwners:
    """Returns the record of the current generation, cached by its number."""
    return runtime.get_resource("names", NameOwners)


def eager_calls() -> int:
    """Returns how often names were claimed in this world; 0 in a world of one rank.

    Eager operations claim names, and so do calls of functions that contain operations.
    """
    return _owners(runtime.generation()).calls


def key_of(
    name: str, *, process_set: int = 0, src: int | None = None, dst: int | None = None
) -> Key:
    """Returns the key by which calls of an operation are matched across ranks.

    Args:
        name: name of the operation.
        process_set: id of the process set that calls the operation.
        src: source rank of a `recv`, which is matched only with calls of that rank.
        dst: destination rank of a `send`, likewise.

    Example:
        >>> from tfdist.collectives.tf_ops.op_names import key_of
        >>> key_of("a"), key_of("a", dst=1)
        ((0, 'a'), (0, 'a to 1'))
    """
    partner = "" if src is None else f" from {src}"
    partner += "" if dst is None else f" to {dst}"
    return process_set, f"{tf.compat.as_str(name)}{partner}"


def claim(keys: Iterable[Key]) -> None:
    """Records that this thread uses the names; called before each operation.

    Has no effect in a world of one rank.

    Raises:
        tfdist.ThreadError: another thread uses one of the names; the job ends.
        tfdist.NotInitializedError: `tfdist.init()` has not been called.
    """
    if runtime.check_initialized().size == 1:
        return
    found = _owners(runtime.generation()).use(keys)
    if found is None:
        return
    (process_set, name), user = found
    of_set = f" of process set {process_set}" if process_set else ""
    text = (
        f"threads {user!r} and {threading.current_thread().name!r} both call {name!r}"
        f"{of_set}. Ranks match calls of the same name by their order, and two threads "
        "may call in a different order on each rank. Call tfdist from one thread, or "
        "pass a different name= to the operations, tapes and optimizers of each thread "
        "(the same names on all ranks). The callbacks of tfdist, tfdist.evaluate and "
        "tfdist.predict do not accept a name: run fit, evaluate and predict in one "
        "thread."
    )
    native.abort(text)
    raise errors.ThreadError(
        f"rank {runtime.rank()}: {text}",
        errors.ErrorRecord(
            kind="threads", rank=runtime.rank(), tensor=name, cause=text
        ),
    )
