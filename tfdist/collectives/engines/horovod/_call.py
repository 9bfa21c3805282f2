"""One call of an operation: checks, name, counting and gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import tensorflow as tf

from tfdist.collectives.engines._differentiable import differentiable
from tfdist.collectives.engines.horovod import _waits
from tfdist.collectives.engines.horovod._counts import Counts
from tfdist.collectives.engines.horovod._sets import Sets
from tfdist.core import engines, runtime
from tfdist.core.native import Topology

_AGREED = ("reduce_op", "prescale", "postscale", "root")
_MOMENTS = "batch_norm."  # name prefix of operations that exchange batch statistics


class Owner(Protocol):
    """Part of the interface of `Operations` that a call uses."""

    sets: Sets
    counts: Counts

    def running(self) -> tuple[ModuleType, Topology]:
        """Returns Horovod and the topology; raises unless Horovod is running."""


class Call:
    """A call of an operation, with the arguments of the call."""

    def __init__(
        self,
        owner: Owner,
        kind: str,
        arguments: Mapping[str, Any],
        *,
        waits: bool,
    ) -> None:
        self.arguments = arguments
        self._owner = owner
        self._kind = kind
        self._waits = waits

    def check(self) -> None:
        """Raises if the process set was removed or the timeout is not supported.

        With a timeout in eager mode, also waits for the other ranks, at most that
        long, because operations of Horovod have no timeout.
        """
        number = self.arguments["process_set"]
        if number not in self._owner.sets:
            raise ValueError(f"Expected an existing process set, got number {number}.")
        timeout_s = self.arguments["timeout_s"]
        if timeout_s and self._waits:
            if not tf.executing_eagerly():
                engines.raise_unsupported(
                    "horovod",
                    "timeout_s of an operation in a tf.function (TFDIST_TIMEOUT_S "
                    "applies to all operations)",
                )
            _waits.for_all(f"{self.arguments['tensor_name']}.wait", number, timeout_s)

    def run(
        self,
        inputs: Sequence[tf.Tensor],
        forward: Callable[..., Sequence[tf.Tensor]],
        outputs: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
    ) -> list[tf.Tensor]:
        """Emits the operation with its gradient, and counts its completion."""
        self.check()
        given = [tf.convert_to_tensor(one) for one in inputs]
        if not given:
            return []
        number, name = self.arguments["process_set"], self.arguments["tensor_name"]
        checks = self._owner.sets.checks(number)
        if checks:
            with tf.control_dependencies(checks):
                given = [tf.identity(one) for one in given]
        return self._owner.counts.around(
            f"{self._kind} {number} {name}",
            given,
            lambda: differentiable(self._kind, self.arguments, given, forward, outputs),
            counts=not name.rpartition("/")[2].startswith(_MOMENTS),
        )

    def options(self) -> dict[str, Any]:
        """Returns name and process set in the form that Horovod expects."""
        horovod_id = self._owner.sets[self.arguments["process_set"]]
        # Horovod compares shapes and dtypes of the ranks, but not the other options of
        # tfdist. So these are a part of the name, by which calls are matched.
        parts = ["tfdist", self._kind, self.arguments["tensor_name"]]
        parts += [str(self.arguments[key]) for key in _AGREED if key in self.arguments]
        name = re.sub(r"[^A-Za-z0-9_.]", "_", ".".join(parts).strip("."))
        return {
            "name": name,
            # Inlining a function prefixes the name with the caller's name.
            "ignore_name_scope": True,
            "process_set": SimpleNamespace(process_set_id=horovod_id),
        }

    def size(self) -> tf.Tensor:
        """Returns the number of ranks that take part, as int32."""
        horovod_id = self._owner.sets[self.arguments["process_set"]]
        found: tf.Tensor = self._owner.running()[0].size_op(process_set_id=horovod_id)
        return found

    def root(self) -> int:
        """Returns the root, as a rank of the job."""
        root, members = self.arguments["root"], self._members()
        if root not in members:
            raise tf.errors.InvalidArgumentError(
                None, None, f"Expected root to be one of {list(members)}, got {root}."
            )
        return int(root)

    def place_of_root(self) -> int:
        """Returns the index of the root among the ranks that take part."""
        return list(self._members()).index(self.root())

    def place(self) -> int:
        """Returns the index of this rank among the ranks that take part."""
        _, topology = self._owner.running()
        return list(self._members()).index(topology.rank)

    def _members(self) -> Sequence[int]:
        number = self.arguments["process_set"]
        for one in runtime.live_sets():
            if one.id == number:
                return one.ranks
        return range(self._owner.running()[1].size)
