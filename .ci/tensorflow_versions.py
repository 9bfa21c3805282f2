"""Tries tfdist with the oldest and the newest TensorFlow (`make test-versions`).

For each version: a copy of the tree in build/versions/VERSION, `.ci/setup` there as on
a fresh machine but held to that TensorFlow, and the tests below. A version as argument
runs that one alone. Exit code 0 only when all passed.

README.md names these versions and no other.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.tree import tracked_files  # noqa: E402

VERSIONS = ("2.16", "2.21")
# TensorFlow 2.16 needs protobuf 4. Later versions of tensorflow-metadata, which comes
# with tensorflow-datasets, can be installed with it, but not imported.
# It is tried with the oldest Keras that tfdist supports.
HELD = {"2.16": ("tensorflow-metadata<1.18", "keras<3.12")}
# Ops, tape, optimizer, fit, XLA, overlap, callbacks, what depends on private functions
# of TensorFlow, and the sample of the matrix.
SMOKE = (
    "tests/single/test_ops_single.py",
    "tests/single/test_optimizer.py",
    "tests/single/test_records.py",
    "tests/single/test_jit_compile.py",
    "tests/parallel/test_ops_values.py",
    "tests/parallel/test_ops_graph.py",
    "tests/parallel/test_overlap.py",
    "tests/parallel/test_tape.py",
    "tests/parallel/test_sparse.py",
    "tests/parallel/test_fit_equality.py",
    "tests/parallel/test_jit_compile.py",
    "tests/parallel/test_matrix.py",
    "tests/parallel/test_atomic_steps.py",
    "tests/parallel/test_call_order.py",
    "tests/parallel/test_callbacks_keras.py",
    "tests/parallel/test_metric_average_order.py",
    "tests/single/test_batch_norm.py",
)
SHOW = "import keras, tensorflow as tf; print(tf.__version__, keras.__version__)"
TIMEOUT_S = 1800


def copy_tree(target: Path) -> None:
    """The working tree as git sees it; what an earlier run has installed stays."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name == ".venv":
            continue
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for file in tracked_files((".",)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target / file)


def run_minor(version: str) -> bool:
    """Sets up and tests one version; True when all passed."""
    tree = ROOT / "build" / "versions" / version
    copy_tree(tree)
    held = tree / "constraints.txt"
    lines = (f"tensorflow-cpu=={version}.*", *HELD.get(version, ()))
    held.write_text("".join(f"{line}\n" for line in lines))
    environment = {**os.environ, "PIP_CONSTRAINT": str(held)}
    python = str(tree / ".venv" / "bin" / "python")
    commands = (
        ["./.ci/setup", "packages"],
        ["./.ci/setup", "build"],
        [python, "-c", SHOW],
        [python, "-m", "pytest", "-q", "-m", "not slow", *SMOKE],
    )
    for command in commands:
        code = subprocess.run(
            command, cwd=tree, env=environment, timeout=TIMEOUT_S
        ).returncode
        if code != 0:
            print(f"TensorFlow {version}: exit code {code}: {' '.join(command)}")
            return False
    return True


def main() -> int:
    """Tries the versions one after the other."""
    versions = sys.argv[1:] or VERSIONS
    passed = {}
    for version in versions:
        print(f"======== TensorFlow {version}", flush=True)
        passed[version] = run_minor(version)
    for version, ok in passed.items():
        print(f"TensorFlow {version}: {'passed' if ok else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
