"""Fuzzes every parser for so many seconds of processor time each (`make fuzz`).

    python tests/fuzz/run.py [SECONDS] [TARGET...]

The C++ targets are built with AddressSanitizer and UndefinedBehaviorSanitizer in
build/fuzz and driven by tests/fuzz/driver.cc; where clang++ is found, by libFuzzer too,
from build/fuzz-clang. The Python parsers are driven by hypothesis. As many targets run
at once as there are cores, in slices of a minute: results.json says how long today's
code has been fuzzed, and a run that is broken off goes on from there. An input that
ends a target is left in build/fuzz/crash-TARGET; put it into tests/fuzz/corpus/TARGET
when the fault is mended: `make test` runs it from then on. Exit code 0: nothing
crashed.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.record import Record  # noqa: E402

CODE = ("tfdist_ops", "tfdist/core/rendezvous", "tests/fuzz")
CORPUS = HERE / "corpus"
FOLDER = ROOT / "build" / "fuzz"
CLANG_FOLDER = ROOT / "build" / "fuzz-clang"
SLICE_S = 60
LIBFUZZER = " (libFuzzer)"
PYTHON = "python"
ENVIRON = {
    **os.environ,
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    # dlopen of libcrypto keeps memory for good.
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1",
    "PYTHONPATH": str(ROOT),
}


def targets() -> list[str]:
    """Names of all targets."""
    return [*sorted(p.stem for p in HERE.glob("fuzz_*.cc")), PYTHON]


def build(folder: Path, *options: str) -> None:
    """Builds all C++ targets."""
    tools = Path(sys.executable).parent
    names = [name for name in targets() if name != PYTHON]
    for command in (
        [
            *(str(tools / "cmake"), "-S", str(ROOT / "tfdist_ops"), "-B", str(folder)),
            *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"),
            *("-DTFDIST_TESTS=ON", "-DTFDIST_SANITIZE=address,undefined"),
            *options,
            "--log-level=WARNING",
        ],
        [str(tools / "cmake"), "--build", str(folder), "--target", *names],
    ):
        subprocess.run(command, check=True, timeout=1800)


def own_command(name: str, seconds: int) -> list[str]:
    """A C++ target under the driver. What it keeps grows from slice to slice."""
    found = FOLDER / f"corpus-{name}"
    found.mkdir(exist_ok=True)
    seed = time.time_ns() % 2**31
    return [
        *(str(FOLDER / name), f"-seconds={seconds}", f"-seed={seed}"),
        *(f"-crash={FOLDER / f'crash-{name}'}", f"-keep={found}"),
        *(str(CORPUS / name), str(found)),
    ]


def libfuzzer_command(name: str, seconds: int) -> list[str]:
    """The same target under libFuzzer."""
    found = FOLDER / f"corpus-{name}"
    found.mkdir(exist_ok=True)
    program = str(CLANG_FOLDER / name)
    return [program, f"-max_total_time={seconds}", str(found), str(CORPUS / name)]


def python_command(name: str, seconds: int) -> list[str]:
    """All Python parsers: ten tests."""
    del name
    return [
        *(sys.executable, str(HERE / "test_fuzz_python.py")),
        str(max(1, seconds // 10)),
    ]


class Run:
    """Slices of all targets, recorded as they end."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._record = Record(HERE / "results.json", CODE)
        self._lock = threading.Lock()

    def done_s(self, title: str) -> int:
        """Seconds that are shown for today's code."""
        return self._record.rows.get(title, 0)

    def target(
        self, title: str, name: str, command: Callable[[str, int], list[str]]
    ) -> bool:
        """Brings one target to its time; False when it crashed."""
        while (left := self._seconds - self.done_s(title)) > 0:
            part = min(SLICE_S, left)
            # Processor time may be scarce.
            ended = subprocess.run(
                command(name, part),
                **{"env": ENVIRON, "cwd": ROOT, "timeout": 20 * part + 600},
                **{"capture_output": True, "text": True, "errors": "replace"},
            )
            if ended.returncode != 0:
                print(f"{title}: exit code {ended.returncode}\n{ended.stdout[-3000:]}")
                print(ended.stderr[-3000:], flush=True)
                return False
            with self._lock:
                self._record.rows[title] = self.done_s(title) + part
                self._record.save()
            last = (ended.stdout.strip().splitlines() or [""])[-1]
            print(
                f"{title}: {self.done_s(title)} of {self._seconds} s  {last}",
                flush=True,
            )
        return True


def main() -> int:
    """Runs those named, or all."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    names = sys.argv[2:] or targets()
    if unknown := [name for name in names if name not in targets()]:
        print(f"expected some of {targets()}, got {unknown}")
        return 2
    native = [name for name in names if name != PYTHON]
    clang = shutil.which("clang++")
    jobs: list[tuple[str, str, Callable[[str, int], list[str]]]] = []
    if native:
        build(FOLDER, "-DTFDIST_COVERAGE=ON")
        jobs += [(name, name, own_command) for name in native]
    if native and clang:
        build(
            CLANG_FOLDER,
            *("-DTFDIST_LIBFUZZER=ON", f"-DCMAKE_CXX_COMPILER={clang}"),
        )
        jobs += [(name + LIBFUZZER, name, libfuzzer_command) for name in native]
    if PYTHON in names:
        jobs.append((PYTHON, PYTHON, python_command))
    run = Run(seconds)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ended_well = list(pool.map(lambda job: run.target(*job), jobs))
    crashed = [job[0] for job, well in zip(jobs, ended_well, strict=True) if not well]
    if native and not clang:
        print(f"skipped: {len(native)} targets under libFuzzer (no clang++ here)")
    for title in crashed:
        print(f"CRASHED: {title}, input: {FOLDER / f'crash-{title}'}")
    shown = ", ".join(f"{title} {run.done_s(title)} s" for title, _, _ in jobs)
    print(f"{len(jobs)} targets, {len(crashed)} crashed: {shown}")
    return int(bool(crashed))


if __name__ == "__main__":
    sys.exit(main())
