"""Runs the test suite in stages and tells what each took (`make test`).

With --slow those tests that the suite leaves out (`make test-slow`).

One pytest run goes over the folders of `tests/`, so that the worker processes with
TensorFlow are started once. The C++ tests (CMake, Ninja, ctest) run beside it, since
neither of the two always keeps all cores busy; their outcome is shown at the end. The
last line is pytest's own summary. Exit code 0 only when every stage passed.
"""

import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
# As in setup.py: what `make test` has built, and what the C++ tests are linked to.
BUILT = ROOT / "build" / f"native-{sysconfig.get_platform()}-{sys.version_info[1]}"
LOG = ROOT / "build" / "tests.log"
STAGES = {
    "one process": ("tests/single", "tests/fuzz"),
    "several ranks": ("tests/parallel",),
    "failures and integration": ("tests/faults", "tests/integration"),
    "GPU": ("tests/gpu",),
}
CPP_TIMEOUT_S = 1800


def _tool(name: str) -> str:
    """Path of a program of the virtual environment this script runs in."""
    return str(Path(sys.executable).parent / name)


class Cpp(threading.Thread):
    """Builds and runs `tests/cpp`, in a thread; what it prints goes to a file.

    Attributes:
        passed: whether all did, when the thread has ended.
        elapsed_s: what it took.
    """

    def __init__(self, slow: bool) -> None:
        super().__init__(name="C++")
        self.passed, self.elapsed_s = False, 0.0
        self._slow = slow

    def run(self) -> None:
        """Stops at the first command that fails."""
        begin = time.monotonic()
        configure = [
            *(_tool("cmake"), "-S", str(ROOT / "tfdist_ops"), "-B", str(BUILD)),
            *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"),
            *("-DTFDIST_TESTS=ON", "-DTFDIST_WERROR=ON", "--log-level=WARNING"),
            f"-DTFDIST_BUILT={BUILT}",
        ]
        cores = str(os.cpu_count() or 1)
        build = ["nice", _tool("cmake"), "--build", str(BUILD), "--parallel", cores]
        test = [
            *(_tool("ctest"), "--test-dir", str(BUILD), "--output-on-failure"),
            *("--no-tests=error", "--parallel", cores),
            *("-L" if self._slow else "-LE", "slow"),
        ]
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with LOG.open("w", encoding="utf-8") as log:
            self.passed = all(_runs(c, log) for c in (configure, build, test))
        self.elapsed_s = time.monotonic() - begin

    def ending(self) -> list[str]:
        """The last lines that were printed: many if something failed."""
        lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-4 if self.passed else -200 :]


def _runs(command: list[str], log: TextIO) -> bool:
    """Whether a command ends well and in time."""
    try:
        code = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, timeout=CPP_TIMEOUT_S
        ).returncode
        problem = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"not done after {CPP_TIMEOUT_S} s"
    if problem:
        log.write(f"{problem}: {' '.join(command)}\n")
    return not problem


class StageReport:
    """A pytest plugin: a headline where a stage begins, a table at the end."""

    def __init__(self, cpp: Cpp) -> None:
        self._cpp = cpp
        self._finished: list[tuple[str, str, float]] = []
        self._current: str | None = None
        self._begin = 0.0
        self._counts: dict[str, dict[str, int]] = {}

    def _close(self) -> None:
        if self._current is None:
            return
        counts = self._counts[self._current]
        words = ", ".join(f"{counts[word]} {word}" for word in sorted(counts))
        elapsed_s = time.monotonic() - self._begin
        self._finished.append((self._current, words, elapsed_s))
        self._current = None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begins a stage when the first test of its folders starts."""
        stage = next(
            (
                name
                for name, folders in STAGES.items()
                if nodeid.startswith(tuple(f"{folder}/" for folder in folders))
            ),
            "others",
        )
        if stage != self._current:
            self._close()
            self._current, self._begin = stage, time.monotonic()
            self._counts.setdefault(stage, {})
            headline(stage, ", ".join(STAGES.get(stage, ())))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: by its call, or by a set-up or tear-down that failed."""
        if self._current and (report.when == "call" or report.outcome != "passed"):
            counts = self._counts[self._current]
            counts[report.outcome] = counts.get(report.outcome, 0) + 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Prints the table of stages."""
        self._close()
        self._cpp.join()
        terminalreporter.section(f"C++: tests/cpp under ctest, all of it in {LOG}")
        for line in self._cpp.ending():
            terminalreporter.write_line(line)
        words = "passed" if self._cpp.passed else "FAILED"
        self._finished.insert(0, ("C++, beside them", words, self._cpp.elapsed_s))
        terminalreporter.section("stages")
        for name, words, elapsed_s in self._finished:
            terminalreporter.write_line(f"{name:26} {words:40} {elapsed_s:7.1f} s")


def headline(stage: str, what: str) -> None:
    """Announces a stage."""
    print(f"\n======== {stage}: {what}", flush=True)


def main() -> int:
    """Runs all stages; returns the exit code."""
    slow = "--slow" in sys.argv[1:]
    os.chdir(ROOT)
    cpp = Cpp(slow)
    cpp.start()
    folders = [folder for stage in STAGES.values() for folder in stage]
    code = pytest.main(
        [
            *(folder for folder in folders if (ROOT / folder).is_dir()),
            *("-q", "-rfEs", "-m", "slow" if slow else "not slow"),
            *("--durations=10", "--durations-min=5"),
        ],
        plugins=[StageReport(cpp)],
    )
    cpp.join()
    return int(code) if code != 0 else int(not cpp.passed)


if __name__ == "__main__":
    sys.exit(main())
