"""Signals to tfdistrun: what it passes on, to whom, and how long the ranks have."""

import os
import signal
import subprocess
import sys
from argparse import Namespace

import psutil
import pytest
from helpers.deadline import deadline
from helpers.launcher import (
    SAVES,
    clean_environment,
    finish,
    marked,
    python,
    saved,
    shell,
    signal_until_it_ends,
    start,
)

from tfdist.launch.options import signal_grace_s

pytestmark = pytest.mark.faults


def until_ready(process):
    """Until both ranks have said so."""
    for _ in range(2):
        assert "ready" in process.stdout.readline()


@deadline(40)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_signals_reach_the_ranks_and_a_clean_end_is_success(tmp_path, number):
    code = (
        "import os, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    print('got', number, flush=True); time.sleep(0.3); sys.exit(0)\n"
        f"signal.signal({int(number)}, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start(tmp_path, "-np", "2", *python(code))
    until_ready(process)
    process.send_signal(number)
    done = finish(process)
    assert done.stdout.count(f"got {int(number)}") == 2
    assert done.code == 0
    assert f"ended by {number.name}" in done.report[0]


# In `make test`: helpers that ignore the signal, below.
@pytest.mark.slow
@deadline(40)
def test_helpers_of_a_rank_that_has_ended_by_itself_are_not_waited_for(
    tmp_path, marker
):
    """They may have its handler, which ends nothing."""
    code = (
        "import os, signal, time\n"
        "stops = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stops.append(1))\n"
        "if os.fork() == 0: time.sleep(600); os._exit(0)\n"
        "print('ready', flush=True)\n"
        "while not stops: time.sleep(0.01)\n"
        "print('saved', flush=True)\n"
    )
    process = start(tmp_path, "-np", "2", *python(code), MARK=marker)
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 15.0)
    assert done.stdout.count("saved") == 2
    assert marked(marker) == []


@deadline(40)
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)]
)
def test_a_users_signal_reaches_the_ranks_and_ends_nothing(tmp_path, number):
    code = (
        "import signal, time\n"
        "got = []\n"
        f"signal.signal({int(number)}, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.5); print('on')\n"
    )
    process = start(tmp_path, "-np", "2", *python(code))
    until_ready(process)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.report) == (0, [])
    assert done.stdout.count("on") == 2


@deadline(40)
def test_nohup_is_respected(tmp_path):
    words = "-m tfdist.launch -np 2 sh -c 'echo ready; sleep 1; echo on'"
    process = subprocess.Popen(
        ["sh", "-c", f"trap '' HUP; exec {sys.executable} {words}"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until_ready(process)
    for pid in [process.pid, *(p.pid for p in psutil.Process(process.pid).children())]:
        os.kill(pid, signal.SIGHUP)
    done = finish(process)
    assert (done.code, done.report) == (0, [])
    assert done.stdout.count("on") == 2


@deadline(40)
def test_ranks_that_die_of_the_signal_give_its_exit_code(tmp_path):
    process = start(tmp_path, "-np", "2", *shell("echo ready; exec sleep 60"))
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143
    assert not any("failed first" in line for line in done.report)


@deadline(40)
def test_a_second_signal_kills(tmp_path, marker):
    script = "trap '' INT; echo ready; while :; do sleep 1; done"
    process = start(tmp_path, "-np", "2", *shell(script), MARK=marker)
    until_ready(process)
    assert signal_until_it_ends(process, signal.SIGINT) > 1
    done = finish(process, 5.0)
    assert done.code == 130
    assert marked(marker) == []


@deadline(40)
def test_two_signals_of_one_act_are_one(tmp_path):
    """A terminal that is closed sends two, so does `timeout`."""
    process = start(tmp_path, "-np", "2", *python(SAVES))
    until_ready(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 0, done.stderr
    assert saved(tmp_path) == ["saved0", "saved1"]


# In `make test` on another host: test_hosts_launch.py.
@pytest.mark.slow
@deadline(40)
def test_a_program_that_a_script_has_started_has_its_time_too(tmp_path, marker):
    """The shell ends at once; what the rest of its group does counts."""
    (tmp_path / "saves.py").write_text(SAVES)
    script = f"{sys.executable} saves.py; true"
    process = start(tmp_path, "-np", "2", *shell(script), MARK=marker)
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143
    assert done.report[0].startswith("ended by SIGTERM")
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert marked(marker) == []


USES_A_POOL = """
import multiprocessing, os, signal, time
pool = multiprocessing.get_context("fork").Pool(1)
loading = pool.apply_async(time.sleep, (1.5,))
time.sleep(0.3)  # the worker has the task
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
print("ready", flush=True)
while not stops: time.sleep(0.01)
loading.get()
open(f"saved{os.environ['TFDIST_RANK']}", "w").close()
pool.close()
pool.join()
"""


@deadline(40)
@pytest.mark.parametrize(
    "by_a_script", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_workers_stay_until_their_program_has_saved(tmp_path, marker, by_a_script):
    (tmp_path / "program.py").write_text(USES_A_POOL)
    script = f"{sys.executable} program.py"
    command = shell(f"{script}; true" if by_a_script else f"exec {script}")
    options = ("-np", "2", "--signal-grace-s", "6")
    process = start(tmp_path, *options, *command, MARK=marker)
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert done.code == (143 if by_a_script else 0) and done.seconds < 5.0
    assert marked(marker) == []


WRAPS_A_PROGRAM = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
program = "print('ready', flush=True); import time; time.sleep(600)"
sys.exit(-subprocess.Popen([sys.executable, "-c", program]).wait())
"""


@deadline(40)
def test_a_program_that_another_one_wraps_gets_the_signal(tmp_path, marker):
    process = start(tmp_path, "-np", "2", *python(WRAPS_A_PROGRAM), MARK=marker)
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 15.0)
    assert done.code == 15 and done.seconds < 10.0
    assert marked(marker) == []


@deadline(40)
def test_helpers_that_ignore_the_signal_are_not_waited_for(tmp_path, marker):
    """As the background jobs of a shell ignore SIGINT."""
    process = start(
        tmp_path, "-np", "2", *shell("sleep 600 & echo ready; wait"), MARK=marker
    )
    until_ready(process)
    process.send_signal(signal.SIGINT)
    done = finish(process, 15.0)
    assert done.code == 130
    assert marked(marker) == []


@deadline(40)
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)]
)
def test_a_users_signal_reaches_only_those_who_expect_it(tmp_path, number):
    """The shell around the program, and a helper, would end by it."""
    code = (
        "import signal, subprocess, threading\n"
        "blocked = [signal.SIGUSR1, signal.SIGUSR2]\n"
        "helper = subprocess.Popen(['sleep', '600'])\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, blocked)\n"
        "def wait(): print('got', int(signal.sigwait(blocked)), flush=True)\n"
        "waiting = threading.Thread(target=wait); waiting.start()\n"
        "print('ready', flush=True)\n"
        "waiting.join()\n"
        "print('helper', helper.poll(), flush=True)\n"
        "helper.kill(); helper.wait()\n"
    )
    (tmp_path / "waits.py").write_text(code)
    process = start(
        tmp_path, "-np", "2", *shell(f"{sys.executable} waits.py; echo after")
    )
    until_ready(process)
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.report) == (0, [])
    assert done.stdout.count(f"got {int(number)}\n") == 2
    assert done.stdout.count("helper None") == 2
    assert done.stdout.count("after") == 2


IGNORES = "trap '' TERM; echo ready $TFDIST_SIGNAL_GRACE_S; while :; do sleep 0.1; done"


@deadline(40)
def test_how_long_the_ranks_have_is_an_option_which_they_know(tmp_path, marker):
    process = start(
        tmp_path,
        *("-np", "2", "--signal-grace-s", "1.5", *shell(IGNORES)),
        MARK=marker,
        TFDIST_SIGNAL_GRACE_S="60",
    )
    for _ in range(2):
        assert process.stdout.readline().endswith("ready 1.5\n")
    process.send_signal(signal.SIGTERM)
    done = finish(process, 15.0)
    assert done.code == 143
    assert done.seconds >= 1.5
    assert (
        "still running 1.5 s after the signal, and killed now: ranks 0 and 1; "
        "unsaved work is lost. Give the ranks more time with --signal-grace-s"
    ) in done.report
    assert marked(marker) == []


@pytest.mark.parametrize(
    ("option", "variable", "expected"), [(None, "", 25), (None, "7", 7), (0.0, "7", 0)]
)
def test_the_option_is_stronger_than_the_variable(option, variable, expected):
    options = Namespace(signal_grace_s=option)
    environ = {"TFDIST_SIGNAL_GRACE_S": variable}
    assert signal_grace_s(options, environ) == expected


# ---- what a program inherits ----


def started_with(preparation, cwd, *arguments):
    """tfdistrun, started by a program that first did `preparation`."""
    words = [sys.executable, "-m", "tfdist.launch", *arguments]
    code = f"import os, signal; {preparation}; os.execv({words[0]!r}, {words!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@deadline(40)
def test_a_failure_is_one_where_sigchld_is_ignored(tmp_path):
    ignored = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    script = "if [ $TFDIST_RANK = 1 ]; then exit 7; fi; sleep 600"
    words = ["-np", "2", "--grace-s", "0.1", *shell(script)]
    done = finish(started_with(ignored, tmp_path, *words))
    assert done.code == 7
    assert "0: ended by tfdistrun" in " ".join(done.report)


@deadline(40)
def test_signals_that_are_blocked_at_the_start_are_not_for_the_job(tmp_path):
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    process = started_with(
        blocked, tmp_path, "-np", "2", *shell("echo ready; exec sleep 600")
    )
    until_ready(process)
    process.send_signal(signal.SIGTERM)
    assert finish(process, 15.0).code == 143
