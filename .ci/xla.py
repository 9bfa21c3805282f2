"""Builds `libtfdist_xla.so` beside the other libraries of tfdist (`make xla`).

The library goes to the tfdist that this interpreter imports. In an environment of your
own, use its interpreter: `python .ci/xla.py`.

Optional: with it, `jit_compile=True` compiles whole training steps, the reduction of
the gradients among them. It is built for the installed TensorFlow, against the headers
of its compiler: about a minute and 2 GB of memory. docs/models-and-loops.md says what
it changes.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "xla"
# Headers that the wheels of some versions of TensorFlow lack.
HEADERS = (
    "tensorflow/compiler/tf2xla/xla_op_kernel.h",
    "xla/hlo/builder/xla_builder.h",
    "xla/ffi/api/ffi.h",
    "external/highwayhash/highwayhash/arch_specific.h",
    "external/farmhash_archive/src/farmhash.h",
)
TIMEOUT_S = 1800


def missing(include: Path, lib: Path) -> list[Path]:
    """The files of TensorFlow that are needed and missing."""
    needed = [include / name for name in HEADERS] + [lib / "libtensorflow_cc.so.2"]
    return [path for path in needed if not path.exists()]


def native_folder() -> Path | None:
    """Where the tfdist that this interpreter imports has its libraries, if built."""
    spec = importlib.util.find_spec("tfdist")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).resolve().parent / "_native"
    return folder if (folder / "libtfdist_core.so").is_file() else None


def program(name: str) -> str:
    """A program beside the interpreter (from a wheel), or one of PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else name


def main() -> int:
    """Configures and builds; the exit code."""
    include = Path(tf.sysconfig.get_include())
    lib = Path(tf.sysconfig.get_lib())
    absent = missing(include, lib)
    if absent:
        print(
            f"make xla: TensorFlow {tf.__version__} comes without what the library is "
            "built from:\n  " + "\n  ".join(map(str, absent)) + "\n"
            "Nothing was built. tfdist works without it: jit_compile=True compiles "
            "the forward and backward pass; the reduction and the update run outside.",
            file=sys.stderr,
        )
        return 1
    native = native_folder()
    if native is None:
        print("make xla: install tfdist here first (make setup).", file=sys.stderr)
        return 1
    flags = [
        flag
        for flag in tf.sysconfig.get_compile_flags()
        if not flag.startswith(("-I", "-std=", "--std="))
    ]
    configure = [
        program("cmake"),
        *("-S", str(ROOT / "tfdist_ops" / "xla"), "-B", str(BUILD), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
        "--log-level=WARNING",
        f"-DTFDIST_TF_INCLUDE={include}",
        f"-DTFDIST_TF_LIB={lib}",
        f"-DTFDIST_TF_FLAGS={';'.join(flags)}",
        f"-DTFDIST_TF_VERSION={tf.__version__}",
        f"-DTFDIST_OUTPUT_DIR={native}",
    ]
    # One file at a time: with TensorFlow's headers, each needs up to 2 GB.
    build = [program("cmake"), "--build", str(BUILD), "--parallel", "1"]
    for command in (configure, build):
        code = subprocess.run(command, timeout=TIMEOUT_S).returncode
        if code != 0:
            print(f"make xla: exit code {code}: {' '.join(command)}", file=sys.stderr)
            return code
    print(f"built {native / 'libtfdist_xla.so'} for TensorFlow {tf.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
