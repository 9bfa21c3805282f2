"""tfdist.data.scatter between hosts with networks of their own, which need root."""

import re
import sys

import pytest
from helpers.deadline import deadline
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import run

WHY_NOT = why_no_networks()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

PROGRAM = """
import tfdist
from helpers.scattered import equal, read
tfdist.init()
for readers in (1, 2, 3):
    data = equal(read, readers=readers)
    iterator = iter(data)
    next(iterator)
    tfdist.barrier()
print(tfdist.cross_rank(), "equal", flush=True)
"""


@deadline(180)
def test_a_rank_of_another_host_gets_what_it_would_have_read(tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        done = run(
            tmp_path,
            *["-np", "3", *hosts.slots(1, 2), *hosts.ssh],
            *[sys.executable, "-c", PROGRAM],
            timeout_s=150.0,
            CUDA_VISIBLE_DEVICES="",
        )
    assert done.code == 0, done.stderr
    assert len(re.findall(r"\d equal", done.stdout)) == 3
