"""Becomes the command of one rank: `_child.py LAUNCHER_PID PROCESSORS COMMAND...`.

Runs between fork and the command, in a process of its own because code between fork
and exec of a program with threads may only do very little. Needs the standard library
alone, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Ties this process's life to the launcher's, binds it, then runs the command."""
    launcher, processors, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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


if __name__ == "__main__":
    sys.exit(main())
