"""Outlives a launcher that was killed, and ends the ranks' processes: `_guard.py JOB`.

Its standard input is a pipe from the launcher. A byte means that the launcher has
ended everything itself; the end of the pipe without one means that it was killed.
The processes of the job are known by TFDIST_JOB_ID in the environment they started
with. Needs the standard library alone.
"""

import os
import signal
import sys
import time

_LIMIT_S = 5.0
_PAUSE_S = 0.02


def job_processes(job: str) -> list[int]:
    """Ids of this user's processes that were started with TFDIST_JOB_ID=job."""
    marker = b"TFDIST_JOB_ID=" + job.encode()
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
    while (pids := job_processes(sys.argv[1])) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
