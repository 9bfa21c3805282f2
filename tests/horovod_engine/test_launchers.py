"""TFDIST_ENGINE=horovod with a Horovod that is installed; docs/horovod-engine.md.

Horovod builds for other versions of TensorFlow than this suite runs with, so it is
another Python: HOROVOD_PYTHON names it. Without it these tests are skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.launcher import clean_environment

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("HOROVOD_PYTHON", "")
PROGRAM = str(ROOT / "tests" / "helpers" / "horovod_engine_program.py")
FAILING = str(ROOT / "tests" / "helpers" / "horovod_engine_failing.py")

pytestmark = [
    pytest.mark.skipif(
        not PYTHON,
        reason="needs a Python with Horovod: HOROVOD_PYTHON (docs/horovod-engine.md)",
    ),
    pytest.mark.deadline(400),
]
LAUNCHERS = {
    "tfdistrun": [PYTHON, "-m", "tfdist.launch", "-np", "2"],
    "horovodrun": [PYTHON, "-m", "horovod.runner.launch", "--gloo", "-np", "2"],
    "mpirun": ["mpirun", "--oversubscribe", "-np", "2"],
}


def run(cwd, command, **environ):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(TFDIST_ENGINE="horovod", **root, **quiet, **environ),
        capture_output=True,
        text=True,
        timeout=200,
    )


def trained(done):
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("weights ")[2] for line in done.stdout.splitlines()]
    for what in ("ranks 2", "fit equal", "tape equal", "loss equal", "constants right"):
        assert what in done.stdout, done.stdout
    (weights,) = filter(None, lines)
    return [float(word) for word in weights.split()]


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """What two ranks of the native engine end with, with this Python."""
    folder = tmp_path_factory.mktemp("native")
    command = [sys.executable, "-m", "tfdist.launch", "-np", "2"]
    return trained(
        subprocess.run(
            [*command, sys.executable, PROGRAM],
            cwd=folder,
            env=clean_environment(CUDA_VISIBLE_DEVICES=""),
            capture_output=True,
            text=True,
            timeout=200,
        )
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fit_and_tape_end_with_the_weights_of_the_native_engine(
    launcher, native, tmp_path
):
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun, or none that Horovod was built with")
    found = trained(run(tmp_path, [*LAUNCHERS[launcher], PYTHON, PROGRAM]))
    assert found == pytest.approx(native, abs=2e-5)


@pytest.mark.parametrize(
    ("what", "expected", "ranks"),
    [
        ("kill", "RankFailedError rank=1", [0]),  # rank 1 is gone
        ("shape", "MismatchError rank=None", [0, 1]),
        ("deadline", "TimeoutError rank=1", [0, 1]),
        ("absent", "TimeoutError rank=None", [0]),  # rank 1 does not come
        ("join", "UnsupportedError rank=None", [0, 1]),
        ("send", "UnsupportedError rank=None", [0, 1]),
        ("bfloat16", "TypeError rank=None", [0, 1]),
    ],
)
def test_what_goes_wrong_ends_on_every_rank_with_our_error(
    what, expected, ranks, tmp_path
):
    command = [*LAUNCHERS["tfdistrun"], PYTHON, FAILING, what]
    done = run(tmp_path, command, TFDIST_TIMEOUT_S="6")
    for rank in ranks:
        assert f"rank {rank}: {expected}" in done.stdout, done.stdout + done.stderr
