"""Builds the native libraries: the core, and the operations for TensorFlow.

pip calls this; the rest of the package's description is in pyproject.toml. CMake
compiles the core of `tfdist_ops/`, and `op_compiler` its operations for the TensorFlow
of the running interpreter, or of each interpreter that is named in
`BUILD_PYTHONS`, separated by colons. All libraries go into `tfdist/_native/`: in
the source tree for an editable install, in the wheel otherwise. What was compiled stays
in `build/`, so that a second build compiles only what changed.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
OP_COMPILER = ROOT / "tfdist" / "core" / "op_compiler.py"
BUILD_TIMEOUT_S = 1800

# Run by the interpreter that has the TensorFlow. Its import may print something, so the
# last line is the answer.
QUESTION = """
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "include": tf.sysconfig.get_include(),
                  "library": tf.sysconfig.get_lib(),
                  "flags": tf.sysconfig.get_compile_flags()}))
"""


def load_op_compiler() -> ModuleType:
    """The module, from its file: tfdist itself may not be importable yet."""
    spec = importlib.util.spec_from_file_location("op_compiler", OP_COMPILER)
    module = importlib.util.module_from_spec(spec)
    sys.modules["op_compiler"] = module  # where its dataclass looks for its names
    spec.loader.exec_module(module)
    return module


def find_tensorflows() -> list[dict]:
    """The TensorFlow of each interpreter for which the operations are compiled."""
    named = os.environ.get("BUILD_PYTHONS", "")
    pythons = [python for python in named.split(":") if python]
    return [ask_tensorflow(python) for python in pythons] or [find_tensorflow()]


def find_tensorflow() -> dict:
    """Version, folders and compile flags of the TensorFlow of this interpreter.

    Importing TensorFlow takes seconds, so the answer is kept until the package changes.
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise SetupError(
            "\ntfdist's operations are compiled against the installed TensorFlow, and "
            f"{sys.executable} cannot import one.\n"
            "pip builds in an environment of its own unless told otherwise. Do this:\n"
            "  pip install tensorflow-cpu   # or: tensorflow\n"
            "  pip install --no-build-isolation tfdist   # in the source folder: -e ."
        )
    origin = Path(spec.origin)
    # The number is the version of the answer's format.
    key = f"2 {sys.executable} {origin} {origin.stat().st_mtime_ns}"
    kept = build_folder() / "tensorflow.json"
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(kept.read_text())
        if answer.pop("key", "") == key:
            return answer
    answer = ask_tensorflow(sys.executable)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"key": key, **answer}))
    return answer


def ask_tensorflow(python: str) -> dict:
    """Version, folders and compile flags of the TensorFlow that `python` imports."""
    found = subprocess.run(
        [python, "-c", QUESTION],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    if found.returncode != 0:
        raise SetupError(
            f"\n{python} cannot import TensorFlow:\n{found.stderr[-2000:]}\n"
            f"Repair it first: {python} -c 'import tensorflow'"
        )
    return json.loads(found.stdout.strip().splitlines()[-1])


def build_folder() -> Path:
    """Where CMake works; one folder for each Python version and machine."""
    return ROOT / "build" / f"native-{sysconfig.get_platform()}-{sys.version_info[1]}"


def find_program(name: str) -> str | None:
    """A program beside the interpreter (from a wheel), or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def check_tools() -> tuple[str, list[str]]:
    """CMake's path, and its arguments that choose the generator."""
    cmake = find_program("cmake")
    if cmake is None:
        raise SetupError(
            "\ntfdist's native code is built by CMake, which was not found.\n"
            "Install it, without root: pip install cmake ninja"
        )
    op_compiler = load_op_compiler()
    try:
        op_compiler.find_compiler()
    except op_compiler.CompileError as error:
        raise SetupError(f"\nBuilding tfdist is not possible: {error}.") from None
    ninja = find_program("ninja")
    if ninja is not None:
        return cmake, ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    if shutil.which("make") is None:
        raise SetupError(
            "\nCMake needs Ninja or make to build tfdist; neither was found.\n"
            "Install one, without root: pip install ninja"
        )
    return cmake, ["-G", "Unix Makefiles"]


class BuildNative(build_ext):
    """Runs CMake and `op_compiler` in the place of setuptools' compiler."""

    def run(self) -> None:
        tensorflows = find_tensorflows()
        cmake, generator = check_tools()
        output = self._output_folder()
        output.mkdir(parents=True, exist_ok=True)
        # Off by default: other compilers may have warnings that nobody has seen yet.
        # Always passed, because CMake keeps the value of an earlier call.
        strict = "ON" if os.environ.get("WERROR") == "1" else "OFF"
        # Files changed from here on are newer than the build (tfdist_ops/fresh.cmake).
        build_folder().mkdir(parents=True, exist_ok=True)
        begun = build_folder() / "begun"
        begun.touch()
        run_tool(
            cmake,
            *("-S", str(ROOT / "tfdist_ops"), "-B", str(build_folder()), *generator),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTFDIST_WERROR={strict}",
            f"-DTFDIST_VERSION={self.distribution.get_version()}",
            f"-DTFDIST_OUTPUT_DIR={output}",
        )
        run_tool(
            cmake, "--build", str(build_folder()), "--parallel", str(parallel_jobs())
        )
        begun.replace(build_folder() / "built")
        remove_others(tensorflows, output)
        for tensorflow in tensorflows:
            build_operations(tensorflow, output)
        if not self._in_source():
            copy_sources(output / "tfdist_ops")

    def _in_source(self) -> bool:
        return bool(self.inplace or getattr(self, "editable_mode", False))

    def _output_folder(self) -> Path:
        root = ROOT if self._in_source() else Path(self.build_lib).resolve()
        return root / "tfdist" / "_native"

    def get_outputs(self) -> list[str]:
        made = sorted(self._output_folder().rglob("*"))
        return [str(path) for path in made if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install builds in the source tree, nothing is copied

    def get_source_files(self) -> list[str]:
        folder = ROOT / "tfdist_ops"
        return [
            str(path.relative_to(ROOT))
            for path in sorted(folder.rglob("*"))
            if path.suffix in {".h", ".cc", ".cu", ".txt", ".cmake"}
        ]


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3: no library of tfdist uses CPython's C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def build_operations(described: dict, output: Path) -> None:
    """Compiles the operations for one TensorFlow, unless that was done before."""
    op_compiler = load_op_compiler()
    flags = tuple(described["flags"])
    tensorflow = op_compiler.TensorFlow(**{**described, "flags": flags})
    source = ROOT / "tfdist_ops"
    library = output / op_compiler.library_name(tensorflow.version)
    stamp = build_folder() / f"{library.name}.key"
    key = f"{op_compiler.cache_key(source, tensorflow)} {library}"
    if library.is_file() and stamp.is_file() and stamp.read_text() == key:
        return
    print(f"compiling {library} for TensorFlow {tensorflow.version}", flush=True)
    try:
        print(op_compiler.compile_operations(tensorflow, source, output, library))
    except op_compiler.CompileError as error:
        raise SetupError(f"\n{error}") from None
    stamp.write_text(key)


def remove_others(tensorflows: list[dict], output: Path) -> None:
    """Removes what an earlier build for another TensorFlow has left in `output`."""
    op_compiler = load_op_compiler()
    names = {op_compiler.library_name(one["version"]) for one in tensorflows}
    for library in output.glob("libtfdist_tf*.so"):
        if library.name not in names:
            library.unlink()


def copy_sources(target: Path) -> None:
    """Copies the sources of the operations, for compiling them on first use."""
    shutil.rmtree(target, ignore_errors=True)
    source = ROOT / "tfdist_ops"
    for file in load_op_compiler().source_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def run_tool(*command: str) -> None:
    """Runs a tool and shows what it says; its failure ends the build."""
    print(" ".join(command), flush=True)
    done = subprocess.run(command, timeout=BUILD_TIMEOUT_S)
    if done.returncode != 0:
        raise SetupError(
            f"\nBuilding tfdist's native code failed (exit code {done.returncode}); "
            f"the reason stands above. To start afresh: rm -r {build_folder()}"
        )


def parallel_jobs() -> int:
    """One compiler per core, but at most one per GiB of memory, which a file needs."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(memory_gib)))


setup(
    license="Apache-2.0",
    # No sources: BuildNative knows them. An extension ties the wheel to a platform.
    ext_modules=[Extension("tfdist._native", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
