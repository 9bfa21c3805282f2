"""Outlives a launcher that was killed, and ends the ranks' processes: `_guard.py MARK`.

Its standard input is a pipe from the launcher. A byte means that the launcher has
ended everything itself; the end of the pipe without one means that it was killed.
The processes are known by a mark in the environment they started with: of the launcher,
or of its agent on another host, so that several "hosts" on one machine stay apart.
Needs the standard library alone.
"""

import os
import signal
import sys
import time

MARK = "_TFDIST_STARTED_BY"  # not TFDIST_...: it is no setting
_LIMIT_S = 5.0
_PAUSE_S = 0.02


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


def main() -> int:
    """Waits for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1):
        return 0
    deadline = time.monotonic() + _LIMIT_S
    while (pids := marked_processes(sys.argv[1])) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
