"""Runs the test suite (`make test`) and prints a table of its stages.

With --slow it runs the tests that the suite leaves out (`make test-slow`), one by one.

One pytest run covers the folders of `tests/`. pytest-xdist deals the test files out to
several workers: a test with several ranks often waits, and then leaves a core to the
tests of the other worker. The C++ tests (CMake, Ninja, ctest) run beside pytest; their
outcome is printed at the end. The last line is pytest's own summary. The exit code is 0
only if every stage passed.
"""

import os
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TextIO

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
# As in setup.py: what `make test` has built, and what the C++ tests are linked to.
BUILT = ROOT / "build" / f"native-{sysconfig.get_platform()}-{sys.version_info[1]}"
LOG = ROOT / "build" / "tests.log"
# In the order in which they run. The C++ tests are compiled beside the first stage: its
# tests depend least on timing. The shortest tests come last: no worker then waits long.
STAGES = {
    "several ranks": ("tests/parallel",),
    "failures and integration": ("tests/faults", "tests/integration"),
    "one process": ("tests/single", "tests/fuzz"),
    "GPU": ("tests/gpu",),
}
CPP_TIMEOUT_S = 1800
MOST_WORKERS = 8
WORKER_BYTES = 6 << 30  # pytest and up to six ranks, each with TensorFlow


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
    """A pytest plugin that prints the results and the test time of each stage."""

    def __init__(self, cpp: Cpp) -> None:
        self._cpp = cpp
        self._counts: dict[str, dict[str, int]] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: by its call, or by a failed set-up or tear-down."""
        stage = stage_of(report.nodeid)
        self._seconds[stage] = self._seconds.get(stage, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            counts = self._counts.setdefault(stage, {})
            counts[report.outcome] = counts.get(report.outcome, 0) + 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Prints the end of the C++ tests and the table."""
        self._cpp.join()
        terminalreporter.section(f"C++: tests/cpp under ctest, all of it in {LOG}")
        for line in self._cpp.ending():
            terminalreporter.write_line(line)
        terminalreporter.section("stages, and the seconds of their tests")
        cpp = "passed" if self._cpp.passed else "FAILED"
        rows = [("C++", cpp, self._cpp.elapsed_s)]
        for stage in filter(self._counts.get, [*STAGES, "others"]):
            counts = self._counts[stage]
            words = ", ".join(f"{counts[word]} {word}" for word in sorted(counts))
            rows.append((stage, words, self._seconds[stage]))
        for stage, words, seconds in rows:
            terminalreporter.write_line(f"{stage:26} {words:40} {seconds:7.1f} s")


def stage_of(test: str) -> str:
    """The stage of a test by its id, which begins with its file."""
    for stage, folders in STAGES.items():
        if test.startswith(tuple(f"{folder}/" for folder in folders)):
            return stage
    return "others"


def workers() -> int:
    """Number of pytest workers: one for each core, as far as the memory allows."""
    room = psutil.virtual_memory().available // WORKER_BYTES
    return max(1, min(os.cpu_count() or 1, room, MOST_WORKERS))


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
            *("-n", "0" if slow or workers() == 1 else str(workers())),
            *("--dist", "loadfile", "--no-loadscope-reorder"),
        ],
        plugins=[StageReport(cpp)],
    )
    cpp.join()
    return int(code) if code != 0 else int(not cpp.passed)


if __name__ == "__main__":
    sys.exit(main())
