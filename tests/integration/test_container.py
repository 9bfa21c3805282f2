"""Ranks with a small /dev/shm, a read-only home, no user name, and no capabilities.

The program runs in namespaces of its own, which need no root on most systems.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.launcher import TFDISTRUN, clean_environment

from tfdist.core import native

ROOT = Path(__file__).resolve().parents[2]
USER = 12345  # has no entry in /etc/passwd
# Mounts as root of a namespace; then a user without capabilities, also SYS_PTRACE.
OUTER = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
SCRIPT = f"""
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o ro,size=64k tmpfs "$HOME"
exec unshare --user --map-user={USER} --map-group={USER} \\
  setpriv --inh-caps=-all --bounding-set=-all --no-new-privs "$@"
"""


def why_not():
    if missing := [p for p in ("unshare", "setpriv") if shutil.which(p) is None]:
        return f"not installed: {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [*OUTER, SCRIPT, "sh", "true"],
            env=clean_environment(HOME=home),
            capture_output=True,
            text=True,
            timeout=20,
        )
    return f"no namespace: {done.stderr.strip()}" if done.returncode else ""


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]


@pytest.fixture
def run():
    """Runs a command as in a container, in a folder in which it may write."""
    with tempfile.TemporaryDirectory(prefix="tfdist-container-") as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()

        def done(*command):
            return subprocess.run(
                [*OUTER, SCRIPT, "sh", *command],
                cwd=work,
                env=clean_environment(HOME=str(home), TMPDIR=str(work)),
                capture_output=True,
                text=True,
                timeout=150,
            )

        yield done


@deadline(60)
def test_the_conditions_are_those_of_a_container(run):
    code = (
        "import os, pwd, shutil\n"
        "assert shutil.disk_usage('/dev/shm').total == 64 << 20\n"
        "assert not os.access(os.environ['HOME'], os.W_OK)\n"
        "status = open('/proc/self/status').read()\n"
        "assert 'CapEff:\\t0000000000000000' in status\n"
        "try:\n    print(pwd.getpwuid(os.getuid()))\n"
        "except KeyError:\n    print('no name')\n"
    )
    done = run(sys.executable, "-c", code)
    assert done.stdout == "no name\n", done.stderr


@deadline(60)
def test_ranks_share_memory(run):
    client = [sys.executable, "-m", "helpers.core_client", "steps", "20"]
    done = run(*TFDISTRUN, "-np", "4", *client)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 4: all sums are right") == 4


@pytest.mark.slow
@deadline(100)
def test_two_ranks_train(run):
    example = str(ROOT / "recipes" / "mnist_fit.py")
    done = run(*TFDISTRUN, "-np", "2", sys.executable, example)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"same weights on all ranks: [0-9a-f]{12}", done.stdout)) == 1


@pytest.mark.slow
@deadline(100)
def test_doctor_finds_nothing_that_prevents_training(run):
    done = run(sys.executable, "-m", "tfdist.tools", "doctor", "--seconds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
