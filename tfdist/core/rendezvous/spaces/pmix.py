"""The space of launchers that speak PMIx: mpirun of Open MPI, srun --mpi=pmix.

The functions are those of the PMIx Standard (version 4.1, chapters 5 and 8), called
with ctypes in the `libpmix` that comes with the launcher. The structures of the
standard have not changed since version 2. A program may use MPI at the same time,
because a process may initialize PMIx several times.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import glob
import itertools
import os
from collections.abc import Callable, Mapping

from tfdist.core.bounded_call import BoundedThread
from tfdist.core.rendezvous.errors import RendezvousError, invalid, timeout
from tfdist.core.rendezvous.placement import Placement

SOURCES = ("openmpi", "slurm")
_PREFIXES = ("PMIX_PREFIX", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX")
_FOLDERS = ("lib", "lib64", "lib/openmpi", "lib64/openmpi")
# Path on Debian. The name alone is also tried, in the folders of the dynamic loader.
_OTHERS = ("/usr/lib/*/pmix2/lib/libpmix.so.2",)
_LIBRARY = "libpmix.so.2"
_BOOL, _STRING, _GLOBAL = 1, 3, 3


class _Proc(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (
        ("flag", ctypes.c_bool),
        ("text", ctypes.c_char_p),
        ("size", ctypes.c_uint64 * 3),  # as large as the largest member in C
    )


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_char * 512),
        ("flags", ctypes.c_uint32),
        ("value", _Value),
    )


class PmixSpace:
    """A connection to the launcher; implements `spaces.Space`.

    Args:
        library: the loaded libpmix.
        deadline: time by which the launcher must answer, on the time.monotonic() clock.
    """

    def __init__(self, library: ctypes.CDLL, deadline: float) -> None:
        self._library = library
        self._thread = BoundedThread("tfdist-pmix")
        self._self = _Proc()
        self._pid = os.getpid()
        self._call("PMIx_Init", deadline, ctypes.byref(self._self), None, 0)
        # Otherwise the launcher considers the exit of this process a failure.
        atexit.register(self._finalize)

    def exchange(self, key: str, value: str | None, deadline: float) -> str:
        """See `spaces.Space`."""
        name = key.encode()
        if value is not None:
            given = _Value(_STRING, _Data(text=value.encode()))
            scope = ctypes.c_uint8(_GLOBAL)
            self._call("PMIx_Put", deadline, scope, name, ctypes.byref(given))
            self._call("PMIx_Commit", deadline)
        gather = _Value(_BOOL, _Data(flag=True))
        collect = (_Info * 1)(_Info(b"pmix.collect", 0, gather))
        no_procs, one = ctypes.c_size_t(0), ctypes.c_size_t(1)
        self._call("PMIx_Fence", deadline, None, no_procs, collect, one)
        root, found = _Proc(self._self.namespace, 0), ctypes.POINTER(_Value)()
        no_infos = ctypes.c_size_t(0)
        where = (ctypes.byref(root), name, None, no_infos, ctypes.byref(found))
        self._call("PMIx_Get", deadline, *where)
        return str(found.contents.data.text.decode())

    def _call(self, name: str, deadline: float, *arguments: object) -> None:
        """Calls a function that may block forever; waits at most until the deadline."""
        if self._thread.is_stuck:
            raise invalid("an earlier PMIx call has not returned")
        function = functools.partial(getattr(self._library, name), *arguments)
        try:
            status = self._thread.call(function, deadline)
        except TimeoutError:
            raise self._late(name) from None
        if status != 0:
            raise invalid(f"the launcher's {name} failed with status {status}")

    @staticmethod
    def _late(name: str) -> RendezvousError:
        if name == "PMIx_Fence":
            return timeout(
                "not all ranks called tfdist.init() within the deadline (the ranks "
                "meet through the PMIx of their launcher)",
                "some ranks are missing",
            )
        return timeout(f"the launcher did not answer {name}", "")

    def _finalize(self) -> None:
        if not self._thread.is_stuck and os.getpid() == self._pid:
            finalize = functools.partial(self._library.PMIx_Finalize, None)
            self._thread.call(lambda: finalize(ctypes.c_size_t(0)), None)


def opening(
    environ: Mapping[str, str], placement: Placement
) -> Callable[[float], PmixSpace] | None:
    """Returns a function that takes the deadline and opens the space, or None."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK")
    if placement.source not in SOURCES or not all(environ.get(name) for name in names):
        return None
    library = _load(environ)
    return None if library is None else lambda deadline: PmixSpace(library, deadline)


def _load(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    prefixes = [environ[name] for name in _PREFIXES if environ.get(name)]
    pairs = itertools.product(prefixes, _FOLDERS)
    candidates = [f"{prefix}/{folder}/{_LIBRARY}" for prefix, folder in pairs]
    if folder := environ.get("OMPI_LIBDIR_LOC"):
        candidates += [f"{folder}/{_LIBRARY}", f"{folder}/openmpi/{_LIBRARY}"]
    candidates += [path for pattern in _OTHERS for path in glob.glob(pattern)]
    for path in [*candidates, _LIBRARY]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None
