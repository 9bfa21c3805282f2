"""Fuzzes every parser for so many seconds of processor time each (`make fuzz`).

    python tests/fuzz/run.py SECONDS [TARGET...]

The C++ targets are built with AddressSanitizer and UndefinedBehaviorSanitizer in
build/fuzz and driven by tests/fuzz/driver.cc; where clang++ is found, by libFuzzer too,
from build/fuzz-clang. The Python parsers are driven by hypothesis. An input that ends a
target is left in build/fuzz/crash-TARGET; put it into tests/fuzz/corpus/TARGET when the
fault is mended: `make test` runs it from then on. Exit code 0: nothing crashed.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
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


def run(command: list[str], name: str, seconds: int) -> bool:
    """Runs one target; True when it ended well. Processor time may be scarce."""
    begin = time.monotonic()
    print(f"{name}: {seconds} s", flush=True)
    code = subprocess.run(
        command, env=ENVIRON, cwd=ROOT, timeout=20 * seconds + 600
    ).returncode
    elapsed = time.monotonic() - begin
    print(f"{name}: exit code {code} after {elapsed:.0f} s by the clock", flush=True)
    return code == 0


def main() -> int:
    """Runs those named, or all."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    names = sys.argv[2:] or targets()
    if unknown := [name for name in names if name not in targets()]:
        print(f"expected some of {targets()}, got {unknown}")
        return 2
    folder = ROOT / "build" / "fuzz"
    native = [name for name in names if name != PYTHON]
    clang = shutil.which("clang++")
    if native:
        build(folder, "-DTFDIST_COVERAGE=ON")
        if clang:
            build(
                ROOT / "build" / "fuzz-clang",
                "-DTFDIST_LIBFUZZER=ON",
                f"-DCMAKE_CXX_COMPILER={clang}",
            )
    failed = []
    for name in native:
        corpus = CORPUS / name
        found = folder / f"corpus-{name}"  # grows from run to run
        found.mkdir(exist_ok=True)
        crash = folder / f"crash-{name}"
        own = [f"-seconds={seconds}", f"-seed={int(time.time()) % 2**31}"]
        command = [str(folder / name), *own, f"-crash={crash}", f"-keep={found}"]
        command += [str(corpus), str(found)]
        if not run(command, name, seconds):
            failed.append(f"{name} (input: {crash})")
        if clang:
            program = ROOT / "build" / "fuzz-clang" / name
            command = [str(program), f"-max_total_time={seconds}", str(found)]
            if not run([*command, str(corpus)], f"{name} (libFuzzer)", seconds):
                failed.append(f"{name} (libFuzzer)")
    if PYTHON in names:
        share = max(1, seconds // 10)  # there are ten tests
        command = [sys.executable, str(HERE / "test_fuzz_python.py"), str(share)]
        if not run(command, PYTHON, seconds):
            failed.append(PYTHON)
    if native and not clang:
        print(f"skipped: {len(native)} targets under libFuzzer (no clang++ here)")
    print(
        f"CRASHED: {', '.join(failed)}" if failed else f"{len(names)} targets, no crash"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
