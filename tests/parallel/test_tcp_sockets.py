"""How many sockets a link has changes no bit: whole worlds without TensorFlow."""

import sys

import pytest
from helpers import launcher

# Each rank: averages of numbers whose sums are rounded; prints a digest of all results.
PROGRAM = """
import hashlib
import numpy as np
from tfdist.core import native, runtime, world
from helpers import core_client
world.start(timeout_s=20)
numbers = np.random.default_rng(runtime.rank())
digest = hashlib.sha256()
for count in (1, 301, 40_000, 1_000_003):
    values = numbers.normal(size=count).astype(np.float32)
    for turn in range(3):
        name = f"{count}/{turn}"
        total = core_client.allreduce(values, name=name, op=core_client.AVERAGE)
        digest.update(total.tobytes())
late = native.counters().get("overlay", {"adopted": 0})["adopted"]
print("late links", late, "digest", digest.hexdigest())
world.shutdown()
"""


def digests(tmp_path, ranks, sockets, **settings):
    """The digests of the ranks, each once; how many links the ranks got late."""
    done = launcher.run(
        tmp_path,
        "-np",
        str(ranks),
        sys.executable,
        "-c",
        PROGRAM,
        timeout_s=60,
        TFDIST_TRANSPORT="tcp",
        TFDIST_TCP_SOCKETS=str(sockets),
        **settings,
    )
    assert done.code == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "digest" in line]
    assert len(lines) == ranks, done.stdout
    late = sum(int(line.split()[-3]) for line in lines)
    return {line.split()[-1] for line in lines}, late


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(3, {}, marks=pytest.mark.slow),
        # Links open when data needs them; control messages are relayed.
        (6, {"TFDIST_MESH_RANKS": "2", "TFDIST_ALLREDUCE_ALGORITHM": "pairwise"}),
    ],
)
def test_several_sockets_have_the_bits_of_one_on_all_ranks(tmp_path, ranks, settings):
    one, _ = digests(tmp_path, ranks, 1, **settings)
    several, late = digests(tmp_path, ranks, 4, **settings)
    assert len(one) == 1
    assert several == one
    assert late == (6 if settings else 0)  # ranks 0 and 3, 1 and 4, 2 and 5


def test_another_number_of_sockets_on_one_rank_is_named(tmp_path):
    program = (
        "import os; os.environ['TFDIST_TCP_SOCKETS'] = os.environ['TFDIST_RANK'] + '1';"
        "from tfdist.core import world; world.start(timeout_s=20)"
    )
    done = launcher.run(
        tmp_path, "-np", "2", sys.executable, "-c", program, timeout_s=60
    )
    assert done.code != 0
    assert "TFDIST_TCP_SOCKETS: 1 on rank 0; 11 on rank 1" in done.stdout + done.stderr
