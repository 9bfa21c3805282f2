"""Runs the test suite in stages and tells what each took (`make test`).

With --slow those tests that the suite leaves out (`make test-slow`).

First the C++ tests (CMake, Ninja, ctest), then one pytest run over the folders of
`tests/`, so that the worker processes with TensorFlow are started once. The last line
is pytest's own summary. Exit code 0 only when every stage passed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
STAGES = {
    "one process": ("tests/single", "tests/fuzz"),
    "several ranks": ("tests/parallel",),
    "failures and integration": ("tests/faults", "tests/integration"),
    "GPU": ("tests/gpu",),
}
CPP_TIMEOUT_S = 900


def _tool(name: str) -> str:
    """Path of a program of the virtual environment this script runs in."""
    return str(Path(sys.executable).parent / name)


def run_cpp(slow: bool) -> bool:
    """Builds and runs `tests/cpp`; True when all passed."""
    configure = [
        *(_tool("cmake"), "-S", str(ROOT / "tfdist_ops"), "-B", str(BUILD)),
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"),
        *("-DTFDIST_TESTS=ON", "-DTFDIST_WERROR=ON", "--log-level=WARNING"),
    ]
    cores = str(os.cpu_count() or 1)
    build = [_tool("cmake"), "--build", str(BUILD), "--parallel", cores]
    test = [
        *(_tool("ctest"), "--test-dir", str(BUILD), "--output-on-failure"),
        *("--no-tests=error", "--parallel", cores),
        *("-L" if slow else "-LE", "slow"),
    ]
    for command in (configure, build, test):
        try:
            code = subprocess.run(command, timeout=CPP_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {CPP_TIMEOUT_S} s: {' '.join(command)}", flush=True)
            return False
        if code != 0:
            print(f"exit code {code}: {' '.join(command)}", flush=True)
            return False
    return True


class StageReport:
    """A pytest plugin: a headline where a stage begins, a table at the end."""

    def __init__(self, finished: list[tuple[str, str, float]]) -> None:
        self._finished = finished
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
    finished: list[tuple[str, str, float]] = []
    headline("C++", "tests/cpp under ctest")
    begin = time.monotonic()
    cpp_passed = run_cpp(slow)
    words = "passed" if cpp_passed else "FAILED"
    finished.append(("C++", words, time.monotonic() - begin))

    folders = [folder for stage in STAGES.values() for folder in stage]
    code = pytest.main(
        [
            *(folder for folder in folders if (ROOT / folder).is_dir()),
            *("-q", "-rs", "-m", "slow" if slow else "not slow"),
            *("--durations=10", "--durations-min=5"),
        ],
        plugins=[StageReport(finished)],
    )
    return int(code) if code != 0 else int(not cpp_passed)


if __name__ == "__main__":
    sys.exit(main())
