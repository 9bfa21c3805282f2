"""Ranks keep the memory of their tensors, unless the user wants it otherwise."""

import sys

import pytest
from helpers.deadline import deadline
from helpers.launcher import run

from tfdist.core import allocator

pytestmark = pytest.mark.faults
NAMES = [allocator.USE_BFC, allocator.LIMIT_MIB]
SHOW = f"import os; print([os.environ.get(name) for name in {NAMES}])"
# Pages that are mapped while results of 64 MiB come and go: of TensorFlow's own
# operation and of an allreduce.
FAULTS = """
import resource
import tensorflow as tf
import tfdist

tfdist.init()
x = tf.ones([16 << 20])
for _ in range(3):
    tfdist.allreduce(-x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    tfdist.allreduce(-x)
print("mapped", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@deadline(130)
def test_results_that_come_and_go_cost_no_pages_under_any_launcher(tmp_path):
    unset = ["env", *(f"--unset={name}" for name in NAMES)]
    python = [sys.executable, "-c", FAULTS]
    # Operations of oneDNN, on by themselves on some processors, come with an allocator
    # that keeps memory too.
    plain = {"TF_ENABLE_ONEDNN_OPTS": "0"}
    done = run(tmp_path, "-np", "2", *unset, *python, timeout_s=120, **plain)
    assert done.code == 0, done.stderr
    mapped = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(mapped) == 2
    assert max(mapped) < 2000, "of 64 MiB malloc gives 16,384 back each time"


@deadline(40)
def test_tfdistrun_asks_for_it_before_the_program_begins(tmp_path):
    done = run(tmp_path, "-np", "2", sys.executable, "-c", SHOW)
    most = allocator.settings({})[allocator.LIMIT_MIB]
    assert int(most) > 0
    assert done.stdout.count(f"['true', '{most}']") == 2, done.stdout


@deadline(40)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({allocator.USE_BFC: "false"}, ["false", None]),
        ({allocator.USE_BFC: "1"}, ["1", None]),
        ({allocator.LIMIT_MIB: "500"}, ["true", "500"]),
    ],
)
def test_what_the_user_has_set_stays(tmp_path, given, found):
    done = run(tmp_path, "-np", "2", sys.executable, "-c", SHOW, **given)
    assert done.stdout.count(str(found)) == 2, done.stdout
