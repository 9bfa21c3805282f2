"""`tfdistrun --horovod` on several hosts."""

import pytest
from helpers.deadline import deadline
from helpers.hosts import plain_hosts
from helpers.launcher import run

pytestmark = pytest.mark.faults

PROGRAM = """
import os, horovod
names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK",
         "TFDIST_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
print(horovod.__name__, *(os.environ[name] for name in names))
"""


@deadline(60)
def test_ranks_on_other_hosts_know_horovod_its_variables_and_their_places(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hosts").mkdir()
    with plain_hosts(tmp_path / "hosts", "host-a", "host-b") as hosts:
        done = run(
            tmp_path,
            *("--horovod", "-np", "3", *hosts.slots(2, 1), *hosts.ssh, "train.py"),
            TFDIST_ADDRESS=hosts.address,
            HOROVOD_LOG_LEVEL="info",
            HOROVOD_AUTOTUNE="1",
        )
    assert done.code == 0, done.stderr
    places = {0: "0 3 0 0", 1: "1 3 1 0", 2: "2 3 0 1"}
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] tfdist.horovod {place} info info"
        for rank, place in places.items()
    ]
    assert done.stderr.count("HOROVOD_AUTOTUNE has no effect") == 1
