"""Builds and runs the C++ tests under the sanitizers (`make sanitize`).

One build folder each under build/: sanitize-address (AddressSanitizer with leaks,
UndefinedBehaviorSanitizer) and sanitize-thread (ThreadSanitizer). A name as argument
runs that one alone. Exit code 0 only when nothing was reported.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
# UBSan only prints unless told otherwise; a test that reports must fail.
OPTIONS = {
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1",
}
TIMEOUT_S = 3600


def _tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def run(name: str) -> bool:
    """Builds and runs one; True when every test passed without a report."""
    build = ROOT / "build" / f"sanitize-{name}"
    cores = str(os.cpu_count() or 1)
    # No -Werror: instrumented code has warnings that the code itself has not.
    configure = [
        *(_tool("cmake"), "-S", str(ROOT / "tfdist_ops"), "-B", str(build)),
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"),
        *("-DTFDIST_TESTS=ON", f"-DTFDIST_SANITIZE={SANITIZERS[name]}"),
        "--log-level=WARNING",
    ]
    compile_all = [_tool("cmake"), "--build", str(build), "--parallel", cores]
    test = [
        *(_tool("ctest"), "--test-dir", str(build), "--output-on-failure"),
        *("--no-tests=error", "--parallel", cores),
    ]
    for command in (configure, compile_all, test):
        begin = time.monotonic()
        environ = {**os.environ, **OPTIONS}
        try:
            code = subprocess.run(command, env=environ, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {TIMEOUT_S} s: {' '.join(command)}", flush=True)
            return False
        what = Path(command[0]).name
        print(f"{name}: {what} took {time.monotonic() - begin:.0f} s", flush=True)
        if code != 0:
            print(f"exit code {code}: {' '.join(command)}", flush=True)
            return False
    return True


def main() -> int:
    """Runs those named, or all."""
    names = sys.argv[1:] or list(SANITIZERS)
    if unknown := [name for name in names if name not in SANITIZERS]:
        print(f"expected {' or '.join(SANITIZERS)}, got {unknown}")
        return 2
    failed = [name for name in names if not run(name)]
    print(f"FAILED: {', '.join(failed)}" if failed else "nothing reported")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
