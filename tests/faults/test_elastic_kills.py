"""Kills processes of elastic jobs; `make campaign` kills a thousand."""

import functools
import os
import signal
import sys
import time

import psutil
import pytest
from campaign import elastic
from helpers.deadline import deadline
from helpers.elastic_client import Report, generations_of
from helpers.launcher import finish, shell, start, until

pytestmark = pytest.mark.faults


@deadline(60)
def test_every_step_counts_once_whatever_is_killed():
    found = elastic.trial(1, kills=6)
    assert found["ok"], found["why"]
    assert found["loss_s"]


@pytest.mark.slow
@deadline(600)
@pytest.mark.parametrize("seed", range(2, 10))
def test_every_step_counts_once_after_many_kills(seed):
    found = elastic.trial(seed)
    assert found["ok"], found["why"]


@deadline(60)
def test_replacements_that_never_join_do_not_fail_the_job(tmp_path):
    client = f"{sys.executable} -m helpers.elastic_client {tmp_path} 10"
    script = f'[ "$TFDIST_MEMBER" -lt 2 ] || exit 3; exec {client}'
    (tmp_path / "hold").touch()
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "9")
    process = start(tmp_path, *options, *shell(script))
    until(lambda: Report.read(tmp_path / "member-1").committed > 0, 30.0)
    os.kill(Report.read(tmp_path / "member-1").pid, signal.SIGKILL)
    until(lambda: [1] == [g["size"] for g in generations_of(tmp_path)][2:], 30.0)
    until(lambda: len(list((tmp_path / "tfdist-logs").glob("*/replacement-4.log"))) > 0)
    (tmp_path / "hold").unlink()
    done = finish(process)
    assert done.code == 0, done.stderr
    assert "replacement 4 (process" in done.stderr
    assert "failed first" not in done.stderr


@deadline(60)
def test_tfdistrun_keeps_nothing_open_of_lost_ranks(tmp_path):
    (tmp_path / "hold").touch()
    program = ["-m", "helpers.elastic_client", str(tmp_path), "10"]
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "9")
    process = start(tmp_path, *options, sys.executable, *program)
    launcher, counts = psutil.Process(process.pid), []
    for newest in range(1, 4):
        report = functools.partial(Report.read, tmp_path / f"member-{newest}")
        until(lambda report=report: report().committed > 3, 30.0)
        time.sleep(0.2)
        counts.append(launcher.num_fds())
        os.kill(report().pid, signal.SIGKILL)
    (tmp_path / "hold").unlink()
    done = finish(process)
    assert done.code == 0, done.stderr
    # The log file of the last lost rank is still open, for its last words.
    assert max(counts[1:]) <= counts[0] + 1, counts
