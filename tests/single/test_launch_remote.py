"""The connections to other hosts, before their ranks start."""

import shutil
import subprocess
import sys
import time

import pytest

from tfdist.launch import agent_protocol, remote
from tfdist.launch.connection import SshConnection
from tfdist.launch.hosts import Host
from tfdist.launch.signals import Signals

# Says "ready" at once, or after `slow_s` on the slow host, and ends when nothing comes
# for `silence_s` from then on, as agents do.
AGENT = """
import os, select, sys, time
from tfdist.launch import agent_protocol
slow_s, silence_s, host = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
say = lambda **fields: os.write(1, bytes(agent_protocol.message(**fields)))
os.write(1, agent_protocol.GREETING)
ready_s = time.monotonic() + (slow_s if host == "slow" else 0.0)
heard_s = None
while True:
    now = time.monotonic()
    if ready_s is not None and now >= ready_s:
        say(event="ready", warnings=[], bound=[], threads="")
        ready_s, heard_s = None, now
    if ready_s is None and now - heard_s > silence_s:
        sys.exit(9)
    if select.select([0], [], [], 0.02)[0]:
        data = os.read(0, 65536)
        if not data:
            break
        heard_s = now
"""


@pytest.fixture
def connect(tmp_path):
    """Connects to a fast host and a slow one; closes the connections at the end."""
    made = []

    def work(slow_s, silence_s):
        program = tmp_path / "agent.py"
        program.write_text(AGENT)
        words = [sys.executable, str(program), str(slow_s), str(silence_s)]
        for rank, name in enumerate(["fast", "slow"]):
            ssh = SshConnection(words, name, "")
            made.append(remote.RemoteHost(Host(name, 1), [rank], ssh))
        return made

    yield work
    for one in made:
        one.kill()
        one.close("the test is over")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_no_shared_connection_outlives_the_job(tmp_path):
    config = tmp_path / "config"
    config.write_text("Host *\n  ControlMaster auto\n  ControlPersist 10m\n")
    command = [*remote.SSH_COMMAND.split(), "-F", str(config), "-G", "host"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\ncontrolmaster false\n" in done.stdout


def prepared(connections, timeout_s):
    signals = Signals()
    try:
        return remote.prepare_all(connections, signals, timeout_s=timeout_s)
    finally:
        signals.close()


@pytest.fixture
def quick(monkeypatch):
    """Signs of life ten times a second."""
    monkeypatch.setattr(agent_protocol, "SIGN_OF_LIFE_S", 0.1)
    monkeypatch.setattr(remote, "_ROUND_S", 0.05)


def test_hosts_that_are_ready_hear_from_us_until_all_are(connect, quick):
    connections = connect(slow_s=1.5, silence_s=0.7)
    assert prepared(connections, 20.0) is None
    assert [one.failure for one in connections] == ["", ""]
    assert [one.state for one in connections] == ["ready", "ready"]


def test_a_host_that_is_lost_after_it_was_ready_is_named(connect, monkeypatch):
    monkeypatch.setattr(agent_protocol, "SIGN_OF_LIFE_S", 1000.0)  # so that it goes
    connections = connect(slow_s=30.0, silence_s=0.3)
    assert prepared(connections, 20.0) is None
    assert "with exit code 9" in connections[0].failure


@pytest.mark.parametrize(
    ("speaks", "least_s", "most_s"), [(False, 0.2, 1.2), (True, 1.2, 5.0)]
)
def test_a_host_that_does_not_confirm_a_kill_is_lost(
    connect, monkeypatch, speaks, least_s, most_s
):
    """A host that has been silent before has less time: it may have been lost."""
    monkeypatch.setattr(remote, "KILL_LIMIT_S", 0.8)
    monkeypatch.setattr(remote, "KILL_MIN_S", 0.3)
    connections = connect(slow_s=0.0, silence_s=60.0)
    prepared(connections, 20.0)
    connection = connections[0]
    connection.go()
    time.sleep(0.9)
    if speaks:
        connection.heard()
    asked_s = time.monotonic()
    connection.kill_rank(0)
    connection.kill_rank(7)  # has ended meanwhile
    while not (ends := connection.run_periodic()):
        if speaks:
            connection._heard_s = time.monotonic()
        time.sleep(0.02)
    assert least_s < time.monotonic() - asked_s < most_s
    [end] = ends
    assert end.rank == 0 and end.lost == connection.lost
    assert "did not confirm that a process was killed" in end.lost


def test_a_paused_caller_does_not_take_its_hosts_for_lost(connect, monkeypatch):
    """It reads no answers while the reader of its own output pauses."""
    monkeypatch.setattr(remote, "KILL_LIMIT_S", 0.3)
    connections = connect(slow_s=0.0, silence_s=60.0)
    prepared(connections, 20.0)
    connection = connections[0]
    connection.go()
    connection.kill_rank(0)
    ends_s = time.monotonic() + 0.8
    while time.monotonic() < ends_s:
        connection.heard()
        assert connection.run_periodic() == []
        time.sleep(0.02)
