"""Builds the native libraries: `libtfdist_core.so` and `libtfdist_tf.so`.

pip calls this; the rest of the package's description is in pyproject.toml. CMake
compiles `tfdist_ops/` against the TensorFlow of the running interpreter and puts both
libraries into `tfdist/_native/`: in the source tree for an editable install, in the
wheel otherwise. What was compiled stays in `build/`, so that a second build compiles
only what changed.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("libtfdist_core.so", "libtfdist_tf.so")
BUILD_TIMEOUT_S = 1800

# Run by the interpreter that builds: TensorFlow logs to stdout's neighbour, so the last
# line is the answer.
QUESTION = """
import json, tensorflow as tf
print(json.dumps({"version": tf.__version__, "include": tf.sysconfig.get_include(),
                  "lib": tf.sysconfig.get_lib(),
                  "flags": tf.sysconfig.get_compile_flags()}))
"""


def find_tensorflow() -> dict:
    """Version, folders and compile flags of the TensorFlow to build for.

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
    key = f"{sys.executable} {origin} {origin.stat().st_mtime_ns}"
    kept = build_folder() / "tensorflow.json"
    if kept.is_file():
        answer = json.loads(kept.read_text())
        if answer["key"] == key:
            return answer
    found = subprocess.run(
        [sys.executable, "-c", QUESTION],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    if found.returncode != 0:
        raise SetupError(
            f"\nTensorFlow is installed at {origin.parent} but does not import:\n"
            f"{found.stderr[-2000:]}\nRepair it first: python -c 'import tensorflow'"
        )
    answer = {"key": key, **json.loads(found.stdout.strip().splitlines()[-1])}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(answer))
    return answer


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
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++"]
    if not any(shutil.which(c.split()[0]) for c in compilers):
        raise SetupError(
            f"\ntfdist needs a C++17 compiler; tried {', '.join(compilers)}.\n"
            "Install g++ 9 or newer (Debian, Ubuntu: apt install g++), or name one: "
            "CXX=/path/to/g++ pip install ..."
        )
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
    """Runs CMake in the place of setuptools' compiler."""

    def run(self) -> None:
        tensorflow = find_tensorflow()
        cmake, generator = check_tools()
        output = self._output_folder()
        output.mkdir(parents=True, exist_ok=True)
        # The include folder is given apart, to be a system folder: TensorFlow's
        # headers are full of warnings. The standard is set in CMakeLists.txt.
        flags = [
            flag
            for flag in tensorflow["flags"]
            if not flag.startswith(("-I", "-std=", "--std="))
        ]
        # Not always: what another compiler warns of, nobody may have seen. Told each
        # time, because CMake keeps what it was told.
        strict = "ON" if os.environ.get("WERROR") == "1" else "OFF"
        # What changes from here on is newer than the build (tfdist_ops/fresh.cmake).
        begun = build_folder() / "begun"
        begun.touch()
        run_tool(
            cmake,
            *("-S", str(ROOT / "tfdist_ops"), "-B", str(build_folder()), *generator),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTFDIST_WERROR={strict}",
            f"-DTFDIST_TF_INCLUDE={tensorflow['include']}",
            f"-DTFDIST_TF_LIB={tensorflow['lib']}",
            f"-DTFDIST_TF_FLAGS={';'.join(flags)}",
            f"-DTFDIST_TF_VERSION={tensorflow['version']}",
            f"-DTFDIST_VERSION={self.distribution.get_version()}",
            f"-DTFDIST_OUTPUT_DIR={output}",
        )
        run_tool(
            cmake, "--build", str(build_folder()), "--parallel", str(parallel_jobs())
        )
        begun.replace(build_folder() / "built")

    def _output_folder(self) -> Path:
        in_source = self.inplace or getattr(self, "editable_mode", False)
        return (ROOT if in_source else Path(self.build_lib).resolve()) / (
            "tfdist/_native"
        )

    def get_outputs(self) -> list[str]:
        return [str(self._output_folder() / name) for name in LIBRARIES]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # an editable install builds in the source tree, nothing is copied

    def get_source_files(self) -> list[str]:
        folder = ROOT / "tfdist_ops"
        return [
            str(path.relative_to(ROOT))
            for path in sorted(folder.rglob("*"))
            if path.suffix in {".h", ".cc", ".cu", ".txt", ".cmake"}
        ]


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
    """One compiler for each core and for each GiB of memory, which one file needs."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(memory_gib)))


setup(
    license="Apache-2.0",
    # No sources: BuildNative knows them. It makes the wheel one for this platform.
    ext_modules=[Extension("tfdist._native", sources=[])],
    cmdclass={"build_ext": BuildNative},
)
