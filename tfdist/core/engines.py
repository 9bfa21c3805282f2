"""Engine interface and selection of the engine that runs all collectives.

`TFDIST_ENGINE` selects the engine and must be equal on all ranks. "native" (the
default) is the core itself. "mpi" is also the core, but its links between hosts send
data over the site's MPI (`tfdist.core.mpi`). Other names are modules of
`tfdist.collectives.engines`. With every engine, the core connects the ranks, compares
their settings and detects failures; an engine's module replaces only the TensorFlow
operations. This module does not need TensorFlow, but loading an engine does.

To add an engine, write a module `collectives/engines/<name>.py` with a function `make()
-> Engine`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tfdist.core import mpi, native

if TYPE_CHECKING:
    from tfdist.core.rendezvous.mesh_types import Mesh

NATIVE = "native"
VARIABLE = "TFDIST_ENGINE"
_FOLDER = Path(__file__).resolve().parents[1] / "collectives" / "engines"


class Engine(Protocol):
    """Engine created by a module of `tfdist.collectives.engines`."""

    name: str

    def start(self, mesh: Mesh, timeout_s: float) -> None:
        """Connects this rank with the others; all ranks call it at the same time.

        Args:
            mesh: placement and address of this rank.
            timeout_s: time limit in seconds.

        Raises:
            native.CoreError: the ranks cannot connect; the message suggests a fix.
        """

    def close(self) -> None:
        """Disconnects this rank; raises nothing. The core is still connected."""

    def operations(self) -> Any:
        """Returns an object with the collective functions of the native library.

        Arguments and outputs are the same as for the registered operations, e.g.
        `operations().tfdist_allreduce(tensors=..., tensor_name=..., ...)`.
        `tfdist_topology()` is one of these functions.
        """

    def refusal(self, dtype: int, op: int) -> str | None:
        """Returns why `op` cannot reduce TensorFlow's dtype number `dtype`, or None."""

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Adds a process set; all ranks call it after they have agreed on the set."""

    def remove_process_set(self, number: int) -> None:
        """Removes a process set; all ranks call it after agreeing on the removal."""

    def finished_count(self) -> int:
        """Returns the number of operations that this process has finished."""

    def to_core_error(self, error: BaseException) -> native.CoreError | None:
        """Returns the core error for an operation's error; None for other errors."""


class UnsupportedError(NotImplementedError):
    """A feature that the native engine has, but the selected engine does not."""

    ag_pass_through = True  # otherwise AutoGraph raises its own class instead


def names() -> list[str]:
    """Returns the allowed values of `TFDIST_ENGINE`.

    Example:
        >>> from tfdist.core import engines
        >>> engines.names()
        ['native', 'mpi', 'horovod']
    """
    found = [info.name for info in pkgutil.iter_modules([str(_FOLDER)])]
    modules = sorted(name for name in found if not name.startswith("_"))
    return [NATIVE, mpi.NAME, *modules]


def requested() -> str:
    """Returns the name of the engine from the environment, after checking it.

    Raises:
        native.CoreError: there is no such engine.
    """
    name = str(native.value(VARIABLE))
    if name not in names():
        message = f"{VARIABLE}={name!r} is not one of {', '.join(names())}"
        raise native.CoreError(
            native.INVALID_ARGUMENT,
            message,
            {"kind": "invalid_argument", "cause": message},
        )
    return name


@functools.cache
def first() -> tuple[str, Engine | None]:
    """Returns the name of this process's engine, and its `Engine` object or None.

    The object is None if the engine is the core. A process keeps its first engine,
    because its functions are traced for that engine.

    Raises:
        native.CoreError: there is no such engine.
    """
    name = requested()
    if name in (NATIVE, mpi.NAME):
        return name, None
    module = importlib.import_module(f"tfdist.collectives.engines.{name}")
    return name, module.make()


def chosen() -> Engine | None:
    """Returns this process's `Engine` object, or None if the core is the engine.

    Raises:
        native.CoreError: there is no such engine.
    """
    return first()[1]


def uses_mpi() -> bool:
    """Returns whether the core of this process sends data over MPI."""
    return first()[0] == mpi.NAME


def check_unchanged() -> None:
    """Raises native.CoreError if the variable has changed since its first use."""
    before, now = first()[0], requested()
    if before != now:
        message = (
            f"{VARIABLE} is {now!r} now, but this process has used {before!r}; start a "
            "new process to use a different engine"
        )
        raise native.CoreError(
            native.INVALID_ARGUMENT,
            message,
            {"kind": "invalid_argument", "cause": message},
        )


def refuse(what: str) -> None:
    """Raises unless the core is the engine, because only the core supports `what`.

    Raises:
        UnsupportedError: the message names the engine and `what`.
    """
    engine = chosen()
    if engine is not None:
        raise_unsupported(engine.name, what)


def raise_unsupported(name: str, what: str) -> NoReturn:
    """Raises UnsupportedError, because engine `name` does not support `what`."""
    raise UnsupportedError(
        f"The engine {name!r} cannot do this: {what}. To use the native engine, which "
        f"can, unset {VARIABLE} on all ranks."
    )
