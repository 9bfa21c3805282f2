"""Loads and starts the site's MPI, for `TFDIST_ENGINE=mpi`.

`libtfdist_mpi.so`, which `make mpi` compiles, gives the core a table of functions with
which the core's links send data over MPI. This module loads the library, initializes
MPI, and prepares a communicator for each world. The module also serves as a key-value
space (`tfdist.core.rendezvous.spaces`), so that ranks on several hosts find each other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfdist.core import native
from tfdist.core.bounded_call import BoundedThread
from tfdist.core.library import LIBRARY_FOLDER
from tfdist.core.rendezvous.errors import RendezvousError, invalid, timeout
from tfdist.core.rendezvous.placement import Placement

NAME = "mpi"
LIBRARY_VARIABLE = "TFDIST_MPI_LIBRARY"
_TEXT_BYTES = 1024
_REMEDY = (
    "Start the ranks with the mpirun or srun that belongs to this MPI, or compile for "
    "another MPI with `make mpi MPICC=...`, or unset TFDIST_ENGINE"
)
_log = logging.getLogger("tfdist")


@dataclass
class _State:
    """MPI in this process."""

    thread: BoundedThread | None = None  # makes all calls, except those of the core
    pid: int = 0  # a forked child has no such thread
    may_finish: bool = False  # the ranks have connected, and none has failed since


_state = _State()


def start(placement: Placement, generation: int, deadline: float) -> None:
    """Starts MPI, if it is not running, and connects the ranks; all ranks call it.

    After this, the core sends data over MPI between ranks without shared memory.

    Args:
        placement: placement of this rank.
        generation: generation number of the world.
        deadline: `time.monotonic()` time by which all ranks must have called `start`.

    Raises:
        RendezvousError: there is no library, the process was not started by the mpirun
            or srun of this MPI, MPI failed, or a rank did not call `start` in time.
    """
    library = load_library()
    version = check_launcher(placement)
    rank, size = ctypes.c_int(), ctypes.c_int()
    places = ctypes.byref(rank), ctypes.byref(size)
    _call(lambda: library.tfdist_mpi_start(*places), deadline)
    if rank.value != placement.rank or size.value < placement.size:
        raise invalid(
            f"this process is rank {rank.value} of {size.value} in MPI ({version}), "
            f"but rank {placement.rank} of {placement.size} according to "
            f"{placement.variables}. {_REMEDY}"
        )
    _log.debug("rank %d sends data to other hosts with %s", rank.value, version)
    _call(lambda: library.tfdist_mpi_connect(placement.size, generation), deadline)
    table = library.tfdist_mpi_messages()
    native.check(native.library().tfdist_use_messages(table))


def check_launcher(placement: Placement) -> str:
    """Returns the library's MPI version; raises if another MPI started the ranks.

    Raises:
        RendezvousError: there is no library, or another MPI has started the ranks.
    """
    buffer = ctypes.create_string_buffer(512)
    load_library().tfdist_mpi_version(buffer, len(buffer))
    version = " ".join(buffer.value.decode(errors="replace").split()[:3]).rstrip(",")
    if _is_other_mpi(version, placement.source):  # MPI would abort the process
        raise invalid(
            f"the library of the MPI engine is compiled for {version}, but these "
            f"ranks were started by the mpirun of another MPI ({placement.source}). "
            f"{_REMEDY}"
        )
    return version


def _is_other_mpi(version: str, source: str) -> bool:
    """Returns whether the library certainly does not belong to the ranks' mpirun."""
    kinds = {
        "openmpi": version.startswith("Open MPI"),
        "mpich": version.startswith(("MPICH", "MVAPICH", "Intel")),
    }
    return any(kinds.values()) and source in kinds and not kinds[source]


def exchange(key: str, value: str | None, deadline: float) -> str:
    """Returns the value that rank 0 passes, like `exchange` of a key-value space."""
    del key  # MPI matches broadcasts by their order
    text = ctypes.create_string_buffer((value or "").encode(), _TEXT_BYTES)
    _call(lambda: load_library().tfdist_mpi_broadcast(text, _TEXT_BYTES), deadline)
    return text.value.decode()


def note_world(*, is_well: bool) -> None:
    """Records whether the ranks are connected and none has failed since."""
    _state.may_finish = is_well


def finish() -> None:
    """Finalizes MPI at exit, if tfdist has started it; waits for all ranks.

    Does nothing after a failure, because a failed rank does not finalize MPI.
    """
    thread, is_own = _state.thread, _state.pid == os.getpid()
    if thread is not None and is_own and _state.may_finish and not thread.is_stuck:
        thread.call(load_library().tfdist_mpi_finish, None)


def _call(function: Callable[[], int], deadline: float) -> None:
    if _state.thread is None:
        _state.thread, _state.pid = BoundedThread("tfdist-mpi"), os.getpid()
    thread = _state.thread
    if thread.is_stuck:
        raise invalid("an earlier MPI call has not returned; start a new process")
    error: list[bytes] = []

    def run() -> int:  # the library keeps an error for the thread that caused it
        status = function()
        if status != 0:
            error.append(load_library().tfdist_mpi_error())
        return status

    try:
        status = thread.call(run, deadline)
    except TimeoutError:
        raise timeout(
            "not all ranks called tfdist.init() within the deadline (MPI waits for "
            "all ranks of mpirun or srun), or TFDIST_ENGINE is not set on all of them "
            "(Open MPI passes it to other hosts with mpirun -x TFDIST_ENGINE)",
            "some ranks are missing",
        ) from None
    if status != 0:
        raise invalid(f"MPI failed: {error[0].decode(errors='replace')}")


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library that `make mpi` has compiled, once.

    Raises:
        RendezvousError: the library is missing or does not load; the message says what
            to do.
    """
    given = os.environ.get(LIBRARY_VARIABLE)
    path = Path(given) if given else LIBRARY_FOLDER / "libtfdist_mpi.so"
    if not path.is_file():
        raise invalid(
            f"TFDIST_ENGINE=mpi needs {path}, which does not exist: run `make mpi` in "
            "the source folder of tfdist, with the mpicc of your MPI on the PATH "
            f"(docs/engines.md), or set {LIBRARY_VARIABLE} to the path of the library"
        )
    try:
        # MPI may load components later, which look up its symbols.
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _unloadable(path, error) from error
    library.tfdist_mpi_messages.restype = ctypes.c_void_p
    library.tfdist_mpi_error.restype = ctypes.c_char_p
    return library


def _unloadable(path: Path, error: OSError) -> RendezvousError:
    return invalid(
        f"{path} cannot be loaded: {error}. The MPI that it was compiled against may "
        "be missing: load the MPI's module, or run `make mpi` again"
    )
