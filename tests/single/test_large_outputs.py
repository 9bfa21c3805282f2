"""Large outputs lie in large pages where the system gives them to who asks."""

import re
from pathlib import Path

import pytest
import tensorflow as tf

import tfdist

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE_BYTES = 32 << 20


@pytest.fixture(autouse=True, scope="module")
def _initialized():
    tfdist.init()
    yield
    tfdist.shutdown()


def asked_for(address):
    """Whether somebody has asked for large pages where this address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            first, end = (int(bound, 16) for bound in mapping.groups())
            inside = first <= address < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping has {address:x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="a kernel without large pages")
@pytest.mark.parametrize(
    "operation", [tfdist.allreduce, tfdist.broadcast, tfdist.allgather]
)
def test_large_outputs_ask_for_large_pages(operation):
    x = tf.random.uniform([LARGE_BYTES // 4], seed=1)
    y = operation(x)
    # A view: `numpy()` would be a copy, which NumPy asks for itself.
    memory = y._numpy().ctypes.data
    assert memory != x._numpy().ctypes.data
    assert asked_for(memory + LARGE_BYTES // 2)
    tf.debugging.assert_equal(x, y)
