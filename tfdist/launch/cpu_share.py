"""Gives newcomers that are not needed yet a smaller share of the CPUs.

The start of spares, above all their import of TensorFlow, would slow the ranks down.
Linux divides the CPUs between sessions (`setsid`) if its *autogroups* are enabled: see
sched(7), "The autogroup feature". A session with a larger nice value gets a smaller
share, and gives way to the others at once. Unlike the nice value of a process, that of
a session can be lowered again without privileges. Without autogroups, or in a container
with its own CPU cgroup, the values have no effect.
"""

from __future__ import annotations

import os
from pathlib import Path

BACKGROUND_NICE = 10


class CpuShares:
    """Sets the nice values of sessions, each identified by its leader's process ID.

    Args:
        proc: folder of the proc file system.

    Example:
        >>> import pathlib, tempfile
        >>> from tfdist.launch.cpu_share import CpuShares
        >>> proc = pathlib.Path(tempfile.mkdtemp())
        >>> (proc / "41").mkdir()
        >>> (proc / "41" / "autogroup").touch()
        >>> CpuShares(proc).set(41, 10)
        >>> (proc / "41" / "autogroup").read_text()
        '10'
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._wanted: dict[int, int] = {}

    def set(self, pid: int, nice: int) -> None:
        """Sets the nice value of a session; `retry` may have to complete this.

        Args:
            pid: process ID of the leader of the session.
            nice: new value, from 0 to 19.
        """
        self._wanted[pid] = nice
        self.retry()

    def retry(self) -> None:
        """Sets the values that could not be set yet; call this about every second.

        Linux accepts at most ten changes a second from all unprivileged users together.
        """
        for pid, nice in list(self._wanted.items()):
            try:
                self._write(pid, nice)
            except BlockingIOError:
                continue
            except OSError:
                pass  # the kernel has no autogroups, or the process has exited
            del self._wanted[pid]

    def forget(self, pid: int) -> None:
        """Forgets a process that has exited."""
        self._wanted.pop(pid, None)

    def _write(self, pid: int, nice: int) -> None:
        fd = os.open(self._proc / str(pid) / "autogroup", os.O_WRONLY)
        try:
            os.write(fd, str(nice).encode())
        finally:
            os.close(fd)
