"""Processes of elastic jobs whose program is no training: how they end, and the code.

Newcomers are processes with a member number of 2 or more: the jobs begin with 2 ranks.
"""

import signal
import time

import psutil
import pytest
from helpers.deadline import deadline
from helpers.launcher import finish, marked, python, shell, start, until

pytestmark = pytest.mark.faults

BEGIN = """
import os, signal, sys, time
member = int(os.environ["TFDIST_MEMBER"])
def wait(limit_s=60):
    open(f"ready-{member}", "w").close()
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        time.sleep(0.1)  # a signal that comes just before a sleep does not end it
"""
SPARE = ("-np", "2", "--min-np", "1", "--spares", "1", "--max-restarts", "0")


def ready(folder, *members):
    until(lambda: all((folder / f"ready-{m}").exists() for m in members), 20)


def lost(process):
    """Reads lines of tfdistrun until one says that a newcomer was lost."""
    lines = iter(process.stderr.readline, "")
    next(line for line in lines if "was lost" in line and "2 (process" in line)


# ---- newcomers that end before they have a rank ----


@deadline(60)
@pytest.mark.parametrize(
    ("code", "expected"),
    [("wait()", 130), ("signal.signal(2, lambda *_: sys.exit(0)); wait()", 0)],
)
def test_a_spare_that_failed_is_not_the_reason_for_the_end(tmp_path, code, expected):
    code = f"{BEGIN}\nif member >= 2: sys.exit(1)\n{code}"
    process = start(tmp_path, *SPARE, *python(code))
    lost(process)
    ready(tmp_path, 0, 1)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == expected
    assert "failed first" not in done.stderr


@deadline(60)
def test_a_spare_that_is_killed_after_all_ranks_have_saved_does_not_count(tmp_path):
    code = (
        f"{BEGIN}\n"
        "signal.signal(2, signal.SIG_IGN if member >= 2 else lambda *_: sys.exit(0))\n"
        "wait()"
    )
    process = start(tmp_path, *SPARE, *python(code))
    ready(tmp_path, 0, 1, 2)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 0


@deadline(60)
def test_the_report_of_a_spare_is_not_that_of_the_rank_with_its_number(tmp_path):
    code = f"""{BEGIN}
from tfdist.core.rendezvous import failure_report
if member >= 2:
    failure_report.send(os.environ, dict(error="of the spare", blamed=None))
    open("sent-" + os.environ["TFDIST_RANK"], "w").close()
    sys.exit(1)
wait(1) if member == 0 else wait()
"""
    process = start(tmp_path, *SPARE, "--grace-s", "0.1", *python(code))
    lost(process)
    shown = [int(file.name[5:]) for file in tmp_path.glob("sent-*")]
    assert shown == [1]
    for child in psutil.Process(process.pid).children():
        environ = child.environ()
        if environ.get("TFDIST_MEMBER") in ("0", "1"):
            child.kill()
    done = finish(process)
    assert done.code == 137 and "failed first" in done.stderr
    assert "of the spare" not in done.stderr


@deadline(60)
def test_output_of_a_spare_is_labeled_beside_a_single_rank(tmp_path):
    script = "echo is $TFDIST_MEMBER; touch ready-$TFDIST_MEMBER; exec sleep 60"
    process = start(tmp_path, "-np", "1", *SPARE[2:], *shell(script))
    ready(tmp_path, 0, 2)
    process.send_signal(signal.SIGINT)
    lines = finish(process).stdout.splitlines()
    assert sorted(lines) == ["[replacement 2] is 2", "is 0"]


# ---- children of a rank that has exited ----


@deadline(60)
@pytest.mark.parametrize("how", ["exit 1", "kill -9 $$"])
def test_children_of_a_lost_rank_end_while_the_job_goes_on(tmp_path, marker, how):
    script = (
        "if [ $TFDIST_MEMBER = 1 ]; then "
        f"sleep 4321 & echo $! >child; touch ready-1; {how}; fi; "
        "touch ready-0; sleep 60"
    )
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "0")
    process = start(tmp_path, *options, *shell(script), M=marker)
    ready(tmp_path, 0, 1)
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child), 5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert marked(marker) == []


@deadline(60)
@pytest.mark.parametrize("pause_s", [0.0, 0.3])
@pytest.mark.parametrize("options", [(), ("--min-np", "1")])
def test_the_program_of_a_shell_that_sigterm_has_ended_may_still_save(
    tmp_path, options, pause_s
):
    """A batch system may signal all processes of a job, tfdistrun last."""
    code = (
        f"{BEGIN}\n"
        "def save(*_):\n"
        "    time.sleep(2)\n"
        "    open(f'saved-{member}', 'w').close()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "wait()"
    )
    (tmp_path / "program.py").write_text(code)
    script = (
        "export TFDIST_MEMBER=${TFDIST_MEMBER:-$TFDIST_RANK}; "
        "echo $$ >shell-$TFDIST_MEMBER; python program.py; true"
    )
    process = start(tmp_path, "-np", "2", *options, *shell(script))
    ready(tmp_path, 0, 1)
    shells = [int((tmp_path / f"shell-{m}").read_text()) for m in (0, 1)]
    groups = [psutil.Process(pid) for pid in shells]
    programs = [child for one in groups for child in one.children()]
    for one in (*groups, *programs):
        one.send_signal(signal.SIGTERM)
    time.sleep(pause_s)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


@deadline(60)
def test_the_program_of_a_shell_that_was_killed_alone_gets_the_signal_of_the_job(
    tmp_path,
):
    code = (
        f"{BEGIN}\n"
        "def save(*_):\n"
        "    open(f'saved-{member}', 'w').close()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "wait()"
    )
    (tmp_path / "program.py").write_text(code)
    script = "echo $$ >shell-$TFDIST_MEMBER; python program.py; true"
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "0")
    process = start(tmp_path, *options, *shell(script))
    ready(tmp_path, 0, 1)
    psutil.Process(int((tmp_path / "shell-1").read_text())).terminate()
    time.sleep(0.5)
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert time.monotonic() - before < 5
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


# ---- requests that come while the job ends ----


@deadline(60)
def test_requests_that_come_while_the_job_ends_cost_no_time(tmp_path):
    code = f"""{BEGIN}
from tfdist.core.rendezvous import renewal
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"ready-{{member}}", "w").close()
while not os.path.exists("ask"): time.sleep(0.1)
renewal.ask_for_place(
    os.environ, 1, dict(generation=1, committed=1, failed=[], program="")
)
"""
    options = ("-np", "2", "--min-np", "1", "--signal-grace-s", "10")
    process = start(tmp_path, *options, *python(code))
    ready(tmp_path, 0, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    (tmp_path / "ask").touch()
    time.sleep(1.5)
    own = psutil.Process(process.pid)
    before = sum(own.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(own.cpu_times()[:2]) - before < 0.3
    process.send_signal(signal.SIGINT)
    finish(process)
