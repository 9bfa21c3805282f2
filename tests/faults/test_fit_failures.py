"""One rank fails in the middle of a step of `fit`: everybody knows who, at once."""

import json
import os
import pathlib
import re
import signal
import sys

import pytest
from helpers.deadline import deadline
from helpers.launcher import Holdings, finish, left_over, marked, run, start, until

PROGRAM = pathlib.Path(__file__).with_name("fit_program.py")
SAW = re.compile(r"\[rank (\d)\] SAW (\w+) (-?\d+) after ([0-9.]+) s")
NOTHING = Holdings(frozenset(), frozenset())


def program(tmp_path, action, rank):
    return [sys.executable, str(PROGRAM), action, str(rank), str(tmp_path / "time")]


def held(stdout):
    """What all ranks together had while they trained."""
    lines = [
        json.loads(x) for x in re.findall(r"^\[rank \d\] HOLDS (.*)", stdout, re.M)
    ]
    assert len(lines) == 3, stdout
    ports = frozenset(port for line in lines for port in line[0])
    return Holdings(ports, frozenset(tuple(m) for line in lines for m in line[1]))


def files_of_shared_memory():
    """Those that only tfdist could have made; other programs make theirs meanwhile."""
    return {name for name in os.listdir("/dev/shm") if "tfdist" in name}  # noqa: S108


def check_that_nothing_is_left(stdout, marker, files):
    until(lambda: marked(marker) == [], timeout_s=5)
    job = held(stdout)
    # One for each pair of ranks, and the window of each rank.
    assert job.ports and len(job.memory) == 6
    until(lambda: left_over(job) == NOTHING, timeout_s=5)
    assert files_of_shared_memory() == files


# Names, times and a clean end are in `make test` behind the gate, below.
@pytest.mark.slow
@deadline(120)
@pytest.mark.parametrize(
    ("action", "code", "first"),
    [
        ("kill", 137, "killed by SIGKILL"),
        ("raise", 1, "exit code 1"),
    ],
)
def test_the_others_and_the_launcher_name_the_rank(
    tmp_path, action, code, first, marker
):
    files = files_of_shared_memory()
    done = run(
        tmp_path, "-np", "3", *program(tmp_path, action, 1),
        timeout_s=100, MARK=marker, TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    assert done.code == code, done.stderr
    assert "no sign of life" not in done.stderr  # that takes 2 s
    assert re.match(rf"rank 1 on \S+ failed first: {first}", done.report[0])
    seen = {int(found[0]): found[1:] for found in SAW.findall(done.stdout)}
    for rank in (0, 2):
        kind, who, seconds = seen[rank]
        assert (kind, who) == ("RankFailedError", "1"), done.stdout
        assert float(seconds) < 10.0
    if action == "raise":
        kind, _, seconds = seen[1]
        assert kind == "own"
        assert float(seconds) < 10.0
        why = "Graph execution error: ValueError: label 11 is not a digit"
        assert done.report[-1] == f"reason: InvalidArgumentError: {why}"
        for rank in (0, 2):
            line = (
                rf"^\[rank {rank}\] \[tfdist\] rank {rank} ends with .* of rank 1, at"
            )
            assert re.search(line, done.stderr, re.MULTILINE), done.stderr
            log = next(tmp_path.glob(f"tfdist-logs/*/rank-{rank}.log")).read_text()
            told = rf"rank 1 \(.*\) failed.*: InvalidArgumentError: {why}"
            assert re.search(told, log), log
    for rank in (0, 2):
        refusal = re.search(rf"\[rank {rank}\] SAVE (.*)", done.stdout)
        assert refusal is not None
        assert "last good step is 2" in refusal[1]
        assert (tmp_path / f"good-{rank}.keras").read_text() == "saved before"
    check_that_nothing_is_left(done.stdout, marker, files)


@deadline(120)
def test_behind_the_commit_gate_the_survivors_are_equal_and_can_save(tmp_path, marker):
    files = files_of_shared_memory()
    done = run(
        tmp_path, "-np", "3", *program(tmp_path, "kill", 1),
        timeout_s=100, MARK=marker, TFDIST_ATOMIC_STEPS="1", TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    assert done.code == 137, done.stderr
    assert "no sign of life" not in done.stderr  # that takes 2 s
    assert re.match(r"rank 1 on \S+ failed first: killed by SIGKILL", done.report[0])
    seen = {int(found[0]): found[1:] for found in SAW.findall(done.stdout)}
    assert all(float(seen[rank][2]) < 10.0 for rank in (0, 2)), done.stdout
    assert {rank: seen[rank][:2] for rank in (0, 2)} == {
        0: ("RankFailedError", "1"),
        2: ("RankFailedError", "1"),
    }
    saved = dict(re.findall(r"^\[rank (\d)\] SAVED (.*)", done.stdout, re.M))
    assert saved.keys() == {"0", "2"}, done.stdout
    assert saved["0"] == saved["2"]
    # It was killed in its third step, before that was reduced.
    assert re.fullmatch(r"[0-9a-f]{64} step 2", saved["0"])
    for rank in (0, 2):
        assert (tmp_path / f"good-{rank}.keras").stat().st_size > 1000
    check_that_nothing_is_left(done.stdout, marker, files)


# In `make test` without TensorFlow: test_launch_exit.py.
@pytest.mark.slow
@deadline(120)
def test_an_interrupt_is_told_in_one_line_a_rank(tmp_path):
    process = start(
        tmp_path, "-np", "2", *program(tmp_path, "interrupt", -1),
        TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    trained = 0
    while trained < 6:  # three epochs on each rank
        line = process.stdout.readline()
        assert line, "the job ended by itself"
        trained += "HOLDS" in line
    process.send_signal(signal.SIGINT)
    done = finish(process, 60.0)
    assert done.code == 130
    for rank in range(2):
        lines = re.findall(
            rf"^\[rank {rank}\] (?:\[tfdist\]|rank) .*", done.stderr, re.M
        )
        assert len(lines) == 1, done.stderr
        assert "was interrupted" in lines[0]
    assert "Traceback" not in done.stderr
    assert "pybind11" not in done.stderr


FULL = """
import time, numpy as np, keras, tfdist
tfdist.init()
x = np.ones((48, 3), "float32")
class Full(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise OSError(28, "No space left on device", "c.keras")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
data = tfdist.data.shard((x, x[:, :1]), batch_size=4)
calls = [tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()]
calls.append(tfdist.callbacks.RankZeroOnly(Full()))
try:
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=calls)
except Exception:
    if tfdist.rank() == 0: time.sleep(0.3)  # as a long `finally` block does
    raise
"""


# In `make test` without TensorFlow: test_first_failure.py.
@pytest.mark.slow
@deadline(120)
@pytest.mark.parametrize("size", [2, 3])
def test_a_callback_that_fails_on_rank_zero_is_the_reason_whoever_ends_first(
    tmp_path, size
):
    done = run(
        tmp_path, "-np", str(size), sys.executable, "-c", FULL,
        timeout_s=100, TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    assert done.code == 1
    assert done.report[0].startswith("rank 0 ")
    reason = "reason: OSError: [Errno 28] No space left on device: 'c.keras'"
    assert done.report[-2] == reason
    assert done.stderr.count("Traceback") == 1
    line = (
        r"^\[rank (\d)\] \[tfdist\] rank \1 ends with RankFailedError because of rank 0"
    )
    assert len(re.findall(line, done.stderr, re.MULTILINE)) == size - 1
