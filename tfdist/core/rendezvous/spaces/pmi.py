"""The space of launchers that speak PMI-1: MPICH, Intel MPI, PALS, srun --mpi=pmi2.

The launcher gives each rank a socket, `PMI_FD`. The protocol is that of MPICH's "simple
PMI": lines of name=value pairs, one answer for each line. PMI is described by P. Balaji
and others, "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
Systems", EuroMPI 2010.

A program that itself uses MPI needs the socket for MPI, so there is no space then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist.core.rendezvous.errors import invalid, timeout
from tfdist.core.rendezvous.placement import Placement

SOURCES = ("mpich", "pals")
_MPI_LIBRARY = re.compile(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*|_intel\w*)?\.so")


class PmiSpace:
    """A connection to the launcher; implements `spaces.Space`.

    Args:
        fd: the rank's socket to the launcher; it is duplicated.
        deadline: time by which the launcher must answer, on the time.monotonic() clock.
    """

    def __init__(self, fd: int, deadline: float) -> None:
        try:
            self._socket = socket.socket(fileno=os.dup(fd))
        except OSError as error:
            raise invalid(f"PMI_FD={fd} cannot be used: {error}") from None
        self._rest = b""
        self._is_broken = False
        self._pid = os.getpid()
        self._ask("init pmi_version=1 pmi_subversion=1", deadline)
        self._name = self._ask("get_my_kvsname", deadline)["kvsname"]
        atexit.register(self._finalize)

    def exchange(self, key: str, value: str | None, deadline: float) -> str:
        """See `spaces.Space`."""
        if value is not None:
            self._ask(f"put kvsname={self._name} key={key} value={value}", deadline)
        self._ask("barrier_in", deadline)
        answer = self._ask(f"get kvsname={self._name} key={key}", deadline)
        return answer.get("value", "")

    def _ask(self, command: str, deadline: float) -> dict[str, str]:
        name = command.partition(" ")[0]
        if self._is_broken:
            raise invalid("the launcher's PMI socket cannot be used after an error")
        self._is_broken = True  # until its answer has come
        try:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._socket.sendall(f"cmd={command}\n".encode())
            line = self._receive_line(deadline)
        except TimeoutError:
            if name == "barrier_in":
                raise timeout(
                    "not all ranks called tfdist.init() within the deadline (the ranks "
                    "meet through the PMI of their launcher)",
                    "some ranks are missing",
                ) from None
            raise timeout(f"the launcher did not answer PMI's {name}", "") from None
        except OSError as error:
            raise invalid(f"the launcher's PMI socket failed: {error}") from None
        self._is_broken = False
        answer = parse(line)
        if answer.get("rc", "0") != "0":
            raise invalid(f"the launcher refused PMI's {name}: {line}")
        return answer

    def _receive_line(self, deadline: float) -> str:
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._socket.recv(4096)
            if not data:
                raise OSError("the launcher closed it")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _finalize(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, which shares the socket
        with contextlib.suppress(OSError):  # the launcher may have ended
            self._socket.settimeout(1.0)
            self._socket.sendall(b"cmd=finalize\n")
            self._socket.recv(4096)
        self._socket.close()


def parse(line: str) -> dict[str, str]:
    """Returns the name=value pairs of a line.

    Example:
        >>> from tfdist.core.rendezvous.spaces import pmi
        >>> pmi.parse("cmd=get_result rc=0 value=10.0.0.1:4711")
        {'cmd': 'get_result', 'rc': '0', 'value': '10.0.0.1:4711'}
    """
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def opening(
    environ: Mapping[str, str], placement: Placement
) -> Callable[[float], PmiSpace] | None:
    """Returns a function that takes the deadline and opens the space, or None."""
    text = environ.get("PMI_FD", "")
    if placement.source not in SOURCES or not text.isdecimal():
        return None
    try:  # a program in between may have closed it
        if not stat.S_ISSOCK(os.fstat(int(text)).st_mode):
            return None
    except OSError:
        return None
    if _MPI_LIBRARY.search(Path("/proc/self/maps").read_text()):
        return None
    return lambda deadline: PmiSpace(int(text), deadline)
