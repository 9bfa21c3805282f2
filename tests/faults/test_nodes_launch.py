"""tfdistrun on every host, with --nnodes: on this host's loopback, and on networks."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.deadline import deadline
from helpers.elastic_hosts import Job
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import (
    SAVES,
    TFDISTRUN,
    clean_environment,
    finish,
    marked,
    python,
    saved,
    shell,
    start,
    until,
)
from helpers.ports import free_ports

from tfdist.core import native

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
CLIENT = [sys.executable, "-m", "helpers.core_client"]


def new_secret(folder, name="secret"):
    path = folder / name
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


class Nodes:
    """Starts one tfdistrun after the other, as on the hosts of one job."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.secret = new_secret(folder)
        self.started = []

    def start(self, number, *words, size=None, **environ):
        own = self.folder / f"node{number}"
        own.mkdir(exist_ok=True)
        options = ["-np", str(size or 2 * self.count), "--nnodes", str(self.count)]
        options += ["--node-rank", str(number), "--rdzv", self.address]
        environ = {"TFDIST_SECRET_FILE": self.secret, **environ}
        process = start(own, *options, *words, **environ)
        self.started.append(process)
        return process

    def all(self, *words, **environ):
        """Starts all of them, the first one last."""
        numbers = reversed(range(self.count))
        found = {number: self.start(number, *words, **environ) for number in numbers}
        return [found[number] for number in range(self.count)]

    def run(self, *words, **environ):
        """Runs all of them to their ends."""
        return [finish(process) for process in self.all(*words, **environ)]


@pytest.fixture
def hosts(tmp_path):
    """Makes the `Nodes` of a number of hosts; ends what is left of them."""
    made = []

    def work(count):
        made.append(Nodes(tmp_path, count))
        return made[-1]

    yield work
    for process in (process for one in made for process in one.started):
        process.kill()
        process.communicate()


@pytest.fixture
def nodes(hosts):
    return hosts(2)


# ---- good ends ----


@deadline(40)
def test_places_output_and_folders(nodes, tmp_path):
    script = "echo $TFDIST_RANK/$TFDIST_SIZE $TFDIST_LOCAL_RANK/$TFDIST_LOCAL_SIZE"
    first, second = nodes.run(
        *shell(script + " $TFDIST_CROSS_RANK $A in $(pwd)"), A="b"
    )
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert sorted(first.stdout.splitlines()) == [
        f"[rank 0] 0/4 0/2 0 b in {tmp_path}/node0",
        f"[rank 1] 1/4 1/2 0 b in {tmp_path}/node0",
        f"[rank 2] 2/4 0/2 1 b in {tmp_path}/node1",
        f"[rank 3] 3/4 1/2 1 b in {tmp_path}/node1",
    ]
    assert second.stdout == ""
    assert "this is node 1 of 2; tfdistrun on the first host" in second.stderr
    (log,) = tmp_path.glob("node0/tfdist-logs/*/rank-3.log")
    assert log.read_text().startswith("3/4")
    assert not [*tmp_path.glob("node1/tfdist-logs")]


@deadline(60)
def test_real_ranks_compute_together_on_three_hosts(hosts):
    made = hosts(3)
    done = made.run(*CLIENT, "steps", "20", size=3)
    assert [one.code for one in done] == [0, 0, 0], done[0].stderr
    assert done[0].stdout.count("all sums are right") == 3


@deadline(40)
def test_each_host_has_its_own_environment_command_and_options(nodes):
    code = "import os; print(os.environ.get('OWN'), os.environ.get('TFDIST_TIMEOUT_S'))"
    second = nodes.start(
        1, "-x", "OWN=two", *python(code + "; print('x')"), size=2, TFDIST_TIMEOUT_S="9"
    )
    first = finish(nodes.start(0, *python(code), size=2, TFDIST_TIMEOUT_S="77"))
    assert finish(second).code == first.code == 0, first.stderr
    assert sorted(first.stdout.splitlines()) == [
        "[rank 0] None 77",
        "[rank 1] two 77",  # settings of tfdist are those of the first host
        "[rank 1] x",
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_NNODES": "2", "PET_NODE_RANK": "{}", "PET_MASTER_ADDR": "127.0.0.1"},
        {"SLURM_PROCID": "{}", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        pytest.param(
            {"RANK": "{}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"JOB_COMPLETION_INDEX": "{}"}, marks=pytest.mark.slow),
    ],
    ids=["pet", "slurm", "rank", "indexed job"],
)
@deadline(40)
def test_a_platform_numbers_the_hosts(nodes, tmp_path, variables):
    started = []
    for number in (1, 0):
        environ = {name: text.format(number) for name, text in variables.items()}
        if "PET_NNODES" in variables or "RANK" in variables:
            port = nodes.address.rpartition(":")[2]
            environ["PET_MASTER_PORT" if "PET_NNODES" in environ else "MASTER_PORT"] = (
                port
            )
            where = []
        else:
            where = ["--rdzv", nodes.address]
        words = ["-np", "4", "--nnodes", "2", *where, *CLIENT, "steps", "5"]
        environ["TFDIST_SECRET_FILE"] = nodes.secret
        process = start(tmp_path, *words, **environ)
        nodes.started.append(process)
        started.append(process)
    second, first = (finish(process) for process in started)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert first.stdout.count("of 4: all sums are right") == 4


# ---- failures ----


@deadline(40)
def test_all_return_the_code_of_the_rank_that_failed(nodes):
    script = "[ $TFDIST_RANK = 3 ] && exit 7; sleep 60"
    first, second = nodes.run(*shell(script))
    assert (first.code, second.code) == (7, 7)
    assert re.match(
        r"rank 3 on node 1 \(.+\) failed first: exit code 7", first.report[0]
    )
    assert "the job ended with exit code 7" in second.stderr


@deadline(40)
def test_other_options_end_the_job_at_once_on_both(nodes):
    second = nodes.start(1, "true", size=8)
    first = finish(nodes.start(0, "true", size=4))
    assert (first.code, finish(second).code) == (2, 2)
    assert "was started with other options: -np 8 on node 1, 4 on" in first.report[-1]


@deadline(40)
def test_a_host_that_cannot_start_its_ranks_ends_the_job(nodes):
    second = nodes.start(1, "nosuchprogram")
    first = finish(nodes.start(0, "true"))
    assert first.code == finish(second).code == 127
    assert "nosuchprogram: command not found there" in first.report[-1]


@deadline(40)
@pytest.mark.parametrize("number", [0, 1])
def test_a_malformed_variable_is_told(nodes, number):
    done = finish(nodes.start(number, "true", TFDIST_SIGNAL_GRACE_S="soon"))
    assert done.code == 2
    assert "TFDIST_SIGNAL_GRACE_S must be a number from 0 to" in done.report[-1]


@deadline(40)
def test_an_address_of_another_host_is_told(nodes):
    nodes.address = "192.0.2.7:29400"
    done = finish(nodes.start(0, "true"))
    assert done.code == 2 and "cannot listen on 192.0.2.7:29400" in done.report[-1]


@deadline(40)
def test_another_secret_is_refused(nodes, tmp_path):
    other = new_secret(tmp_path, "other")
    second = nodes.start(1, "true", TFDIST_SECRET_FILE=other)
    nodes.start(0, "true")  # goes on waiting
    done = finish(second)
    assert done.code == 2
    assert "is the content of TFDIST_SECRET_FILE the same" in done.report[-1]


@deadline(40)
def test_without_a_secret_nothing_starts(nodes):
    for number in (0, 1):
        done = finish(nodes.start(number, "true", TFDIST_SECRET_FILE=""))
        assert done.code == 2
        assert "--nnodes needs a secret that all hosts share" in done.report[0]


@deadline(40)
def test_hosts_that_do_not_come_are_named_to_those_that_did(hosts):
    made = hosts(4)
    second = made.start(2, "true", size=4)
    first = finish(made.start(0, "--host-timeout-s", "4", "true", size=4))
    says = "nodes 1 and 3 did not connect to 127.0.0.1:"
    assert first.code == 1 and says in first.report[-1]
    done = finish(second)
    assert done.code == 1 and says in done.report[-1]


@deadline(40)
def test_a_number_that_is_given_twice_is_that_of_the_last(hosts):
    """The first one may be of an earlier attempt."""
    made = hosts(3)
    earlier = made.start(1, "true", size=3)
    first = made.start(0, "true", size=3)
    until(lambda: connections(first.pid) == 1, 20.0)
    later = made.start(1, "true", size=3)
    done = finish(earlier)
    assert done.code == 2
    assert "has also connected as node 1; give each host its own" in done.report[-1]
    made.start(2, "true", size=3)
    assert finish(first).code == finish(later).code == 0


def connections(pid):
    """The number of TCP connections of a process."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in found)


@deadline(40)
def test_the_first_host_may_start_later(nodes):
    second = nodes.start(1, "true")
    time.sleep(1.5)
    assert second.poll() is None
    assert finish(nodes.start(0, "true")).code == finish(second).code == 0


@deadline(40)
def test_who_ends_while_it_waits_may_start_again(hosts):
    """The first host waits until all are there at the same time."""
    made = hosts(3)
    first = made.start(0, "true", size=3)
    for _ in range(2):
        second = made.start(1, "true", size=3)
        until(lambda: connections(first.pid) == 1, 20.0)
        second.kill()
        until(lambda: connections(first.pid) == 0, 20.0)
    others = [made.start(number, "true", size=3) for number in (1, 2)]
    assert [finish(one).code for one in (first, *others)] == [0, 0, 0]


@deadline(60)
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_tfdistrun_ends_the_ranks_of_all_hosts(nodes, number):
    mark = f"mark-{os.getpid()}-{number}"
    processes = nodes.all(*shell("echo ready; sleep 60"), MARK=mark)
    for _ in range(4):
        assert "ready" in processes[0].stdout.readline()
    processes[number].kill()
    done = finish(processes[1 - number])
    if number == 0:
        assert done.code == 1
        assert "the connection to the first host" in done.report[-1]
    else:
        assert done.code == 255
        assert re.search(r"node 1 \(.+\) was lost: its connection ended", done.stderr)
    until(lambda: not marked(mark), 10.0)


@deadline(60)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_sigterm_the_ranks_save_on_every_host(nodes, tmp_path, number):
    processes = nodes.all(*python(SAVES))
    for _ in range(4):
        assert "ready" in processes[0].stdout.readline()
    processes[number].send_signal(signal.SIGTERM)
    first, second = (finish(process) for process in processes)
    own = {0: ["saved0", "saved1"], 1: ["saved2", "saved3"]}
    assert saved(tmp_path / f"node{number}") == own[number]
    if number == 0:
        assert saved(tmp_path / "node1") == own[1]
        assert (first.code, second.code) == (0, 0)
    else:
        assert (first.code, second.code) == (255, 143)
        assert "tfdistrun was ended by SIGTERM there" in first.stderr


@deadline(60)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_signal_to_all_hosts_is_one_signal(nodes, order):
    """As a batch system sends it; the ranks die at once, before the hosts talk."""
    processes = nodes.all(*shell("echo ready; exec sleep 60"))
    for _ in range(4):
        assert "ready" in processes[0].stdout.readline()
    for number in order:
        processes[number].send_signal(signal.SIGTERM)
    first, second = (finish(process) for process in processes)
    assert (first.code, second.code) == (143, 143), first.stderr + second.stderr
    assert "was lost" not in first.stderr


@deadline(60)
def test_an_elastic_job_goes_on_without_a_lost_host(nodes, tmp_path):
    (tmp_path / "hold").touch()
    program = [sys.executable, "-m", "helpers.elastic_client", str(tmp_path), "1"]
    first, second = nodes.all("--min-np", "2", *program)
    job = Job(tmp_path, first)
    job.wait_for(4)
    second.kill()
    job.wait_for(2, generation=2)
    done = job.finish()
    assert re.search(r"node 1 \(.+\) was lost: its connection ended", done.stderr)
    assert {row["member"] for row in job.rows() if row["size"] == 2} == {0, 1}


# ---- with a network each ----

WHY_NOT = why_no_networks()
MNIST_FIT = (str(ROOT / "recipes" / "mnist_fit.py"),)


def numbered(number, host, port, by):
    """The options and variables that tell a host its number, and the first address."""
    if by == "pet":
        own = {"PET_NNODES": "2", "PET_NODE_RANK": str(number)}
        return [], {**own, "PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
    where = ["--rdzv", f"{host}:{port}"]
    if by == "indexed job":
        return where, {"JOB_COMPLETION_INDEX": str(number)}
    return [*where, "--node-rank", str(number)], {}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("program", "by"),
    [
        (("-m", "helpers.core_client", "steps", "20"), "options"),
        pytest.param(MNIST_FIT, "options", marks=pytest.mark.slow),
        pytest.param(MNIST_FIT, "pet", marks=pytest.mark.slow),
        pytest.param(MNIST_FIT, "indexed job", marks=pytest.mark.slow),
    ],
    ids=["client", "mnist_fit", "mnist_fit-pet", "mnist_fit-indexed job"],
)
@deadline(150)
def test_two_hosts_with_networks_of_their_own(tmp_path, program, by):
    with networked_hosts(tmp_path, 2) as hosts:
        secret = new_secret(tmp_path)
        started = []
        for number in (1, 0):
            where, own = numbered(number, hosts.names[0], "29400", by)
            environ = clean_environment(TFDIST_SECRET_FILE=secret, **own)
            options = ["-np", "4", "--nnodes", "2", *where]
            command = [*TFDISTRUN, *options, sys.executable, *program]
            space = hosts.cables[number].replace("to", "tn", 1)
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command],
                    cwd=tmp_path,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        second, first = (finish(process, 45.0) for process in started)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    if program[0] == "-m":
        assert first.stdout.count("of 4: all sums are right") == 4
    else:
        assert "same weights on all ranks" in first.stdout
