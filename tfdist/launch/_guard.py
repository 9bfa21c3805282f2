"""Outlives a launcher that was killed, and ends the ranks' processes: `_guard.py MARK`.

Its standard input is a pipe from the launcher. A line with a number is a process group
that was made for a rank; a final "x" means that the launcher has ended everything
itself; the end of the pipe without one means that it was killed. The processes are
known by their group, and by a mark in the environment they started with: of the
launcher, or of its agent on another host, so that several "hosts" on one machine stay
apart. Needs the standard library alone.
"""

import os
import select
import signal
import sys
import time

MARK = "_TFDIST_STARTED_BY"  # not TFDIST_...: it is no setting
_LIMIT_S = 5.0
_PAUSE_S = 0.02
_LOOK_EVERY_S = 1.0


def marked_processes(mark: str) -> list[int]:
    """Ids of this user's processes that were started with the variable MARK=mark."""
    marker = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if marker in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue  # gone, or of another user
    return found


class Groups:
    """The ranks' process groups, as long as somebody is in them.

    The system gives the number of a group to nobody else while it has a member, but
    may do so afterwards: a group that was seen empty is forgotten.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._rest = b""

    def read(self, data: bytes) -> None:
        """Takes lines with the numbers of new groups."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._numbers.update(map(int, lines))

    def forget_the_empty(self) -> None:
        """Must be called every second or so: numbers are given anew in turn."""
        self._numbers = {number for number in self._numbers if _exists(number)}

    def kill(self) -> None:
        """Kills all members."""
        for number in self._numbers:
            try:
                os.killpg(number, signal.SIGKILL)
            except OSError:
                continue  # gone, or of another user


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _launcher_was_killed(groups: Groups) -> bool:
    """Waits for the launcher's end."""
    while True:
        if select.select([0], [], [], _LOOK_EVERY_S)[0]:
            data = os.read(0, 4096)
            if not data:
                return True
            if data.endswith(b"x"):
                return False
            groups.read(data)
        groups.forget_the_empty()


def main() -> int:
    """Ends what a launcher that was killed leaves behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = Groups()
    if not _launcher_was_killed(groups):
        return 0
    groups.kill()
    deadline = time.monotonic() + _LIMIT_S
    while (pids := marked_processes(sys.argv[1])) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # gone, or became another user's
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
