"""tfdist doctor on ranks: a healthy job, and jobs that cannot start."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from helpers.deadline import deadline
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import clean_environment, run
from helpers.tree import ROOT

from tfdist.core import native

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
DOCTOR = [sys.executable, "-m", "tfdist.tools", "doctor", "--seconds", "0.2"]
NAMED_S = 10.0
START_S = 15.0  # of Python and the checks, on a busy machine
WHY_NOT = why_no_networks()
# Rank 1 is on a host of its own, whose system time is a minute ahead.
WRONG_CLOCK = """
import os, time
if os.environ.get("TFDIST_RANK") == "1":
    os.environ["SLURMD_NODENAME"] = "node1"
    now = time.time
    time.time = lambda: now() + 60.0
"""


@deadline(60)
def test_a_healthy_job_reduces_exactly_and_reports_once(tmp_path):
    files = ["--json", "found.json", "--failing-hosts", "failing.txt"]
    done = run(tmp_path, "-np", "3", *DOCTOR, *files)
    assert done.code == 0, done.stderr + done.stdout
    assert done.stdout.count("allreduces of 1 KiB to 16 MiB on 3 ranks") == 1
    assert "all exact" in done.stdout
    content = json.loads((tmp_path / "found.json").read_text())
    checks = [one["check"] for one in content["findings"]]
    assert checks.count("launcher") == checks.count("collectives") == 1
    assert (tmp_path / "failing.txt").read_text() == ""


@deadline(60)
def test_without_a_launcher_it_starts_the_ranks_itself(tmp_path):
    done = subprocess.run(
        [*DOCTOR, "-np", "2"],
        **{"cwd": tmp_path, "env": clean_environment(), "text": True},
        capture_output=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "ok       launcher: none" in done.stdout
    assert "[rank 0] ok       collectives:" in done.stdout
    assert os.listdir(tmp_path) == []


@deadline(60)
def test_a_wrong_clock_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    path = f"{tmp_path}:{clean_environment().get('PYTHONPATH', '')}"
    files = ["--failing-hosts", "failing.txt"]
    done = run(tmp_path, "-np", "2", *DOCTOR, *files, PYTHONPATH=path)
    assert done.code == 0, done.stderr + done.stdout
    ahead = f"clock (node1): is 60 s ahead of that of {socket.gethostname()}"
    assert f"WARNING  {ahead}" in done.stdout
    assert "Set the clock by NTP" in done.stdout
    assert (tmp_path / "failing.txt").read_text() == "node1\n"


# In `make test`: ranks that cannot connect for another reason, below.
@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@deadline(60)
def test_a_firewall_between_two_hosts_is_named_on_both(tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        hosts.drop(0, 1)
        words = ["-np", "2", *hosts.slots(1, 1), *hosts.ssh, *DOCTOR]
        done = run(tmp_path, *words, TFDIST_ADDRESS=hosts.address)
    assert done.code == 1, done.stderr + done.stdout
    assert done.seconds < NAMED_S + START_S
    for rank in (0, 1):
        [error] = re.findall(rf"\[rank {rank}\] ERROR    job: (.*)", done.stdout)
        assert re.search("rank 1 (cannot|did not) connect to rank 0", error)
        assert f"at {hosts.names[0]}:" in error
        assert "is there a firewall?" in error


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Ranks:
    """Two ranks as a launcher without a rendezvous of its own starts them."""

    def __init__(self, folder):
        self.folder, self.size = folder, 2
        self.secrets = [folder / "secret0", folder / "secret1"]
        for file in self.secrets:
            self.write(file, bytes(32))
        self.rendezvous = f"127.0.0.1:{free_port()}"
        self.environs = [{}, {}]

    @staticmethod
    def write(file, secret):
        file.write_bytes(secret)
        file.chmod(0o600)

    def texts(self):
        """The output of each rank, which must come in time."""
        begin_s = time.monotonic()
        ranks = [
            subprocess.Popen(
                DOCTOR,
                env=clean_environment(
                    TFDIST_RANK=str(rank),
                    TFDIST_SIZE=str(self.size),
                    TFDIST_RENDEZVOUS=self.rendezvous,
                    TFDIST_SECRET_FILE=str(self.secrets[rank]),
                    **environ,
                ),
                **{"cwd": self.folder, "stdout": subprocess.PIPE, "text": True},
                stderr=subprocess.STDOUT,
            )
            for rank, environ in enumerate(self.environs)
        ]
        texts = [rank.communicate(timeout=50)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, 1], texts
        assert time.monotonic() - begin_s < NAMED_S + START_S
        return texts


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


@deadline(60)
def test_another_secret_is_named(ranks):
    ranks.write(ranks.secrets[1], b"x" * 32)
    first, second = ranks.texts()
    assert "ERROR    job" in first and "ERROR    job" in second
    assert "secret" in second


@deadline(60)
def test_another_setting_is_named_on_both(ranks):
    ranks.environs[1]["TFDIST_SEGMENT_BYTES"] = "65536"
    for text in ranks.texts():
        assert "do not agree on TFDIST_SEGMENT_BYTES" in text
        assert "65536 on rank 1" in text


@deadline(60)
def test_another_tensorflow_is_named_on_both(ranks):
    # Not in the working folder, from which both ranks import.
    folder = ranks.folder / "site" / "tensorflow-2.16.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: tensorflow\nVersion: 2.16.0\n")
    path = clean_environment().get("PYTHONPATH", "")
    ranks.environs[1]["PYTHONPATH"] = f"{folder.parent}:{path}"
    for text in ranks.texts():
        assert "do not agree on version of TensorFlow" in text
        assert "2.16.0 on rank 1" in text


@pytest.mark.slow
@deadline(60)
def test_a_missing_rank_is_named(ranks):
    ranks.size = 3
    for text in ranks.texts():
        assert "ERROR    job" in text
        assert "missing ranks: 2" in text or "rank 2" in text


@pytest.mark.slow
@deadline(60)
def test_a_rank_without_a_core_says_so(ranks):
    # A tfdist without libraries, found before the one that is built.
    copy = ranks.folder / "copy"
    ignore = shutil.ignore_patterns("_native", "__pycache__")
    shutil.copytree(ROOT / "tfdist", copy / "tfdist", ignore=ignore)
    ranks.environs[1]["PYTHONPATH"] = str(copy)
    first, second = ranks.texts()
    assert "ERROR    core (" in second and "is not built" in second
    assert "rank 1" in first or "missing ranks: 1" in first


@pytest.mark.slow
@deadline(60)
def test_a_port_in_use_is_named(ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks.rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
        first, second = ranks.texts()
    assert "cannot listen on" in first
    assert "ERROR    job" in second
