"""tfdistrun on hosts with networks of their own: namespaces, which need root."""

import json
import re
import subprocess
import sys
import time

import pytest
from helpers.deadline import deadline
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import (
    clean_environment,
    finish,
    marked,
    python,
    run,
    start,
    until,
)

from tfdist.core import native

WHY_NOT = why_no_networks()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with networked_hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made


def on(hosts, *counts):
    return ["-np", str(sum(counts)), *hosts.slots(*counts), *hosts.ssh]


STEP = """
import json, numpy as np
from tfdist.core import native, runtime, world
from helpers import core_client as c
world.start()
c.steps(10, pause_s=0.0)
rank = runtime.rank()
# Not exact sums: what all ranks must have alike are the bits.
x = np.random.default_rng(rank).standard_normal(100_001).astype(np.float32)
total = c.allreduce(x, name="weights")
place = runtime.state.topology
peers = [link["peer"] for link in native.counters()["links"]
         if link["transport"] == "tcp" and link["data_bytes_sent"] > 0]
c.meet()  # the link to a rank that has left is gone, and its count
print(json.dumps({
    "rank": rank, "bits": int(total.view(np.uint32).astype(np.uint64).sum()),
    "peers": peers,
    "host_of": place.host_of, "local": [place.local_rank, place.local_size],
}), flush=True)
"""


def told(done):
    found = [json.loads(x) for x in re.findall(r"\[rank \d+\] ({.*})", done.stdout)]
    return sorted(found, key=lambda one: one["rank"])


@pytest.mark.parametrize(
    ("counts", "host_of", "algorithm"),
    [
        ((1, 3), [0, 1, 1, 1], "two_level"),
        pytest.param((1, 3), [0, 1, 1, 1], "auto", marks=pytest.mark.slow),
        pytest.param((2, 1), [0, 0, 1], "auto", marks=pytest.mark.slow),
        pytest.param((2, 1), [0, 0, 1], "two_level", marks=pytest.mark.slow),
        pytest.param((2, 2), [0, 0, 1, 1], "two_level", marks=pytest.mark.slow),
        pytest.param((1, 1, 2), [0, 1, 2, 2], "two_level", marks=pytest.mark.slow),
    ],
)
@deadline(60)
def test_unequal_hosts_compute_the_same_bits(
    hosts, tmp_path, counts, host_of, algorithm
):
    environ = {"TFDIST_ALLREDUCE_ALGORITHM": algorithm}
    done = run(tmp_path, *on(hosts, *counts), *python(STEP), **environ)
    assert done.code == 0, done.stderr
    found = told(done)
    assert len(found) == sum(counts)
    assert {one["bits"] for one in found} == {found[0]["bits"]}
    assert [one["host_of"] for one in found] == [host_of] * len(host_of)
    expected = [[i, count] for count in counts for i in range(count)]
    assert [one["local"] for one in found] == expected
    assert "no shared memory" not in done.stderr
    if algorithm == "two_level":  # one rank a host and slice speaks to the others
        speakers = sum(len(one["peers"]) for one in found)
        slices = min(counts)
        assert speakers <= slices * len(counts) * (len(counts) - 1)
        assert speakers > 0


@pytest.mark.parametrize(
    "transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)]
)
@deadline(60)
def test_this_host_and_another_one(hosts, tmp_path, transport):
    """The rendezvous listens where the other host can reach it, and nowhere else."""
    code = STEP + (
        "import os, psutil, sys\n"
        "ours = psutil.Process().net_connections('tcp')\n"
        "print(os.environ['TFDIST_RENDEZVOUS'], sorted(\n"
        "    {c.laddr.ip for c in ours}), file=sys.stderr)\n"
        "c.barrier('seen')\n"  # nobody leaves before all have looked
    )
    words = ["-np", "3", "-H", f"localhost:2,{hosts.names[0]}:1", *hosts.ssh]
    done = run(tmp_path, *words, *python(code), TFDIST_TRANSPORT=transport)
    assert done.code == 0, done.stderr
    assert [one["host_of"] for one in told(done)] == [[0, 0, 1]] * 3
    said = re.findall(r"\[rank \d\] ([\d.]+):\d+ \[(.*)\]", done.stderr)
    assert len(said) == 3
    assert {store for store, _ in said} == {hosts.address}
    used = {ip.strip("'") for _, ips in said for ip in ips.split(", ") if ip}
    assert used == {hosts.address, hosts.names[0]}


@deadline(20)
def test_another_network_is_another_claim():
    """So that nobody tries to share memory across it, and is refused."""
    code = "from tfdist.core.rendezvous import same_host; print(same_host.claim())"
    commands = ([], [], ["unshare", "--net"])
    claims = [
        subprocess.run(
            [*prefix, *python(code)],
            env=clean_environment(),
            capture_output=True,
            check=True,
        ).stdout
        for prefix in commands
    ]
    assert claims[0] == claims[1] != claims[2]


# In `make test`: the ranks of test_ring_order.py have no word of a launcher either.
@pytest.mark.slow
@deadline(60)
def test_hosts_of_one_kernel_are_told_apart_by_what_they_can_share(hosts, tmp_path):
    """Without a launcher's word: equal host name and boot id, two networks."""
    code = "import os\nfor n in ('RANK', 'SIZE'): os.environ.pop('TFDIST_CROSS_' + n)\n"
    code += "for n in ('RANK', 'SIZE'): os.environ.pop('TFDIST_LOCAL_' + n)\n"
    done = run(tmp_path, *on(hosts, 1, 2), *python(code + STEP))
    assert done.code == 0, done.stderr
    assert [one["host_of"] for one in told(done)] == [[0, 1, 1]] * 3
    assert [one["local"] for one in told(done)] == [[0, 1], [0, 2], [1, 2]]


@pytest.mark.slow
@deadline(60)
def test_a_launcher_that_cannot_be_reached_is_an_error_before_any_rank(hosts, tmp_path):
    """ssh works, but not the way back: a firewall."""
    hosts.cable(1, "down")
    try:
        done = run(tmp_path, *on(hosts, 1, 1), *python("print('started')"))
    finally:
        hosts.cable(1, "up")
    assert done.code == 1
    assert done.stdout == ""
    (first,) = (line for line in done.report if line.startswith(hosts.names[1]))
    assert f"tfdistrun cannot be reached from there at {hosts.address}:" in first
    assert "TFDIST_ADDRESS" in first
    assert done.seconds < 15.0


@pytest.mark.slow
@deadline(60)
def test_a_remote_rank_that_dies_is_named_on_every_host(hosts, tmp_path):
    client = [sys.executable, "-m", "helpers.core_client", "kill", "2"]
    done = run(tmp_path, *on(hosts, 2, 1), *client)
    assert done.code == 137
    first = f"rank 2 on {hosts.names[1]} failed first: killed by SIGKILL"
    assert done.report[0].startswith(first)
    line = (
        r"\[rank ([01])\] \[tfdist\] rank \1 ends with CoreError because of rank 2, at"
    )
    assert len(re.findall(line, done.stderr)) == 2


@pytest.mark.slow
@deadline(60)
def test_the_first_failure_is_found_although_clocks_differ(tmp_path):
    """Another host's monotonic clock is ahead by hours."""
    ahead = ["unshare", "--time", "--monotonic", "7200", "--fork", "--kill-child"]
    if subprocess.run([*ahead, "true"], capture_output=True).returncode != 0:
        pytest.skip("time namespaces cannot be made here")
    code = (
        "import os, sys, time\n"
        "from tfdist.core.rendezvous import failure_report\n"
        "rank = int(os.environ['TFDIST_RANK'])\n"
        "time.sleep([0.8, 0.1][rank])\n"
        "text = {'error': f'E{rank}', 'blamed': None}\n"
        "assert failure_report.send(os.environ, text)\n"
        "time.sleep([0.1, 1.4][rank])\n"
        "sys.exit(10 + rank)\n"
    )
    folder = tmp_path / "sockets"
    folder.mkdir()
    with networked_hosts(folder, 2, prefixes={1: ahead}) as hosts:
        done = run(tmp_path, *on(hosts, 1, 1), *python(code))
    assert done.code == 11, done.stderr
    assert done.report[0].startswith(f"rank 1 on {hosts.names[1]} failed first")
    assert re.search(r"after \d\.\d s$", done.report[0])


@pytest.mark.slow
@deadline(120)
def test_a_pulled_cable_ends_the_job_and_leaves_nothing(hosts, tmp_path, marker):
    """Ranks notice the missing heartbeats; ssh (not over the cable here) stays."""
    client = [sys.executable, "-m", "helpers.core_client", "wait", "99"]
    words = [*on(hosts, 1, 1), "-x", "MARK", *client]
    process = start(tmp_path, *words, MARK=marker, TFDIST_TIMEOUT_S="4")
    for _ in range(2):
        assert "init took" in process.stdout.readline()
    before = time.monotonic()
    hosts.cable(1, "down")
    try:
        done = finish(process, 60.0)
    finally:
        hosts.cable(1, "up")
    assert done.code != 0
    assert time.monotonic() - before < 4 + 15.0
    until(lambda: not marked(marker), 5.0)
