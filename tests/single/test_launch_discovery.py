"""Discovery scripts: what they print, and how they can fail."""

import queue
import signal
import socket
import time
from types import SimpleNamespace

import pytest
from helpers.deadline import deadline
from helpers.launcher import until

from tfdist.core.rendezvous import renewal
from tfdist.launch import binding, cli, discovery, processes
from tfdist.launch.discovery import DiscoveryError, HostDiscovery, hosts_of
from tfdist.launch.job import Job
from tfdist.launch.options import elastic_error, parser
from tfdist.launch.topology import Processor

# ---- what they print ----


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("localhost:3", [3]),
        ("localhost\n", [1]),
        (f"{socket.gethostname()}:2\n", [2]),
        ("# a comment\n\n127.0.0.1:2\nlocalhost:1\n", [3]),
        ("192.0.2.7:2\nlocalhost:1\n192.0.2.8\n", [2, 1, 1]),
        ("192.0.2.7:2\n192.0.2.8:1\n192.0.2.7:1\n", [3, 1]),
    ],
)
def test_the_hosts_are_found_in_their_order(text, slots):
    found = hosts_of(text, "find.sh")
    assert [host.slots for host in found] == slots
    assert [host.is_local for host in found] == ["192" not in h.name for h in found]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("", "empty", "find.sh printed nothing; expected lines with a host"),
        (" \n", "empty", "for example localhost:4"),
        ("localhost:many", "malformed", "expected"),
        ("localhost:0", "malformed", "a number of slots from 1"),
        ("?!", "malformed", "'?!' is not the name or address of a host"),
        ("localhost:2\nhost:x", "malformed", "find.sh, line 2: expected a number"),
    ],
)
def test_other_output_is_an_error_that_says_what_was_expected(text, kind, says):
    with pytest.raises(DiscoveryError) as error:
        hosts_of(text, "find.sh")
    assert says in str(error.value) and error.value.kind == kind


# ---- how they are run ----


@pytest.fixture
def script(tmp_path):
    """Writes a script, and returns its path."""

    def write(text):
        file = tmp_path / "find.sh"
        new = tmp_path / "new"
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.rename(file)
        return str(file)

    return write


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("echo no room >&2; exit 3", "failed", "failed (exit code 3): no room"),
        ("kill -9 $$", "failed", "failed (killed by SIGKILL)"),
        ("sleep 60", "limit", "did not end within 0.3 s"),
        ("sleep 60 & echo localhost:2", "limit", "did not end within 0.3 s"),
        ("exec >&- 2>&-; sleep 60", "failed", "killed by SIGKILL"),
        ("while true; do echo localhost:2; done", "malformed", "more than 65536 bytes"),
    ],
)
@deadline(20)
def test_a_script_that_fails_or_hangs_is_an_error(script, text, kind, says):
    begin_s = time.monotonic()
    with pytest.raises(DiscoveryError) as error:
        HostDiscovery(script(text), limit_s=0.3).first_hosts()
    assert says in str(error.value) and error.value.kind == kind
    assert time.monotonic() - begin_s < 10.0
    assert not processes._outsiders


def test_a_file_that_cannot_be_run_is_an_error(tmp_path):
    file = tmp_path / "find.sh"
    with pytest.raises(DiscoveryError, match="no such file"):
        HostDiscovery(str(file)).first_hosts()
    file.write_text("echo localhost:2\n")
    with pytest.raises(DiscoveryError, match=r"not executable: chmod \+x"):
        HostDiscovery(str(file)).first_hosts()
    file.chmod(0o755)
    with pytest.raises(DiscoveryError, match="cannot be started: Exec format error"):
        HostDiscovery(str(file)).first_hosts()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@deadline(20)
def test_a_signal_while_the_first_script_is_started_ends_it(
    script, monkeypatch, number
):
    started = []

    def start_then_signal(command):
        started.append(processes.start_outsider(command))
        signal.raise_signal(number)
        return started[0]

    monkeypatch.setattr(discovery, "start_outsider", start_then_signal)
    options = ["-np", "1", "--min-np", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*options, "--host-discovery-script", script("sleep 60"), "true"])
    assert ended.value.code == 128 + number
    assert started[0].returncode == -signal.SIGKILL
    assert not processes._outsiders


def slots_in(hosts):
    return sum(host.slots for host in hosts)


@deadline(30)
def test_only_changes_are_reported_and_problems_of_a_kind_once(script, request):
    found = queue.SimpleQueue()
    discovery = HostDiscovery(script("echo localhost:2"), period_s=0.02)
    assert slots_in(discovery.first_hosts()) == 2
    request.addfinalizer(discovery.close)
    discovery.start(found.put)

    def reported():
        """The next report, and that no other one follows it."""
        first = found.get(timeout=10.0)
        time.sleep(0.2)
        assert found.empty()
        return first

    script("echo localhost:4")
    assert slots_in(reported()) == 4
    script("exit 1")
    assert reported().kind == "failed"
    script("true")
    assert reported().kind == "empty"
    script("echo localhost:4")
    time.sleep(0.3)
    assert found.empty()  # the last good answer, again
    script("true")
    assert reported().kind == "empty"
    script("echo localhost:1")
    assert slots_in(reported()) == 1


@deadline(20)
def test_a_script_that_runs_is_killed_at_the_end(script, tmp_path):
    discovery = HostDiscovery(script("echo localhost:2"), period_s=0.0)
    discovery.first_hosts()
    script(f"touch {tmp_path}/runs; sleep 60")
    discovery.start(lambda found: None)
    until(lambda: (tmp_path / "runs").exists(), 10.0)
    discovery.close()
    assert not processes._outsiders


@deadline(20)
def test_the_exit_code_of_a_script_is_not_lost_to_who_reaps_orphans():
    process = processes.start_outsider(["sh", "-c", "exit 3"])
    until(lambda: b"Z" in open(f"/proc/{process.pid}/stat", "rb").read().split(), 5.0)
    processes.reap_orphans(set())
    assert process.pid not in processes.job_processes("none", excluded_pids=())
    assert processes.end_outsider(process) == 3


# ---- options ----


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-np", "4"], "--max-np has an effect only with --min-np N"),
        (["--host-discovery-script", "f"], "script has an effect only with --min-np"),
        (["--min-np", "1", "--max-np", "4"], "add --host-discovery-script FILE, or"),
        (["--min-np", "1", "--max-np", "1"], "--max-np 1 is less than -np 2"),
        (
            ["--min-np", "1", "--host-discovery-script", "f", "-H", "localhost:2"],
            "-H and --hostfile would set too",
        ),
    ],
)
def test_options_that_do_not_fit_are_errors(words, says):
    options = parser().parse_args(["-np", "2", *words, "true"])
    assert says in elastic_error(options)


def test_max_np_without_a_script_may_be_np():
    words = ["-np", "2", "--min-np", "1", "--max-np", "2", "true"]
    assert elastic_error(parser().parse_args(words)) is None


def discover(script, *words):
    words = ["-np", "2", *words, "--host-discovery-script", script, "true"]
    options = parser().parse_args(words)
    return options, *cli._discover(options)


def test_the_job_starts_with_all_slots_up_to_max_np(script, capsys):
    file = script("echo localhost:8")
    options, discovery, _ = discover(file, "--min-np", "1", "--max-np", "4")
    assert options.size == 4 and discovery.script == file
    assert "has 8 slots: the job starts with 4 ranks" in capsys.readouterr().err
    options, _, _ = discover(file, "--min-np", "1")
    assert options.size == options.max_size == 2
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo localhost:1", "printed 1 slot, but the job needs -np 2"),
        ("true", "find.sh printed nothing; expected"),
    ],
)
def test_the_first_answer_has_to_be_good_enough(script, capsys, text, says):
    with pytest.raises(SystemExit) as ended:
        discover(script(text), "--min-np", "1")
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_processors_are_divided_for_all_ranks_that_there_may_be(script, monkeypatch):
    four = [Processor(socket=0, node=0, core=n, number=n) for n in range(4)]
    monkeypatch.setattr(binding, "own", lambda: four)
    options, _, hosts = discover(
        *(script("echo localhost:2"), "--min-np", "1", "--max-np", "4"),
        *("--bind-to", "slice"),
    )
    plan = cli._plan(options, hosts, can_change=True)
    assert len(plan.places) == len(plan.slots) == 2 and plan.max_size == 4
    assert plan.bound == {0: [(rank,) for rank in range(4)]}


def test_the_job_starts_on_the_hosts_that_the_script_lists(script, capsys):
    file = script("echo 192.0.2.7:2; echo localhost:9; echo 192.0.2.8:1")
    options, _, hosts = discover(file, "--min-np", "1", "--max-np", "4")
    assert "hosts have 12 slots: the job starts with 4 ranks" in capsys.readouterr().err
    plan = cli._plan(options, hosts, can_change=True)
    assert [place.host for place in plan.places] == [0, 0, 1, 1]
    assert [slot.host for slot in plan.slots] == [0, 0, 1, 1, 1, 1, 2]
    assert plan.remote == [0, 2] and plan.can_get_hosts


def test_a_job_of_one_rank_can_move_for_which_it_needs_a_second_one(script):
    words = ["-np", "1", "--min-np", "1", "--host-discovery-script"]
    options = parser().parse_args([*words, script("echo localhost:1"), "true"])
    _, hosts = cli._discover(options)
    job = SimpleNamespace(
        plan=cli._plan(options, hosts, can_change=True), options=options
    )
    [place] = job.plan.places
    assert Job.variables_of(job, place)[renewal.MAX_SIZE] == "2"
