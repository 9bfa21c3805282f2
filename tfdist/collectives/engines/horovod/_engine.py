"""Loads, starts and stops Horovod in this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING

import psutil
import tensorflow as tf

from tfdist.collectives.engines.horovod import _errors, _start, _types, _waits
from tfdist.collectives.engines.horovod._operations import Operations
from tfdist.collectives.engines.horovod._sets import Sets
from tfdist.collectives.engines.horovod._store import Store
from tfdist.collectives.engines.horovod._watch import Watch
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.core import native
from tfdist.core.rendezvous.environment import detect

if TYPE_CHECKING:
    from tfdist.core.rendezvous.mesh_types import Mesh

_CLOSE_S = 1.5
_DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
_LOOPBACK = "127.0.0.1"
# Launchers that provide MPI. A Horovod built with MPI then connects the ranks over MPI.
_MPI_LAUNCHERS = ("openmpi", "mpich", "pals")


class HorovodEngine:
    """Engine that runs operations in Horovod; see `tfdist.core.engines.Engine`."""

    name = "horovod"

    def __init__(self) -> None:
        self._store: Store | None = None
        self._variables_set: list[str] = []  # variables that `start` has set
        self._horovod: ModuleType | None = None
        self._watch: Watch | None = None
        self._is_connected = False
        self._sets = Sets()
        self._operations = Operations(self._sets)

    def start(self, mesh: Mesh, timeout_s: float) -> None:
        """Connects Horovod's ranks; uses loopback if all ranks are on one host."""
        rows = native.config()
        refused = _start.refused_setting(rows)
        if refused is not None:
            raise _invalid_error(refused)
        horovod = self._load()
        topology = mesh.topology
        source = detect(os.environ).source
        by_launcher = source == "horovodrun" or (
            source in _MPI_LAUNCHERS
            and horovod.mpi_built()
            and os.environ.get("HOROVOD_CONTROLLER", "mpi") == "mpi"
        )
        if not by_launcher:
            store = self._meet(mesh, timeout_s)
            found = _start.variables(
                topology,
                store=store,
                interface=_interface(mesh),
                timeout_s=timeout_s,
            )
            self._export(found)
        self._export({_DYNAMIC_SETS: "1"})
        # Start only if all ranks can start.
        native.register_gradient_list(
            "horovod starts\nengine", [True], timeout_s=timeout_s
        )
        try:
            horovod.init()
        except Exception as error:  # Horovod may raise any exception
            raise _failed_error(f"Horovod did not start: {error}") from error
        atexit.unregister(horovod.shutdown)  # it would run before `close`
        place = horovod.rank(), horovod.size()
        if place != (topology.rank, topology.size):
            raise _failed_error(
                f"Horovod identifies this process as rank {place[0]} of {place[1]}, "
                f"but it is rank {topology.rank} of {topology.size} (by {source}); "
                "start it with only one launcher: tfdistrun, Horovod's horovodrun, or "
                "mpirun"
            )
        self._sets.start()
        self._operations.start(horovod, topology)
        self._is_connected = True
        limit_s = rows["TFDIST_TIMEOUT_S"]["value"]
        self._watch = Watch(self._operations.counts, horovod.shutdown, limit_s)

    def close(self) -> None:
        """Shuts Horovod down, after waiting for the other ranks.

        As soon as one rank shuts Horovod down, the operations of all ranks end. So the
        ranks first wait for each other, at most TFDIST_TIMEOUT_S, and only until one
        of them has failed.
        """
        running = self._horovod is not None and self._horovod.is_initialized()
        if running and self._is_connected and native.failure() is None:
            _waits.unless_lost("horovod.shutdown")
        self._is_connected = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._horovod is not None and running:
            ending = threading.Thread(target=self._horovod.shutdown, daemon=True)
            ending.start()
            ending.join(_CLOSE_S)
        if self._store is not None:
            self._store.close()
            self._store = None
        for name in self._variables_set:
            os.environ.pop(name, None)
        self._variables_set.clear()
        self._operations.end()
        self._sets.clear()

    def operations(self) -> Operations:
        """Returns Horovod's operations under tfdist's operation names."""
        return self._operations

    def refusal(self, dtype: int, op: int) -> str | None:
        """Returns the reason why Horovod cannot reduce `dtype` by `op`, or None."""
        return _types.refusal(tf.dtypes.as_dtype(dtype), ReduceOp(op))

    def add_process_set(self, number: int, ranks: Sequence[int]) -> None:
        """Adds the process set in Horovod."""
        horovod = self._require_horovod()
        everybody = len(ranks) == horovod.size()
        horovod_id = (
            0 if everybody else horovod.add_process_set(list(ranks)).process_set_id
        )
        self._sets.add(number, horovod_id)

    def remove_process_set(self, number: int) -> None:
        """Removes the process set in Horovod."""
        horovod_id = self._sets.remove(number)
        if horovod_id != 0:
            from horovod.common.process_sets import _temp_process_set_object

            self._require_horovod().remove_process_set(
                _temp_process_set_object(horovod_id)
            )

    def finished_count(self) -> int:
        """Returns how many operations have ended, excluding batch statistics."""
        return self._operations.counts.operation_count()

    def to_core_error(self, error: BaseException) -> native.CoreError | None:
        """Converts an error of Horovod to a core error; None for other errors."""
        if "{{node " in str(error):  # the error of a traced function
            self._operations.counts.forget()
        late = self._watch.late if self._watch is not None else None
        return _errors.to_core_error(error, late)

    def _require_horovod(self) -> ModuleType:
        if self._horovod is None:
            raise RuntimeError("the engine was used before it was started")
        return self._horovod

    def _load(self) -> ModuleType:
        """Returns the module `mpi_ops` of the installed Horovod.

        Raises:
            native.CoreError: Horovod is not installed, or cannot be loaded.
        """
        if self._horovod is None:
            version = None
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = metadata.version("horovod")
            try:
                from horovod.tensorflow import mpi_ops
            except Exception as error:  # ImportError, NotFoundError of TensorFlow, ...
                text = _start.missing(version, tf.__version__)
                raise _invalid_error(f"{text} ({error})") from error
            if "tfdist" in (mpi_ops.__name__ + str(mpi_ops.__file__)):
                raise _invalid_error(
                    "TFDIST_ENGINE=horovod needs an installed Horovod, but `tfdistrun "
                    "--horovod` replaces it with tfdist. Use only one of the two."
                )
            self._horovod = mpi_ops
        return self._horovod

    def _meet(self, mesh: Mesh, timeout_s: float) -> tuple[str, int]:
        """Returns the address of rank 0's store, which the core sends to all ranks."""
        own_address = ""
        if mesh.topology.rank == 0:
            address = _LOOPBACK if _is_one_host(mesh) else mesh.address
            self._store = Store(address)
            own_address = f"{address} {self._store.port}"
        bits = _start.bits_of(own_address)
        if mesh.topology.size > 1:
            description = "horovod's store\nengine"
            _, bits = native.register_gradient_list(
                description, bits, timeout_s=timeout_s
            )
        address, port = _start.text_of(bits).split()
        return address, int(port)

    def _export(self, found: dict[str, str]) -> None:
        """Sets environment variables, except those that the user has set."""
        for name, value in found.items():
            if name not in os.environ:
                os.environ[name] = value
                self._variables_set.append(name)


def _is_one_host(mesh: Mesh) -> bool:
    return len(set(mesh.topology.host_of)) == 1


def _interface(mesh: Mesh) -> str:
    address = _LOOPBACK if _is_one_host(mesh) else mesh.address
    found = _start.interface_of(address, psutil.net_if_addrs())
    if found is None:
        raise _failed_error(
            f"no network interface has the address {address} of this rank"
        )
    return found


def _invalid_error(message: str) -> native.CoreError:
    return native.CoreError(
        native.INVALID_ARGUMENT, message, {"kind": "invalid_argument", "cause": message}
    )


def _failed_error(message: str) -> native.CoreError:
    return native.CoreError(
        native.ABORTED, message, {"kind": "rank_failed", "cause": message}
    )
