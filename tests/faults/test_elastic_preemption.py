"""SIGTERM to ranks of an elastic job, and to tfdistrun: no step is lost."""

import os
import signal
import sys

import numpy as np
import pytest
from faults.test_elastic import checked_commits, command, sizes, train
from helpers.deadline import deadline
from helpers.elastic_client import Report
from helpers.elastic_folder import latest_size, lines
from helpers.elastic_program import expected
from helpers.launcher import finish, run, start, until

pytestmark = pytest.mark.faults


def start_training(folder, *options):
    """Starts a job that trains for long, and waits until it trains."""
    process = start(folder, *options, *command(folder, 100_000))
    until(lambda: len(lines(folder / "commits")) > 50, 60.0)
    return process


def check_saved(folder, members):
    """Checks what a preempted job has saved, and that nothing else ran after it."""
    saved = np.load(folder / "saved.npz")
    uses, order = expected(int(saved["steps"]))
    assert np.array_equal(saved["uses"], uses) and saved["order"] == order
    preempted = {line["member"]: line["step"] for line in lines(folder / "preempted")}
    assert preempted == dict.fromkeys(members, int(saved["steps"]))
    assert not list(folder.glob("end-*")) and not (folder / "result.npz").exists()
    return int(saved["steps"])


# In `make test` with `fit`: test_elastic_fit_preemption.py.
@pytest.mark.slow
@deadline(120)
def test_a_rank_that_gets_sigterm_leaves_and_no_step_is_undone(tmp_path):
    (tmp_path / "term-0-20-before").touch()
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "0")
    done, commits = train(tmp_path, *options, steps=200)
    assert sizes(commits[1]) == [2, 1] and len(commits[1]) == 200
    assert not lines(tmp_path / "undone")
    assert "rank 0" in done.report[0] and "leaves after a step" in done.report[0]
    assert "the job goes on with 1 rank after commit" in done.report[1]
    assert len(done.report) == 2
    assert not (tmp_path / "end-0").exists()


@deadline(60)
def test_sigterm_to_tfdistrun_ends_all_ranks_after_the_same_step(tmp_path):
    """A loop without TensorFlow."""
    (tmp_path / "hold").touch()
    program = [sys.executable, "-m", "helpers.elastic_handover", str(tmp_path), "1"]
    process = start(tmp_path, "-np", "3", "--min-np", "1", *program)
    until(lambda: len(lines(tmp_path / "generations")) == 3, 30.0)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143, done.stderr
    reports = [Report.read(tmp_path / f"member-{member}") for member in range(3)]
    [committed] = {report.committed for report in reports}
    assert committed > 0 and not lines(tmp_path / "undone")
    assert f"the job is preempted after commit {committed}" in done.report[0]
    assert not (tmp_path / "result.npz").exists()


@deadline(120)
def test_a_rank_is_lost_and_then_the_job_is_preempted(tmp_path):
    (tmp_path / "kill-0-20-after").touch()
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "0")
    process = start(tmp_path, *options, *command(tmp_path, 100_000))
    until(lambda: latest_size(tmp_path / "commits") == 1, 60.0)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143, done.stderr
    commits = checked_commits(tmp_path)
    steps = check_saved(tmp_path, [1])
    assert sizes(commits[1]) == [2, 1]
    assert steps - 1 <= len(commits[1]) <= steps  # the last commit does not return
    assert commits[0][-1]["step"] == 19
    assert "killed by SIGKILL" in done.report[0] and done.report[0].startswith("rank 0")
    assert "the job goes on with 1 rank after commit" in done.report[1]
    assert "the job is preempted after commit" in done.report[2]


# In `make test`: the two tests above.
@pytest.mark.slow
@deadline(120)
def test_sigterm_to_tfdistrun_lets_all_ranks_save_the_same_step(tmp_path):
    process = start_training(tmp_path, "-np", "2", "--min-np", "1")
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143, done.stderr
    check_saved(tmp_path, [0, 1])
    assert not lines(tmp_path / "undone")
    assert "the job is preempted after commit" in done.report[0]
    assert done.report[1].startswith("preempted before the last step: start the job")


@pytest.mark.slow
@deadline(120)
def test_the_job_ends_if_too_few_ranks_would_be_left(tmp_path):
    (tmp_path / "term-1-20-after").touch()
    options = ("-np", "2", "--min-np", "2", "--max-restarts", "0")
    done, _ = train(tmp_path, *options, steps=5000, code=143)
    check_saved(tmp_path, [0, 1])
    assert not lines(tmp_path / "undone")
    assert "failed first" not in done.stderr


@pytest.mark.slow
@deadline(200)
def test_two_ranks_get_sigterm_in_one_step(tmp_path):
    """One of them is rank 0, which writes the result."""
    for member, place in ((0, "before"), (2, "commit")):
        (tmp_path / f"term-{member}-20-{place}").touch()
    done, commits = train(tmp_path, "-np", "4", "--min-np", "1", steps=400)
    assert min(row["size"] for row in commits[1]) == 2
    assert sum("is started" in line for line in done.report) == 2
    assert not any("was lost" in line for line in done.report)


@pytest.mark.slow
@deadline(200)
def test_a_rank_gets_sigterm_while_another_one_is_lost(tmp_path):
    """It takes part in the recovery, and then leaves."""
    (tmp_path / "kill-2-20-before").touch()
    (tmp_path / "term-1-20-after").touch()
    done, commits = train(tmp_path, "-np", "3", "--min-np", "1", steps=400)
    assert min(row["size"] for row in commits[0]) == 1
    lost = [line for line in done.report if "was lost" in line]
    assert len(lost) == 1 and lost[0].startswith("rank 2")


@pytest.mark.slow
@deadline(120)
def test_all_ranks_get_sigterm_but_not_tfdistrun(tmp_path):
    process = start_training(tmp_path, "-np", "3", "--min-np", "1")
    for pid in {line["pid"] for line in lines(tmp_path / "commits")}:
        os.kill(pid, signal.SIGTERM)
    done = finish(process, 60.0)
    assert done.code == 143, done.stderr
    left = sum(name.startswith("rank") for name in done.report)
    assert left == 3
    assert len(lines(tmp_path / "preempted")) >= 1 and (tmp_path / "saved.npz").exists()


@pytest.mark.slow
@deadline(120)
def test_sigterm_before_the_loop_ends_the_job_as_without_min_np(tmp_path):
    program = "import time; print('ready', flush=True); time.sleep(60)"
    options = ("-np", "2", "--min-np", "1", sys.executable, "-c", program)
    process = start(tmp_path, *options)
    assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143
    assert len(done.report) == 1 and done.report[0].startswith("ended by SIGTERM")


@pytest.mark.slow
@deadline(200)
def test_a_replacement_that_gets_sigterm_before_it_joins_is_replaced(tmp_path):
    (tmp_path / "kill-1-20-before").touch()
    (tmp_path / "term-2-0-before").touch()  # in its rehearsal
    done, commits = train(tmp_path, "-np", "2", "--min-np", "2", steps=60)
    assert 2 not in commits and commits[3][0]["step"] == 20
    assert any("replacement 2" in line and "SIGTERM" in line for line in done.report)


@pytest.mark.slow
@deadline(200)
@pytest.mark.parametrize("place", ["before", "after", "commit"])
def test_sigterm_in_the_last_step(tmp_path, place):
    """Before its commit, the rank leaves; after it, the signal has come too late."""
    (tmp_path / f"term-1-29-{place}").touch()
    (tmp_path / "slow").touch()
    options = ("-np", "2", "--min-np", "1")
    done = run(tmp_path, *options, *command(tmp_path, 30), timeout_s=150.0)
    assert (tmp_path / "result.npz").exists()
    assert (tmp_path / "end-0").exists() and done.code in (0, 143)


@pytest.mark.slow
@deadline(120)
def test_a_program_that_cannot_finish_its_step_is_killed_after_the_grace(tmp_path):
    (tmp_path / "hang-1-20").touch()
    options = ("-np", "2", "--min-np", "1", "--signal-grace-s", "2")
    process = start(tmp_path, *options, *command(tmp_path, 100))
    until(lambda: (tmp_path / "hangs").exists(), 60.0)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143 and done.seconds < 15.0
    assert "still running 2 s after the signal" in done.stderr


_HANGS_AFTER_SIGTERM = """
import os, signal, time
from tfdist.core import world
from tfdist.core.generations import Generations
world.start()
Generations(progress=lambda: (1, 10)).begin()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@deadline(60)
def test_the_job_fails_if_its_last_rank_is_killed_after_the_grace(tmp_path):
    options = ("--max-restarts", "0", "--signal-grace-s", "0.5")
    program = [sys.executable, "-c", _HANGS_AFTER_SIGTERM]
    done = run(tmp_path, "-np", "1", "--min-np", "1", *options, *program)
    assert done.code == 137, done.stderr
    assert "is killed: it did not end within" in done.stderr
    assert "failed first: ended by tfdistrun" in done.stderr


_ENDS_ON_SIGNAL = """
import os, signal, sys, time
is_spare = int(os.environ["TFDIST_MEMBER"]) >= 2
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.SIG_IGN if is_spare else lambda *_: sys.exit(128 + number))
print("ready", flush=True)
time.sleep(60)
"""


@deadline(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_program_that_ends_on_another_signal_ends_the_job(tmp_path, number):
    program = [sys.executable, "-c", _ENDS_ON_SIGNAL, number.name]
    options = ("-np", "2", "--min-np", "1", "--spares", "1")
    process = start(tmp_path, *options, *program)
    for _ in range(3):
        assert "ready" in process.stdout.readline()
    process.send_signal(number)
    done = finish(process, 20.0)
    assert done.code == 128 + number, done.stderr
    assert "replacement" not in done.stderr and "was lost" not in done.stderr
