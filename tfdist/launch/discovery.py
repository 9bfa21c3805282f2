"""Runs a user's script that prints which hosts and slots an elastic job may use."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tfdist.launch.failure_summary import describe_code
from tfdist.launch.hosts import Host, HostsError, mark_local, parse_file
from tfdist.launch.processes import end_outsider, start_outsider

PERIOD_S = 1.0  # from the end of a run of the script to the next one
LIMIT_S = 10.0  # for one run
_STEP_S = 0.1  # between two checks whether the job has ended
_END_S = 0.5  # from the end of the output to the end of the script
_CLOSE_S = 2.0  # for the thread to end the script and itself
_MAX_BYTES = 64 << 10  # of the output that is read
_MAX_SHOWN = 80  # characters of the output in a message


class DiscoveryError(Exception):
    """The discovery script could not be run, or its output cannot be used.

    Attributes:
        kind: "start", "failed", "limit", "empty" or "malformed". Consecutive problems
            of the same kind are reported once.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def hosts_of(text: str, script: str) -> list[Host]:
    r"""Returns the hosts in the output of a discovery script.

    Args:
        text: the output: lines `host:slots` or `host` (one slot). The slots of a host
            that is named twice are added up.
        script: the script, for messages.

    Raises:
        DiscoveryError: the output is empty or malformed.

    Example:
        >>> from tfdist.launch.discovery import hosts_of
        >>> [(host.name, host.slots) for host in hosts_of("localhost:3\n", "find.sh")]
        [('localhost', 3)]
    """
    expected = "expected lines with a host and its slots, for example localhost:4"
    if not text.strip():
        raise DiscoveryError("empty", f"{script} printed nothing; {expected}")
    try:
        return mark_local(parse_file(text, f"output of {script}"))
    except HostsError as error:
        advice = "print host:slots for each host to use, for example localhost:4"
        raise DiscoveryError("malformed", f"{error}; {advice}") from None


class HostDiscovery:
    """Runs a discovery script repeatedly, and reports changes of its output.

    Args:
        script: path of the script, which is run without arguments.
        period_s: seconds from the end of one run to the start of the next.
        limit_s: time limit for one run, in seconds.
    """

    def __init__(
        self, script: str, *, period_s: float = PERIOD_S, limit_s: float = LIMIT_S
    ) -> None:
        self.script = script
        self._period_s = period_s
        self._limit_s = limit_s
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._hosts: list[Host] = []  # from the last valid output
        self._parsed: tuple[str | None, list[Host]] = (None, [])  # the last output
        self._problem = ""  # kind of the last problem since the last valid output

    def first_hosts(self) -> list[Host]:
        """Runs the script once; returns the hosts and their slots.

        Raises:
            DiscoveryError: the script cannot be run, or its output cannot be used.
        """
        path = Path(self.script)
        if not path.is_file():
            message = f"{self.script}: no such file; expected an executable file"
            raise DiscoveryError("start", message)
        if not os.access(path, os.X_OK):
            message = f"{self.script} is not executable: chmod +x {self.script}"
            raise DiscoveryError("start", message)
        self._hosts = self._ask()
        return self._hosts

    def start(self, report: Callable[[list[Host] | DiscoveryError], None]) -> None:
        """Begins to run the script on a thread.

        Args:
            report: function that is called on that thread: with the hosts, if these or
                their slots have changed, or with a `DiscoveryError`, unless the run
                before failed with the same `kind`.
        """

        def run() -> None:
            while not self._ends.wait(self._period_s):
                found = self._look()
                if found is not None and not self._ends.is_set():
                    report(found)

        self._thread = threading.Thread(
            target=run, name="tfdist-discovery", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, and kills the script if it is running.

        A signal handler may call it during `first_hosts`.
        """
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)  # it may be resolving a host name

    def _look(self) -> list[Host] | DiscoveryError | None:
        """Runs the script; returns its hosts or its error if new, None otherwise."""
        try:
            hosts = self._ask()
        except DiscoveryError as error:
            is_new, self._problem = error.kind != self._problem, error.kind
            return error if is_new else None
        is_new, self._hosts = hosts != self._hosts, hosts
        self._problem = ""
        return hosts if is_new else None

    def _ask(self) -> list[Host]:
        try:
            process = start_outsider([str(Path(self.script).absolute())])
        except OSError as error:
            raise DiscoveryError(
                "start",
                f"{self.script} cannot be started: {error.strerror}; expected a "
                "program, or a script that begins with a line such as #!/bin/sh",
            ) from None
        grace_s = 0.0
        try:
            output, errors = self._read(process)
            grace_s = _END_S
        finally:
            code = end_outsider(process, grace_s=grace_s)
        if code != 0:
            lines = errors.strip().splitlines()
            cause = f": {lines[-1][:_MAX_SHOWN]}" if lines else ""
            raise DiscoveryError(
                "failed", f"{self.script} failed ({describe_code(code)}){cause}"
            )
        if output != self._parsed[0]:  # otherwise, do not resolve the names again
            self._parsed = (output, hosts_of(output, self.script))
        return self._parsed[1]

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[str, str]:
        """Returns all that the process writes to standard output and standard error."""
        deadline_s = time.monotonic() + self._limit_s
        streams = [one for one in (process.stdout, process.stderr) if one is not None]
        found = {one.fileno(): b"" for one in streams}
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for stream in streams:
                stack.enter_context(stream)
                selector.register(stream.fileno(), selectors.EVENT_READ)
            while selector.get_map():
                if time.monotonic() >= deadline_s or self._ends.is_set():
                    message = f"{self.script} did not end within {self._limit_s:g} s"
                    raise DiscoveryError("limit", message)
                for key, _ in selector.select(_STEP_S):
                    data = os.read(key.fd, _MAX_BYTES)
                    found[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                    elif len(found[key.fd]) > _MAX_BYTES:
                        message = f"{self.script} printed more than {_MAX_BYTES} bytes"
                        raise DiscoveryError("malformed", message)
        output, errors = (text.decode("utf-8", "replace") for text in found.values())
        return output, errors
