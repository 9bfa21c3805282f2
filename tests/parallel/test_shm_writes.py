"""How shared memory is written changes no bit: whole worlds without TensorFlow."""

import sys

import pytest
from helpers import launcher

# Each rank: averages of numbers whose sums are rounded, three times each; prints a
# digest of all results.
PROGRAM = """
import hashlib
import numpy as np
from tfdist.core import runtime, world
from helpers import core_client
world.start(timeout_s=20)
numbers = np.random.default_rng(runtime.rank())
digest = hashlib.sha256()
for dtype in (np.float32, np.float16):
    for count in (301, 40_000, 1_000_003):
        values = numbers.normal(size=count).astype(dtype)
        for turn in range(3):
            name = f"{np.dtype(dtype).name}/{count}/{turn}"
            total = core_client.allreduce(values, name=name, op=core_client.AVERAGE)
            digest.update(total.tobytes())
print("digest", digest.hexdigest())
world.shutdown()
"""


def digests(tmp_path, ranks, stores):
    """What the ranks print, each once."""
    program = (sys.executable, "-c", PROGRAM)
    done = launcher.run(
        tmp_path,
        "-np",
        str(ranks),
        *program,
        timeout_s=60,
        TFDIST_SHM_WRITES=stores,
    )
    assert done.code == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "digest" in line]
    assert len(lines) == ranks, done.stdout
    return {line.split()[-1] for line in lines}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_ways_have_the_same_bits_on_all_ranks(tmp_path, ranks):
    found = {way: digests(tmp_path, ranks, way) for way in ("cached", "nontemporal")}
    assert len(found["cached"]) == 1
    assert found["nontemporal"] == found["cached"] == digests(tmp_path, ranks, "auto")


def test_another_way_is_refused(tmp_path):
    done = launcher.run(
        tmp_path,
        "-np",
        "2",
        sys.executable,
        "-c",
        PROGRAM,
        timeout_s=60,
        TFDIST_SHM_WRITES="slow",
    )
    assert done.code != 0
    assert "TFDIST_SHM_WRITES" in done.stderr
    assert "nontemporal" in done.stderr
