"""Exit codes, the first failure, and what tfdistrun leaves behind: nothing."""

import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from helpers.deadline import deadline
from helpers.launcher import (
    clean_environment,
    finish,
    marked,
    python,
    run,
    shell,
    start,
    until,
)

from tfdist.launch import _standalone

pytestmark = pytest.mark.faults


@deadline(40)
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("exit 3", 3, "exit code 3"),
        pytest.param("exit 255", 255, "exit code 255", marks=pytest.mark.slow),
        ("kill -9 $$", 137, "killed by SIGKILL"),
        *(
            pytest.param(f"kill -{number} $$", code, says, marks=pytest.mark.slow)
            for number, code, says in (
                ("SEGV", 139, "killed by SIGSEGV"),
                ("TERM", 143, "killed by SIGTERM"),
                ("35", 163, "killed by signal 35"),
            )
        ),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(tmp_path, script, code, says):
    script = f"echo last words; if [ $TFDIST_RANK = 1 ]; then {script}; fi; sleep 60"
    done = run(tmp_path, "-np", "3", "--grace-s", "0.3", *shell(script))
    assert done.code == code
    first = done.report[0]
    assert re.fullmatch(
        rf"rank 1 on {socket.gethostname()} failed first: {says} after \d+\.\d s", first
    )
    assert "  | last words" in done.report
    assert any(
        "0: ended by tfdistrun" in x and "2: ended by tfdistrun" in x
        for x in done.report
    )
    assert any("rank-1.log" in x for x in done.report)
    assert done.seconds < 6.0


@deadline(40)
def test_the_last_twenty_lines_are_shown(tmp_path):
    done = run(tmp_path, "-np", "2", *shell("seq 1 50; exit $TFDIST_RANK"))
    shown = [x for x in done.report if x.startswith("  | ")]
    assert shown == [f"  | {i}" for i in range(31, 51)]


@deadline(40)
def test_last_lines_are_shown_as_they_are(tmp_path):
    line = "IndexError: x[0:100:2] at /a:x:b [bold]"
    done = run(tmp_path, "-np", "1", *shell(f"echo '{line}'; exit 1"))
    assert f"  | {line}" in done.report


@deadline(40)
def test_the_other_ranks_have_time_to_say_what_they_saw(tmp_path):
    script = "if [ $TFDIST_RANK = 0 ]; then exit 5; fi; sleep 0.5; echo saw it; exit 1"
    done = run(tmp_path, "-np", "2", *shell(script))
    assert done.code == 5
    assert "[rank 1] saw it" in done.stdout
    assert done.report[0].startswith("rank 0 ")
    assert "other ranks: 1: exit code 1" in done.report


@deadline(40)
def test_a_rank_that_ends_well_does_not_end_the_others(tmp_path):
    script = "if [ $TFDIST_RANK = 0 ]; then exit 0; fi; sleep 0.7; echo on"
    done = run(tmp_path, "-np", "2", "--grace-s", "0.1", *shell(script))
    assert done.code == 0
    assert done.stdout == "[rank 1] on\n"


@deadline(40)
@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("import nosuchmodule", "is the right environment active?"),
        ("raise MemoryError", "use a smaller batch"),
        ("import os; os.kill(os.getpid(), 9)", "short of memory"),
    ],
)
def test_a_hint_where_one_is_known(tmp_path, code, advice):
    done = run(tmp_path, "-np", "1", *python(code))
    hints = [x for x in done.report if x.startswith("hint: ")]
    assert len(hints) == 1 and advice in hints[0]


# In `make test` with errors of the core: test_first_failure.py.
@pytest.mark.slow
@deadline(40)
def test_the_root_cause_wins_over_a_victim_that_ended_earlier(tmp_path):
    """Rank 1 failed first, but takes longer to end than rank 0, its victim."""
    code = (
        "import os, sys, time\n"
        "from tfdist.core.rendezvous import failure_report\n"
        "rank = int(os.environ['TFDIST_RANK'])\n"
        "text = {'error': f'E{rank}', 'blamed': [1, None, 1][rank]}\n"
        "time.sleep([0.4, 0.1, 0.5][rank])\n"
        "assert failure_report.send(os.environ, text)\n"
        "time.sleep([0.1, 1.0, 0.1][rank])\n"
        "sys.exit(10 + rank)\n"
    )
    done = run(tmp_path, "-np", "3", *python(code))
    assert done.code == 11
    assert done.report[0].startswith("rank 1 ")
    assert done.report[-1] == "reason: E1"


# In `make test` with errors of the core: test_first_failure.py.
@pytest.mark.slow
@deadline(40)
def test_a_rank_that_others_blame_is_the_cause_even_if_it_ends_last(tmp_path):
    code = (
        "import os, sys, time\n"
        "from tfdist.core.rendezvous import failure_report\n"
        "rank = int(os.environ['TFDIST_RANK'])\n"
        "if rank == 2: time.sleep(1.0); sys.exit(12)\n"  # says nothing
        "text = {'error': 'lost rank 2', 'blamed': 2}\n"
        "assert failure_report.send(os.environ, text)\n"
        "sys.exit(1)\n"
    )
    done = run(tmp_path, "-np", "3", *python(code))
    assert done.code == 12
    assert done.report[0].startswith("rank 2 ")


# ---- nothing is left ----


@deadline(40)
def test_a_failure_ends_the_whole_tree_also_daemons(tmp_path, marker):
    code = (
        "import os, subprocess, sys, time\n"
        "sleep = ['sleep', '600']\n"
        "subprocess.Popen(sleep)\n"  # a child
        "subprocess.Popen(sleep, start_new_session=True)\n"  # of its own session
        "if os.fork() == 0:\n"  # a daemon: no parent, no session, no environment
        "    os.setsid()\n"
        "    if os.fork() == 0: os.execve('/bin/sleep', ['sleep', '601'], {})\n"
        "    os._exit(0)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'ready{os.environ[\"TFDIST_RANK\"]}', 'w').close()\n"
        "while os.environ['TFDIST_RANK'] == '0': time.sleep(1)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "os._exit(7)\n"
    )
    process = start(
        tmp_path, "-np", "2", "--grace-s", "0.5", *python(code), MARK=marker
    )
    until(lambda: all((tmp_path / f"ready{r}").exists() for r in range(2)), 10.0)
    tree = set(marked(marker)) | {p for p in sleepers("601")}
    assert len(tree) >= 1 + 2 * 4
    (tmp_path / "go").touch()
    done = finish(process)
    assert done.code == 7
    assert done.seconds < 5.0
    assert marked(marker) == []
    assert [pid for pid in tree if os.path.exists(f"/proc/{pid}")] == []


def sleepers(seconds):
    for process in psutil.process_iter():
        try:
            if process.cmdline() == ["sleep", seconds]:
                yield process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@deadline(40)
def test_helpers_that_outlive_a_good_end_are_ended_too(tmp_path, marker):
    done = run(tmp_path, "-np", "2", *shell("sleep 600 & echo started"), MARK=marker)
    assert done.code == 0
    assert done.stdout.count("started") == 2
    assert done.seconds < 5.0
    assert marked(marker) == []


@deadline(40)
def test_helpers_are_asked_before_they_are_killed(tmp_path):
    script = "(trap 'echo bye > said; exit' TERM; while :; do sleep 0.05; done) & exit"
    done = run(tmp_path, "-np", "1", *shell(script))
    assert done.code == 0
    assert (tmp_path / "said").read_text() == "bye\n"


@deadline(40)
@pytest.mark.parametrize(
    "wrapped",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["direct", "under a shell"],
)
def test_a_killed_launcher_leaves_nothing(tmp_path, marker, wrapped):
    command = ["sh", "-c", "sleep 600; true"] if wrapped else ["sleep", "600"]
    process = start(tmp_path, "-np", "2", *command, MARK=marker)
    port = until_rendezvous(process.pid)
    until(lambda: len(marked(marker)) >= (6 if wrapped else 4))
    process.kill()
    process.wait(5)
    process.stdout.close()
    process.stderr.close()
    assert until(lambda: not marked(marker), 5.0) < 5.0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2.0)


@deadline(40)
def test_a_killed_launcher_leaves_no_helper_with_an_environment_of_its_own(tmp_path):
    helper = str(604_000_000 + os.getpid())
    script = f"env -i sleep {helper} & sleep 600; true"
    process = start(tmp_path, "-np", "2", *shell(script))
    until(lambda: len(list(sleepers(helper))) == 2, 10.0)
    process.kill()
    process.wait(5)
    process.stdout.close()
    process.stderr.close()
    until(lambda: not list(sleepers(helper)), 5.0)


@deadline(40)
def test_the_guard_forgets_a_group_that_is_empty(monkeypatch):
    """Its number may be that of somebody else's group tomorrow."""
    with subprocess.Popen(["sleep", "600"], process_group=0) as one:
        ended = subprocess.Popen(["true"], process_group=0)
        ended.wait(10)
        groups = _standalone.Groups()
        text = b"%d\n%d\n" % (ended.pid, one.pid)
        groups.read(text[:3])
        groups.read(text[3:])
        groups.forget_the_empty()
        kill, killed = os.killpg, []
        monkeypatch.setattr(os, "killpg", lambda *words: killed.append(words))
        groups.kill()
        kill(one.pid, signal.SIGKILL)
    assert killed == [(one.pid, signal.SIGKILL)]


def until_rendezvous(launcher):
    """The port of the launcher's store, from the environment of a rank."""
    found = []

    def look():
        for child in psutil.Process(launcher).children(recursive=True):
            try:
                text = child.environ().get("TFDIST_RENDEZVOUS")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if text:
                found.append(int(text.rpartition(":")[2]))
        return found

    until(look, 10.0)
    return found[0]


@deadline(40)
def test_nothing_secret_is_in_arguments_or_environment(tmp_path):
    code = (
        "import os, sys\n"
        "from tfdist.core.rendezvous.secret import read_secret_file\n"
        "print(read_secret_file(os.environ['TFDIST_SECRET_FILE']).hex())\n"
        "for pid in ('self', os.getppid()):\n"
        "    for name in ('cmdline', 'environ'):\n"
        "        print(open(f'/proc/{pid}/{name}', 'rb').read().hex())\n"
        "print(os.stat(os.environ['TFDIST_SECRET_FILE']).st_mode & 0o777)\n"
    )
    done = run(tmp_path, "-np", "1", *python(code))
    secret, *texts, mode = done.stdout.split()
    assert len(secret) == 64 and int(mode) == 0o600
    for text in texts:
        for form in (secret, secret.encode().hex(), secret.upper().encode().hex()):
            assert form not in text


@deadline(40)
def test_who_was_there_before_the_job_is_not_of_it(tmp_path):
    """A shell that runs `exec tfdistrun` leaves it its descendants."""
    words = "-m tfdist.launch -np 2 sh -c 'kill $STARTER; echo hello; exit 3'"
    starter = "sh -c 'sleep 603 & wait' & export STARTER=$!"
    script = f"sleep 602 & {starter}; exec {sys.executable} {words} > out 2>&1"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=clean_environment(), timeout=30
    )
    strangers = [*sleepers("602"), *sleepers("603")]
    for pid in strangers:
        os.kill(pid, signal.SIGKILL)
    assert len(strangers) == 2
    assert done.returncode == 3
    assert "failed first" in (tmp_path / "out").read_text()
