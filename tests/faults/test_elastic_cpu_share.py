"""Spares of an elastic job give way to its ranks until they are needed."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from helpers.deadline import deadline
from helpers.hosts import plain_hosts
from helpers.launcher import start, until

from tfdist.launch.cpu_share import BACKGROUND_NICE

SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not SWITCH.exists() or SWITCH.read_text().strip() != "1",
        reason="without autogroups, no session has a nice value",
    ),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with plain_hosts(tmp_path_factory.mktemp("hosts"), "host-a", "host-b") as made:
        yield made


def members(marker):
    """The leaders of the sessions of a job: member number → process ID."""
    found = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        pid, number = process.pid, environ.get("TFDIST_MEMBER")
        if marker in environ and number and os.getsid(pid) == pid:
            found[int(number)] = pid
    return found


def nice(marker):
    """The nice values of the sessions: member number → value."""
    found = {}
    for member, pid in members(marker).items():
        with contextlib.suppress(OSError):  # it has exited meanwhile
            text = Path(f"/proc/{pid}/autogroup").read_text()  # "/autogroup-7 nice 0"
            found[member] = int(text.rpartition(" ")[2])
    return found


def check(job, marker):
    """Checks a job of three ranks and a spare, member 3, before and after losses."""
    until(lambda: nice(marker) == dict.fromkeys(range(4), 0), 20.0)
    os.kill(members(marker)[1], signal.SIGKILL)
    until(lambda: nice(marker) == {0: 0, 2: 0, 3: 0, 4: BACKGROUND_NICE}, 20.0)
    os.kill(members(marker)[2], signal.SIGKILL)
    until(lambda: nice(marker) == {0: 0, 3: 0, 4: 0, 5: BACKGROUND_NICE}, 20.0)
    job.terminate()


@deadline(60)
def test_a_spare_gives_way_to_the_ranks_until_it_is_needed(tmp_path, marker):
    options = ("-np", "3", "--min-np", "1", "--spares", "1", "--signal-grace-s", "1")
    check(start(tmp_path, *options, "sleep", "60", **{marker: ""}), marker)


@deadline(60)
def test_a_spare_on_another_host_gives_way_too(hosts, tmp_path, marker):
    options = ("-np", "3", "--min-np", "1", "--spares", "1", "--signal-grace-s", "1")
    where = [*hosts.slots(1, 3), *hosts.ssh, "-x", marker]
    environ = {"TFDIST_ADDRESS": hosts.address, marker: ""}
    check(start(tmp_path, *options, *where, "sleep", "60", **environ), marker)
