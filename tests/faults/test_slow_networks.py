"""Lines between hosts that are shaped to a rate: what the kernel does there."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deadline import deadline

from tfdist.core import native

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from networks import Contender, algorithm, fleets
from shaped_hosts import shaped_hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

HALVES = "halving_doubling"  # sends to ranks at a distance, then waits for them
BYTES = 256 << 10
CALLS = 400


def delayed_acknowledgements(network):
    """How often a host has acknowledged something only when its timer ended."""
    total = 0
    for host in range(len(network.spaces)):
        command = [*network.inside(host), "cat", "/proc/net/netstat"]
        text = subprocess.run(command, check=True, capture_output=True, text=True)
        names, numbers = (line.split() for line in text.stdout.splitlines()[:2])
        total += int(numbers[names.index("DelayedACKs")])
    return total


@deadline(90)
def test_the_kernel_keeps_no_packet_back_until_others_are_acknowledged():
    one = Contender(HALVES, (0, 1, 2, 3), algorithm(HALVES))
    with shaped_hosts(4, 1000.0) as network, fleets(network, [one]) as (fleet,):
        fleet.measure(BYTES, 20)
        before = delayed_acknowledgements(network)
        fleet.measure(BYTES, CALLS)
        assert delayed_acknowledgements(network) - before < CALLS // 40
