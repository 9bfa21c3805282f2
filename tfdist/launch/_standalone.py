"""Two small programs of the launcher, each in its own process.

`_standalone.py exec LAUNCHER_PID PROCESSORS COMMAND...` prepares the process of a rank,
and then replaces itself with the rank's command. The launcher cannot prepare the
process between fork and exec, where a program with threads can do little safely.

`_standalone.py guard JOB_TAG` outlives a launcher that was killed, and then kills the
ranks' processes. Its standard input is a pipe from the launcher. Each line contains the
number of a process group that was created for a rank. A final "x" means that the
launcher has terminated everything itself. If the pipe closes without an "x", the
launcher was killed. The guard finds the processes by their group, and by the job tag in
the environment that they were started with. The launcher, and each agent on another
host, has its own tag, so that several "hosts" on one machine do not interfere.

Both programs use only the standard library, so that they start in milliseconds.
"""

import os
import select
import signal
import sys
import time

JOB_TAG_VARIABLE = "_TFDIST_STARTED_BY"  # not TFDIST_..., since it is not a setting
_PR_SET_PDEATHSIG = 1
_LIMIT_S = 5.0
_PAUSE_S = 0.02
_LOOK_EVERY_S = 1.0


def exec_rank(launcher: int, processors: str, command: list[str]) -> int:
    """Prepares this process, and replaces it with the command of a rank.

    The process is killed when the launcher exits, and is bound to CPUs.

    Args:
        launcher: process ID of the launcher.
        processors: CPU IDs, separated by commas; "" to bind to none.
        command: program and arguments.

    Returns:
        The exit code, only if the command cannot be run.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        return 1  # the launcher died before prctl was called
    if processors:
        try:
            os.sched_setaffinity(0, map(int, processors.split(",")))
        except OSError as error:  # the CPUs were removed since the launcher looked
            print(
                f"tfdistrun: cannot bind to processors {processors}: {error.strerror}",
                file=sys.stderr,
            )
            return 126
    # Python ignores these two signals; without this, the command would ignore them too.
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
    """Returns IDs of this user's processes with the tag in their environment."""
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
            continue  # the process exited, or belongs to another user
    return found


class Groups:
    """The ranks' process groups that have members.

    While a group has members, the system does not reuse the number of the group. An
    empty group is forgotten, since its number may be reused.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._rest = b""

    def read(self, data: bytes) -> None:
        """Adds groups; `data` has a number per line, and may end within a line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._numbers.update(map(int, lines))

    def forget_the_empty(self) -> None:
        """Forgets empty groups; call this about every second."""
        self._numbers = {number for number in self._numbers if _exists(number)}

    def kill(self) -> None:
        """Kills all members of the groups."""
        for number in self._numbers:
            try:
                os.killpg(number, signal.SIGKILL)
            except OSError:
                continue  # the group is empty, or belongs to another user


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _launcher_was_killed(groups: Groups) -> bool:
    """Waits until the launcher exits; returns whether it was killed."""
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
    """Kills the processes that a killed launcher leaves behind."""
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
                continue  # the process exited, or changed to another user
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        sys.exit(guard(sys.argv[2]))
    sys.exit(exec_rank(int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
