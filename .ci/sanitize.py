"""Builds and runs the C++ tests under the sanitizers (`make sanitize`).

One build folder each under build/: sanitize-address (AddressSanitizer with leaks,
UndefinedBehaviorSanitizer) and sanitize-thread (ThreadSanitizer). A name as argument
runs that one alone. results.json says which tests have passed with today's code: a run
that is broken off goes on with the others. Exit code 0 only when nothing was reported.
"""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.record import Record  # noqa: E402

CODE = ("tfdist_ops", "tests/cpp", "tests/sim", "tests/fuzz")
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
# UBSan only prints unless told otherwise; a test that reports must fail.
OPTIONS = {
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1",
}
# Long ones that start no thread, so that there is nothing in them for ThreadSanitizer.
ONE_THREAD = frozenset(
    "schedule_test schedule_bits_test schedule_move_test reduce_cells_test"
    " reduce_instructions_test reduce_kernels_test sim engine_sim".split()
)
TIMEOUT_S = 3600


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _build(name: str) -> Path:
    """The folder with the instrumented tests."""
    build = ROOT / "build" / f"sanitize-{name}"
    # No -Werror: instrumented code has warnings that the code itself has not.
    configure = [
        *(_tool("cmake"), "-S", str(ROOT / "tfdist_ops"), "-B", str(build)),
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"),
        *("-DTFDIST_TESTS=ON", f"-DTFDIST_SANITIZE={SANITIZERS[name]}"),
        "--log-level=WARNING",
    ]
    compile_all = [_tool("cmake"), "--build", str(build)]
    for command in (configure, compile_all):
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return build


def _tests(build: Path) -> list[str]:
    """Names of the tests: the full ones first, without the samples of these."""
    command = [_tool("ctest"), "--test-dir", str(build), "--show-only=json-v1"]
    listed = subprocess.run(command, check=True, capture_output=True, timeout=60)
    names = [test["name"] for test in json.loads(listed.stdout)["tests"]]
    # They take minutes: begun last, one of them would run on when all others are done.
    names.sort(key=lambda name: not name.endswith("_full"))
    return [name for name in names if f"{name}_full" not in names]


def run(name: str, record: Record) -> bool:
    """Builds and runs the tests under a sanitizer; True if none failed or reported."""
    build = _build(name)
    passed: dict[str, float] = record.rows.setdefault(name, {})
    tests = _tests(build)
    if name == "thread":
        tests = [t for t in tests if t.removesuffix("_full") not in ONE_THREAD]
    lock = threading.Lock()

    def test(which: str) -> bool:
        command = [_tool("ctest"), "--test-dir", str(build), "--output-on-failure"]
        begin = time.monotonic()
        ended = subprocess.run(
            [*command, "--no-tests=error", "--tests-regex", f"^{which}$"],
            env={**os.environ, **OPTIONS},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
        took_s = round(time.monotonic() - begin, 1)
        with lock:
            if ended.returncode == 0:
                passed[which] = took_s
                record.save()
            else:
                print(ended.stdout[-20000:], ended.stderr[-3000:])
            how = "passed" if ended.returncode == 0 else "FAILED"
            print(f"{name}: {which} {how}, {took_s} s", flush=True)
        return ended.returncode == 0

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        well = all(list(pool.map(test, [t for t in tests if t not in passed])))
    print(f"{name}: {len(passed)} of {len(tests)} tests clean", flush=True)
    return well


def main() -> int:
    """Runs those named, or all."""
    names = sys.argv[1:] or list(SANITIZERS)
    if unknown := [name for name in names if name not in SANITIZERS]:
        print(f"expected {' or '.join(SANITIZERS)}, got {unknown}")
        return 2
    record = Record(Path(__file__).with_name("results.json"), CODE)
    failed = [name for name in names if not run(name, record)]
    print(f"FAILED: {', '.join(failed)}" if failed else "nothing reported")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
