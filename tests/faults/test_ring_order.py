"""TFDIST_RING_ORDER on two hosts with own networks: what crosses between them."""

import json
import re
import sys

import pytest
from helpers.deadline import deadline
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import run

from tfdist.core import native

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
WHY_NOT = why_no_networks()

# Ranks 0 and 1 of the launcher, on the first host, become 0 and 2: neighbours by number
# are on different hosts.
STEP = """
import json, os, numpy as np
rank = [0, 2, 1, 3][int(os.environ["TFDIST_RANK"])]
os.environ["TFDIST_RANK"] = str(rank)
for which in ("LOCAL", "CROSS"):
    for what in ("RANK", "SIZE"):
        os.environ.pop(f"TFDIST_{which}_{what}")
from tfdist.core import native, runtime, world
from helpers import core_client as c
world.start()
x = np.random.default_rng(rank).standard_normal(16384).astype(np.float32)
bits = int(c.allreduce(x, name="weights").view(np.uint32).astype(np.uint64).sum())
c.barrier("summed")
sent = {"tcp": 0, "shm": 0}
for link in native.counters()["links"]:
    sent[link["transport"]] += link["data_bytes_sent"]
c.meet()  # the link to a rank that has left is gone, and its count
print(json.dumps({"bits": bits, "host_of": runtime.state.topology.host_of, **sent}))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with networked_hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("order", "crossing"),
    [
        ("topology", 2),
        pytest.param("rank", 4, marks=pytest.mark.slow),
        pytest.param("0,2,1,3", 2, marks=pytest.mark.slow),
    ],
)
@deadline(60)
def test_what_a_badly_numbered_world_sends_between_hosts(
    hosts, tmp_path, order, crossing
):
    """`crossing` of the four ranks have their right neighbour on the other host."""
    words = ["-np", "4", *hosts.slots(2, 2), *hosts.ssh, sys.executable, "-c", STEP]
    environ = {"TFDIST_ALLREDUCE_ALGORITHM": "ring", "TFDIST_RING_ORDER": order}
    done = run(tmp_path, *words, **environ)
    assert done.code == 0, done.stderr
    told = [json.loads(x) for x in re.findall(r"\[rank \d+\] ({.*})", done.stdout)]
    assert [one["host_of"] for one in told] == [[0, 1, 0, 1]] * 4
    assert len({one["bits"] for one in told}) == 1
    slice_bytes = 4 * 16384 // 4
    hops = 2 * (4 - 1)
    assert sum(one["tcp"] for one in told) == crossing * hops * slice_bytes
    assert sum(one["shm"] for one in told) == (4 - crossing) * hops * slice_bytes


@deadline(30)
def test_an_order_that_is_none_is_refused_on_every_rank(tmp_path):
    code = "from tfdist.core import world; world.start()"
    words = ["-np", "2", sys.executable, "-c", code]
    done = run(tmp_path, *words, TFDIST_RING_ORDER="0,0")
    assert done.code != 0
    ends = r"\[rank [01]\] \[tfdist\] this rank ends with the same CoreError"
    message = (
        r"\[rank [01]\] .*TFDIST_RING_ORDER: expected topology, rank, or each of the "
        r'ranks 0 to 1 once.*; got "0,0"'
    )
    assert len(re.findall(f"{message}|{ends}", done.stderr)) == 2
    assert re.search(message, done.stderr)
