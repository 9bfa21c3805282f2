"""tfdistrun on several hosts, without a network of their own: needs no privileges."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers.deadline import deadline
from helpers.hosts import plain_hosts
from helpers.launcher import (
    SAVES,
    TFDISTRUN,
    clean_environment,
    finish,
    marked,
    python,
    run,
    saved,
    shell,
    signal_until_it_ends,
    start,
    until,
)

from tfdist.core import native
from tfdist.launch import agent_protocol

pytestmark = pytest.mark.faults
GONE_S = 5.0  # no process of a job is left so long after its launcher or its host


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with plain_hosts(tmp_path_factory.mktemp("hosts"), "host-a", "host-b") as made:
        yield made


def on(hosts, *counts):
    """The options for these hosts, with so many slots."""
    return ["-np", str(sum(counts)), *hosts.slots(*counts), *hosts.ssh]


@pytest.fixture
def job(hosts, tmp_path):
    """Runs tfdistrun over the hosts to its end; keeps what it is given in mind."""

    def work(counts, *command, **environ):
        environ = {"TFDIST_ADDRESS": hosts.address, **environ}
        return run(tmp_path, *on(hosts, *counts), *command, **environ)

    return work


@pytest.fixture
def started(hosts, tmp_path):
    """As `job`, but returns when every rank has said "ready"."""

    def work(counts, *command, options=(), **environ):
        environ = {"TFDIST_ADDRESS": hosts.address, **environ}
        words = [*on(hosts, *counts), *options, *command]
        process = start(tmp_path, *words, **environ)
        for _ in range(sum(counts)):
            line = process.stdout.readline()
            assert "ready" in line, line + process.stderr.read()
        return process

    return work


# ---- good ends ----


@deadline(40)
def test_places_output_and_working_directory(job, tmp_path):
    script = "echo out $TFDIST_RANK/$TFDIST_SIZE $TFDIST_LOCAL_RANK/$TFDIST_LOCAL_SIZE"
    script += " $TFDIST_CROSS_RANK/$TFDIST_CROSS_SIZE $LOGGED_IN $(pwd); echo err >&2"
    done = job((1, 3), *shell(script))
    assert done.code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank 0] out 0/4 0/1 0/2 yes {tmp_path}",
        f"[rank 1] out 1/4 0/3 1/2 yes {tmp_path}",
        f"[rank 2] out 2/4 1/3 0/1 yes {tmp_path}",
        f"[rank 3] out 3/4 2/3 0/1 yes {tmp_path}",
    ]
    for rank in range(4):
        assert f"[rank {rank}] err" in done.stderr
    (log,) = tmp_path.glob("tfdist-logs/*/rank-3.log")
    assert log.read_text().startswith("out 3/4")


@deadline(40)
def test_only_the_hosts_that_are_needed_are_asked(hosts, tmp_path):
    words = ["-np", "2", "-H", "host-a:2,nobody-there:2", *hosts.ssh]
    done = run(tmp_path, *words, "true", TFDIST_ADDRESS=hosts.address)
    assert done.code == 0, done.stderr


@deadline(40)
def test_this_host_takes_part_without_ssh(hosts, tmp_path):
    (tmp_path / "file").write_text("localhost slots=1  # here\nhost-b:2\n")
    words = ["-np", "3", "--hostfile", "file", *hosts.ssh, "--timestamps"]
    script = "echo ${LOGGED_IN-here} $TFDIST_LOCAL_RANK $TFDIST_CROSS_SIZE"
    done = run(tmp_path, *words, *shell(script), TFDIST_ADDRESS=hosts.address)
    assert done.code == 0, done.stderr
    said = sorted(re.findall(r"\[rank (\d) [\d:.]+\] (.+)", done.stdout))
    assert said == [("0", "here 0 2"), ("1", "yes 0 2"), ("2", "yes 1 1")]


@pytest.mark.skipif(
    not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
)
@pytest.mark.parametrize(
    "counts", [(2, 1), pytest.param((1, 3), marks=pytest.mark.slow)]
)
@deadline(60)
def test_real_ranks_compute_together(job, counts):
    done = job(counts, sys.executable, "-m", "helpers.core_client", "steps", "20")
    assert done.code == 0, done.stderr
    assert done.stdout.count("all sums are right") == sum(counts)


NASTY = ["a b", "it's", '"', "$HOME `id` $(id)", "new\nline", "\\", "*", "", "ü 🙂"]


@deadline(40)
def test_every_argument_and_value_arrives_as_it_is(job):
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    options = [word for i, text in enumerate(NASTY) for word in ("-x", f"V{i}={text}")]
    done = job((1,), *options, *python(code), *NASTY)
    assert done.code == 0, done.stderr
    arguments, environ = json.loads(done.stdout)
    assert arguments == NASTY
    assert [environ[f"V{i}"] for i in range(len(NASTY))] == NASTY


@deadline(40)
def test_only_the_needed_environment_crosses(job):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    given = {"AWS_KEY": "private", "PASSED": "on", "TFDIST_TIMEOUT_S": "77"}
    given |= {"OMP_NUM_THREADS": "3", "TFDIST_LOG_DIR": "logs"}
    given |= {"PATH": "/one:/usr/bin:/two"}  # that host's own is /usr/bin:/bin
    done = job((1,), "-x", "PASSED", *python(code), **given)
    assert done.code == 0, done.stderr
    environ = json.loads(done.stdout)
    assert environ["PASSED"] == "on" and environ["TFDIST_TIMEOUT_S"] == "77"
    assert environ["LOGGED_IN"] == "yes" and environ["HOME"] == "/"
    assert environ["PATH"] == "/one:/usr/bin:/two:/bin"
    assert "AWS_KEY" not in environ and "TFDIST_LOG_DIR" not in environ
    assert "for the ranks on other hosts: OMP_NUM_THREADS" in done.stderr
    assert "TFDIST_ADDRESS" not in environ  # of this host, not of that one


@deadline(40)
def test_the_secret_is_in_no_argument_and_no_environment(job):
    code = (
        "import os, pathlib\n"
        "from tfdist.core.rendezvous.secret import read_secret_file\n"
        "path = os.environ['TFDIST_SECRET_FILE']\n"
        "secret = read_secret_file(path)\n"
        "forms = [secret, secret.hex().encode(), secret.hex().upper().encode()]\n"
        "seen = 0\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('cmdline', 'environ'):\n"
        "        file = pathlib.Path('/proc', pid, name)\n"
        "        try: data = file.read_bytes()\n"
        "        except OSError: continue  # not ours, or ended\n"
        "        seen += b'tfdist.launch.agent' in data\n"
        "        assert not any(form in data for form in forms), file\n"
        "print('seen', seen > 0, oct(os.stat(path).st_mode & 0o777))\n"
    )
    done = job((1,), *python(code))
    assert done.stdout == "seen True 0o600\n", done.stderr


# In `make test` on this host: test_launch_checks.py.
@pytest.mark.slow
@deadline(40)
def test_processes_of_other_hosts_that_train_alone_are_told_of(job):
    done = job((1, 1), *python("memory = b'1' * (300 << 20)"))
    assert done.code == 0
    assert "2 processes ended without calling tfdist.init()" in done.stderr
    assert "without calling" not in job((1, 1), "hostname").stderr


# In `make test` on this host: test_launch_output.py.
@pytest.mark.slow
@deadline(40)
def test_much_output_arrives_whole_and_in_order(job):
    code = "for i in range(20000): print(f'{i:08d} ' + 'x' * 20)"
    done = job((1, 1), *python(code))
    assert done.code == 0, done.stderr
    for rank in range(2):
        lines = re.findall(rf"^\[rank {rank}\] (\d{{8}}) x{{20}}$", done.stdout, re.M)
        assert lines == [f"{i:08d}" for i in range(20000)]


# In `make test` on this host: test_launch_exit.py.
@pytest.mark.slow
@deadline(40)
def test_helpers_that_outlive_their_ranks_are_ended(job, marker):
    script = "setsid sleep 600 & echo started"
    done = job((1, 1), "-x", "MARK", *shell(script), MARK=marker)
    assert done.code == 0, done.stderr
    assert done.stdout.count("started") == 2
    assert marked(marker) == []


# In `make test` on this host: test_launch_exit.py.
@pytest.mark.slow
@deadline(40)
def test_a_rank_that_ends_does_not_end_the_other_hosts(job):
    script = "if [ $TFDIST_RANK != 2 ]; then exit 0; fi; sleep 0.8; echo on"
    done = job((2, 1), *shell(script))
    assert (done.code, done.stdout) == (0, "[rank 2] on\n")


@deadline(40)
def test_a_terminal_for_rank_0_crosses(hosts, tmp_path):
    code = "import sys; print('tty', sys.stdout.isatty(), sys.stderr.isatty())"
    command = [*TFDISTRUN, *on(hosts, 1, 1), *python(code)]
    ours, theirs = os.openpty()
    environ = clean_environment(TFDIST_ADDRESS=hosts.address, NO_COLOR="1")
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=theirs, stdin=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(ours, 4096)
        assert process.wait(20) == 0
    os.close(ours)
    assert b"[rank 0] tty True False" in said and b"[rank 1] tty False" in said


# ---- failures ----


@deadline(40)
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("exit 7", 7, "exit code 7"),
        pytest.param("kill -9 $$", 137, "killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_remote_rank_that_fails_is_the_jobs_failure(job, script, code, says):
    script = f"echo last words; if [ $TFDIST_RANK = 2 ]; then {script}; fi; sleep 60"
    done = job((2, 1), "--grace-s", "0.3", *shell(script))
    assert done.code == code
    assert re.match(rf"rank 2 on host-b failed first: {says} after", done.report[0])
    assert "  | last words" in done.report
    told = next(line for line in done.report if line.startswith("other ranks"))
    assert told.count("ended by tfdistrun") == 2
    assert done.seconds < 8.0


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
@deadline(40)
def test_signals_reach_remote_ranks_and_a_clean_end_is_success(started, number):
    code = (
        "import signal, sys, time\n"
        "def stop(number, frame):\n"
        "    print('got', number, flush=True); time.sleep(0.3); sys.exit(0)\n"
        f"signal.signal({int(number)}, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = started((1, 2), *python(code))
    process.send_signal(number)
    done = finish(process)
    assert done.stdout.count(f"got {int(number)}") == 3
    assert done.code == 0
    assert f"ended by {number.name}" in done.report[0]


# In `make test` on this host: test_launch_signals.py.
@pytest.mark.slow
@deadline(40)
def test_a_second_signal_kills_on_all_hosts(started, marker):
    script = "trap '' INT; echo ready; while :; do sleep 1; done"
    options = ["-x", "MARK"]
    process = started((1, 2), *shell(script), options=options, MARK=marker)
    assert signal_until_it_ends(process, signal.SIGINT) > 1
    assert finish(process, 8.0).code == 130
    assert marked(marker) == []


# In `make test`: the agent is ended, not tfdistrun, below.
@pytest.mark.slow
@deadline(40)
def test_a_program_that_a_script_has_started_there_has_its_time_too(
    started, tmp_path, marker
):
    """The shell ends at once; what the rest of its group does counts."""
    (tmp_path / "saves.py").write_text(SAVES)
    process = started(
        (1, 1),
        *shell(f"{sys.executable} saves.py; true"),
        options=["-x", "MARK"],
        MARK=marker,
    )
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 143
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert marked(marker) == []


DAEMON = "setsid sleep 600 & echo ready; exec sleep 600"


@deadline(40)
def test_a_killed_launcher_leaves_nothing_on_other_hosts(started, marker):
    process = started((1, 2), *shell(DAEMON), options=["-x", "MARK"], MARK=marker)
    until(lambda: len(marked(marker)) > 6)
    process.kill()
    process.wait(5)
    process.stdout.close()
    process.stderr.close()
    until(lambda: not marked(marker), GONE_S)


@deadline(40)
def test_a_dead_connection_ends_its_ranks_and_is_named(hosts, started, marker):
    options = ["-x", "MARK", "--grace-s", "30"]
    script = f"export HOST_MARK={marker}-$TFDIST_CROSS_RANK; {DAEMON}"
    process = started((1, 1), *shell(script), options=options, MARK=marker)
    until(lambda: len(marked(f"{marker}-1")) >= 2)  # setsid has to start
    hosts.clients(process.pid)["host-b"].kill()
    # Before tfdistrun does anything about it: its grace is longer.
    until(lambda: not marked(f"{marker}-1"), GONE_S)
    assert len(marked(f"{marker}-0")) >= 2
    process.send_signal(signal.SIGTERM)
    done = finish(process, 20.0)
    assert done.code == 255
    lost = "rank 1 on host-b failed first: host-b was lost: its connection ended"
    assert done.report[1].startswith(f"{lost} by signal 9"), done.report
    assert marked(marker) == []


def command_line(pid):
    """Its words; none when it has just ended."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@deadline(40)
def test_a_killed_agent_leaves_nothing(started, marker):
    process = started((2,), *shell(DAEMON), options=["-x", "MARK"], MARK=marker)
    psutil.Process(agent_of(marker)).kill()
    until(lambda: not [p for p in marked(marker) if p != process.pid], GONE_S)
    assert finish(process).code == 255


@deadline(40)
def test_an_agent_that_a_signal_ends_says_which(started, marker):
    process = started((1,), *shell(DAEMON), options=["-x", "MARK"], MARK=marker)
    psutil.Process(agent_of(marker)).terminate()
    done = finish(process)
    assert done.code == 255
    assert "it said: tfdist agent: ended by SIGTERM" in done.report[0]
    assert marked(marker) == []


# It saves, and prints more than a pipe holds.
SAVES_AND_TELLS = SAVES.replace(
    "    time.sleep(1.5)\n", "    time.sleep(1.5)\n    print('x' * 99 * 1024)\n"
)


@pytest.mark.parametrize(
    "by_a_script", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@deadline(40)
def test_ranks_whose_agent_a_signal_ends_have_their_time_to_save(
    started, tmp_path, marker, by_a_script
):
    (tmp_path / "saves.py").write_text(SAVES_AND_TELLS)
    script = f"{sys.executable} saves.py"
    command = shell(f"{script}; true" if by_a_script else f"exec {script}")
    process = started((2,), *command, options=["-x", "MARK"], MARK=marker)
    psutil.Process(agent_of(marker)).terminate()
    done = finish(process)
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert done.stdout.count("x") == 2 * 99 * 1024
    # Nobody has asked the job to end.
    assert done.code == 255
    assert "it said: tfdist agent: ended by SIGTERM" in done.report[0]
    assert marked(marker) == []


# In `make test` on this host: test_launch_signals.py.
@pytest.mark.slow
@deadline(40)
def test_the_time_to_save_is_that_of_the_option_on_other_hosts_too(started, marker):
    script = "trap 'echo has $TFDIST_SIGNAL_GRACE_S' TERM; echo ready; "
    script += "while :; do sleep 0.1; done"
    options = ["-x", "MARK", "--signal-grace-s", "1.5"]
    process = started((2,), *shell(script), options=options, MARK=marker)
    psutil.Process(agent_of(marker)).terminate()
    done = finish(process, 15.0)
    assert done.code == 255
    assert done.seconds >= 1.4
    assert done.stdout.count("has 1.5") >= 2
    until(lambda: not marked(marker), GONE_S)


# It says when it is asked to, and takes longer than two signals count as the same.
SAVES_SLOWLY = SAVES.replace(
    "    time.sleep(1.5)\n", "    open('asked', 'w').close(); time.sleep(3)\n"
)


# In `make test`: only the agent is ended, above.
@pytest.mark.slow
@deadline(40)
def test_ranks_whose_agent_a_signal_ends_have_their_time_when_another_host_fails(
    started, tmp_path, marker
):
    (tmp_path / "saves.py").write_text(SAVES_SLOWLY)
    script = f"export HOST_MARK={marker}-$TFDIST_CROSS_RANK; "
    script += f"[ $TFDIST_RANK = 0 ] || exec {sys.executable} saves.py; "
    script += "echo ready; while [ ! -e asked ]; do sleep 0.1; done; exit 1"
    options = ["-x", "MARK", "--grace-s", "0.2"]
    process = started((1, 1), *shell(script), options=options, MARK=marker)
    psutil.Process(agent_of(f"{marker}-1")).terminate()
    done = finish(process)
    assert saved(tmp_path) == ["saved1"]
    assert done.code == 1
    assert done.report[0].startswith("rank 0 on host-a failed first: exit code 1")
    assert "1: host-b was lost" in "\n".join(done.report)
    assert marked(marker) == []


@pytest.mark.parametrize(
    "by_a_script", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@deadline(40)
def test_tfdistruns_signal_after_the_agents_takes_no_time_from_the_ranks(
    started, tmp_path, marker, by_a_script
):
    """A second signal would kill the program, which handles only one."""
    once = SAVES_SLOWLY.replace(
        "    open(", "    signal.signal(number, signal.SIG_DFL); open(", 1
    )
    (tmp_path / "saves.py").write_text(once)
    script = f"{sys.executable} saves.py"
    command = shell(f"{script}; true" if by_a_script else f"exec {script}")
    process = started((2,), *command, options=["-x", "MARK"], MARK=marker)
    psutil.Process(agent_of(marker)).terminate()
    until((tmp_path / "asked").exists, 10.0)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert done.code == (143 if by_a_script else 0), done.stderr
    assert "was lost" not in done.stderr
    assert marked(marker) == []


@pytest.mark.parametrize(
    "first_to", ["agent", pytest.param("tfdistrun", marks=pytest.mark.slow)]
)
@deadline(40)
def test_ranks_that_save_when_a_batch_system_signals_all_are_not_lost(
    started, tmp_path, marker, first_to
):
    (tmp_path / "saves.py").write_text(SAVES_SLOWLY)
    command = shell(f"exec {sys.executable} saves.py")
    process = started((2,), *command, options=["-x", "MARK"], MARK=marker)
    both = [psutil.Process(agent_of(marker)), process]
    first, second = both if first_to == "agent" else reversed(both)
    first.terminate()
    until((tmp_path / "asked").exists, 10.0)
    second.terminate()
    done = finish(process)
    assert saved(tmp_path) == ["saved0", "saved1"]
    assert done.code == 0, done.stderr
    assert "was lost" not in done.stderr
    assert marked(marker) == []


# In `make test`: ranks that save in time, above.
@pytest.mark.slow
@pytest.mark.parametrize("second_to", ["agent", "tfdistrun"])
@deadline(40)
def test_ranks_that_do_not_end_with_their_agent_can_be_killed(
    started, marker, second_to
):
    script = "trap '' TERM INT; echo ready; while :; do sleep 1; done"
    process = started((2,), *shell(script), options=["-x", "MARK"], MARK=marker)
    agent = psutil.Process(agent_of(marker))
    agent.terminate()
    time.sleep(1.5)
    assert len(marked(marker)) > 2
    if second_to == "agent":
        agent.terminate()
    else:
        assert signal_until_it_ends(process, signal.SIGINT) > 1
    assert finish(process, 8.0).code == (255 if second_to == "agent" else 130)
    until(lambda: not marked(marker), GONE_S)


# In `make test`: ranks that save in time, above.
@pytest.mark.slow
@deadline(40)
def test_ranks_that_are_killed_when_a_batch_system_signals_all_have_not_succeeded(
    started, marker
):
    script = "trap '' TERM INT; echo ready; while :; do sleep 0.2; done"
    options = ["-x", "MARK", "--signal-grace-s", "1.5"]
    process = started((2,), *shell(script), options=options, MARK=marker)
    psutil.Process(agent_of(marker)).terminate()
    time.sleep(0.2)  # the agent's time is over first
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code in (128 + signal.SIGTERM, 128 + signal.SIGKILL), done.stderr
    until(lambda: not marked(marker), GONE_S)


# Rank 0 sees that rank 2 is gone; rank 1, beside it, tells when it is asked to end.
SEES = """
import os, signal, sys, time
from tfdist.core.rendezvous import failure_report
rank = int(os.environ["TFDIST_RANK"])
if rank == 2:
    os.environ["HOST_MARK"] = os.environ["MARK"] + "-2"
    os.execvp(sys.executable, [sys.executable, "-c", "print('ready', flush=True)\\n"
        "import time; time.sleep(60)"])
def asked(number, frame):
    open("asked", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
print("ready", flush=True)
while rank == 1 or not os.path.exists("gone"):
    time.sleep(0.01)
told = {"error": "rank 2 failed: no sign of life for 2.0 s", "blamed": 2}
assert failure_report.send(os.environ, told)
sys.exit(1)
"""


@deadline(40)
def test_a_host_that_is_off_is_lost_also_when_the_survivors_have_ended(
    hosts, started, tmp_path, marker
):
    """They see it after two seconds, ssh after fifteen: tfdistrun ends all by then."""
    options = ["-x", "MARK", "--grace-s", "0.1"]
    process = started((2, 1), *python(SEES), options=options, MARK=marker)
    agent = psutil.Process(agent_of(f"{marker}-2"))
    agent.suspend()
    try:
        (tmp_path / "gone").touch()
        until(lambda: (tmp_path / "asked").exists(), 10.0)
        hosts.clients(process.pid)["host-b"].kill()
        done = finish(process)
    finally:
        agent.resume()
    assert done.code == 255
    lost = "rank 2 on host-b failed first: host-b was lost: its connection ended"
    assert done.report[0].startswith(lost), done.report
    until(lambda: not marked(marker), GONE_S)


@pytest.mark.slow
@deadline(90)
def test_a_connection_that_says_nothing_ends_its_ranks_on_both_sides(
    hosts, started, marker
):
    """Half-open: neither side sees an end, ssh itself notices nothing."""
    options = ["-x", "MARK"]
    process = started((1, 1), *shell(DAEMON), options=options, MARK=marker)
    before = len(marked(marker))
    hosts.clients(process.pid)["host-b"].suspend()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(agent_protocol.SILENCE_S - 10)
    assert len(marked(marker)) == before
    done = finish(process, 40.0)
    assert done.code == 255
    assert "host-b was lost: nothing was received from it for 30 s" in done.report[0]
    until(lambda: not marked(marker), GONE_S)


def agent_of(marker):
    """The one agent that has started the marked processes."""
    over = parents(marker)
    agents = [pid for pid in over if "tfdist.launch.agent" in command_line(pid)]
    assert len(agents) == 1
    return agents[0]


def parents(marker):
    """Of the marked processes."""
    found = set()
    for pid in marked(marker):
        try:
            found.add(psutil.Process(pid).ppid())
        except psutil.NoSuchProcess:
            continue
    return found


# ---- hosts that do not answer ----


def ssh_script(tmp_path, text):
    """An --ssh-command that says and does what it is told."""
    file = tmp_path / "ssh.sh"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return ["--ssh-command", str(file)]


@pytest.mark.parametrize(
    ("script", "says", "advice"),
    [
        (
            "echo 'far: Permission denied (publickey).' >&2; exit 255",
            "its connection ended with exit code 255; it said: far: Permission denied",
            "ssh-copy-id far",
        ),
        pytest.param(
            "echo 'Host key verification failed.' >&2; exit 255",
            "it said: Host key verification failed.",
            "`ssh far true`",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "echo Welcome; echo 'sh: 1: exec: /x/python: not found' >&2; exit 127",
            "exit code 127; it said: Welcome / sh: 1: exec: /x/python: not found",
            f"tfdistrun starts {sys.executable} there",
            marks=pytest.mark.slow,
        ),
        (
            f"exec env -i {sys.executable} -I -S -m tfdist.launch.agent",
            "No module named",
            "install the same tfdist on that host",
        ),
        ("exec cat /dev/zero", "it sent data that is not from tfdist", ""),
        (
            'exec sh -c "$2" < /dev/null',
            "tfdist agent: nothing can be read from its standard input",
            "docker exec -i",
        ),
        pytest.param(
            'true | sh -c "$2"',
            "tfdist agent: nothing can be read from its standard input",
            "docker exec -i",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "denied",
        "host key",
        "no python",
        "no tfdist",
        "garbage",
        "no input",
        "an input that ends",
    ],
)
@deadline(40)
def test_a_host_that_cannot_start_ranks_is_named(tmp_path, script, says, advice):
    words = ["-np", "2", "-H", "localhost:1,far:1", *ssh_script(tmp_path, script)]
    done = run(tmp_path, *words, "true", TFDIST_ADDRESS="127.0.0.1")
    assert done.code == 1
    assert done.report[0].startswith("far: tfdist could not be started there: ")
    assert says in done.report[0]
    assert advice in "\n".join(done.report)
    assert done.stdout == ""  # no rank was started anywhere


# Like `docker exec -it` or `ssh -tt`: COMMAND HOST LINE in a terminal, which echoes.
IN_A_TERMINAL = """
import pty, sys
sys.exit(pty.spawn(["sh", "-c", sys.argv[2]]))
"""


@deadline(40)
def test_a_terminal_between_is_named_and_shows_no_secret(tmp_path):
    program = tmp_path / "terminal.py"
    program.write_text(IN_A_TERMINAL)
    words = ["--ssh-command", f"{sys.executable} -I -S {program}"]
    done = run(
        tmp_path, "-np", "1", "-H", "far:1", *words, "true", TFDIST_ADDRESS="127.0.0.1"
    )
    assert done.code == 1
    assert "it came through a terminal" in done.report[0]
    assert "secret" not in done.stderr
    assert done.seconds < 20.0  # not --host-timeout-s


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)]
)
@deadline(40)
def test_a_users_signal_while_a_host_logs_in_ends_nothing(hosts, tmp_path, number):
    again = " ".join(hosts.ssh[1:])
    script = f'touch on; while ! test -e go; do sleep 0.02; done; exec {again} "$@"'
    words = ["-np", "1", "-H", "host-a:1", *ssh_script(tmp_path, script)]
    process = start(tmp_path, *words, *shell("echo ran"), TFDIST_ADDRESS=hosts.address)
    until(lambda: (tmp_path / "on").exists(), 10.0)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)  # longer than a round of waiting
    (tmp_path / "go").touch()
    done = finish(process)
    assert (done.code, done.stdout.strip()) == (0, "ran")


@deadline(40)
def test_a_host_that_does_not_answer_is_named_at_the_deadline(tmp_path):
    script = "echo 'debug: connecting' >&2; exec sleep 100"
    words = ["-np", "2", "-H", "far:1,farther:1", *ssh_script(tmp_path, script)]
    options = ["--host-timeout-s", "0.7"]
    done = run(tmp_path, *words, *options, "true", TFDIST_ADDRESS="127.0.0.1")
    assert done.code == 1
    for line, name in zip(done.report, ("far", "farther"), strict=True):
        assert line == (
            f"{name}: tfdist could not be started there: no answer within 0.7 s "
            "(--host-timeout-s); it said: debug: connecting"
        )
    assert 0.7 < done.seconds < 6.0


@deadline(40)
def test_ctrl_c_while_a_host_does_not_answer(tmp_path):
    words = ["-np", "1", "-H", "far:1", *ssh_script(tmp_path, "touch on; sleep 100")]
    process = start(tmp_path, *words, "true", TFDIST_ADDRESS="127.0.0.1")
    until(lambda: (tmp_path / "on").exists(), 10.0)
    process.send_signal(signal.SIGINT)
    assert finish(process, 5.0).code == 130


@deadline(40)
def test_a_folder_or_program_that_is_only_here_is_named(hosts, tmp_path):
    work, tools = tmp_path / "work", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (tools / "only-here").write_text("#!/bin/sh\n")
    (tools / "only-here").chmod(0o755)
    again = " ".join(hosts.ssh[1:])
    away = ssh_script(tmp_path, f'rmdir {work}; rm -r {tools}; exec {again} "$@"')
    words = ["-np", "2", "-H", "localhost:1,host-a:1", *away]
    words += ["--log-dir", str(tmp_path)]
    path = f"{tools}:{os.environ['PATH']}"
    done = run(work, *words, "only-here", TFDIST_ADDRESS=hosts.address, PATH=path)
    assert done.code == 1
    assert done.report[0].startswith(f"host-a: the working directory {work} cannot be")
    tools.mkdir()
    (tools / "only-here").write_text("#!/bin/sh\n")
    (tools / "only-here").chmod(0o755)
    done = run(tmp_path, *words, "only-here", TFDIST_ADDRESS=hosts.address, PATH=path)
    assert done.code == 127
    assert done.report[0].startswith("host-a: only-here: command not found there")


@deadline(40)
def test_an_address_that_is_not_this_hosts_is_refused(hosts, tmp_path):
    done = run(tmp_path, *on(hosts, 1), "true", TFDIST_ADDRESS="203.0.113.9")
    assert done.code == 2
    assert "cannot listen on 203.0.113.9" in done.stderr
