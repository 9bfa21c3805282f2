"""Two small programs of the launcher, each in a process of its own.

`_standalone.py exec LAUNCHER_PID PROCESSORS COMMAND...` becomes the command of a rank.
It runs between fork and the command, in a process of its own because code between fork
and exec of a program with threads may only do very little.

`_standalone.py guard JOB_TAG` outlives a launcher that was killed, and ends the ranks'
processes. Its standard input is a pipe from the launcher. A line with a number is a
process group that was made for a rank; a final "x" means that the launcher has ended
everything itself; the end of the pipe without one means that it was killed. The
processes are found by their group, and by the job tag in the environment they started
with: that of the launcher, or of its agent on another host, so that several "hosts" on
one machine stay apart.

Needs the standard library alone, so that it starts in milliseconds.
"""

import os
import select
import signal
import sys
import time

JOB_TAG_VARIABLE = "_TFDIST_STARTED_BY"  # not TFDIST_...: it is no setting
_PR_SET_PDEATHSIG = 1
_LIMIT_S = 5.0
_PAUSE_S = 0.02
_LOOK_EVERY_S = 1.0


def exec_rank(launcher: int, processors: str, command: list[str]) -> int:
    """Ties this process's life to the launcher's, binds it, then runs the command.

    Returns:
        The exit code where the command cannot be run.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        return 1  # It died before the line above.
    if processors:
        try:
            os.sched_setaffinity(0, map(int, processors.split(",")))
        except OSError as error:  # taken away since the launcher looked
            print(
                f"tfdistrun: cannot bind to processors {processors}: {error.strerror}",
                file=sys.stderr,
            )
            return 126
    # Python ignores these two, and a program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except FileNotFoundError:
        print(f"tfdistrun: {command[0]}: command not found", file=sys.stderr)
        return 127
    except OSError as error:
        print(f"tfdistrun: {command[0]}: {error.strerror}", file=sys.stderr)
        return 126


def tagged_processes(job_tag: str) -> list[int]:
    """Ids of this user's processes that have the tag in their environment."""
    tag = f"{JOB_TAG_VARIABLE}={job_tag}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if tag in file.read().split(b"\0"):
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


def guard(job_tag: str) -> int:
    """Ends what a launcher that was killed leaves behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = Groups()
    if not _launcher_was_killed(groups):
        return 0
    groups.kill()
    deadline = time.monotonic() + _LIMIT_S
    while (pids := tagged_processes(job_tag)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # gone, or became another user's
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        sys.exit(guard(sys.argv[2]))
    sys.exit(exec_rank(int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
