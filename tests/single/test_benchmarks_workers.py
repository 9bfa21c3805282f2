"""What the workers of benchmarks/peers share: exact sums, and how often they repeat."""

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest

WORKERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "workers"


def loaded(name):
    """A worker's module; they are no package, since foreign Pythons run them."""
    spec = importlib.util.spec_from_file_location(name, WORKERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exact, measuring = loaded("exact"), loaded("measuring")
meeting = loaded("meeting")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sum_of_what_all_ranks_bring_is_right(size):
    parts = [exact.brought(100, rank, shift=3) for rank in range(size)]
    exact.check(np.sum(parts, axis=0, dtype=np.float32), size, "sum", shift=3)


@pytest.mark.parametrize("elements", [1, 1000, 1 << 20, (1 << 20) + 1])
def test_memory_begins_as_that_of_tensors_does(elements):
    for array in (exact.zeros(elements), exact.brought(elements, 1)):
        assert array.ctypes.data % 64 == 0
        assert (array.size, array.dtype) == (elements, np.float32)
    assert not exact.zeros(elements).any()


def test_one_wrong_bit_ends_the_rank_with_its_place():
    found = exact.total(100, 2)
    found.view(np.uint32)[41] ^= 1
    with pytest.raises(SystemExit, match=r"case: wrong sums at \[41\]"):
        exact.check(found, 2, "case")


def test_a_sum_of_another_type_or_of_other_ranks_is_wrong():
    for wrong in (exact.total(10, 2).astype(np.float64), exact.total(10, 4)):
        with pytest.raises(SystemExit, match="wrong sums"):
            exact.check(wrong, 2, "case")


def steady(seconds, calls):
    """Repeats what always takes so long."""

    def repeat(count):
        calls.append(count)
        return [seconds] * count

    return repeat


@pytest.mark.parametrize(
    ("seconds", "count"), [(0.25e-3, 1000), (0.01, 50), (0.1, 5), (2.0, 4)]
)
def test_repetitions_fill_the_time_within_bounds(seconds, count):
    found = measuring.measure(steady(seconds, []), lambda s: s, cap_s=0.5)
    assert len(found) == count


def test_all_ranks_repeat_as_often_as_their_mean_says():
    found = measuring.measure(steady(0.1, []), lambda s: 0.05, cap_s=0.5)
    assert len(found) == 10


def test_what_is_compared_takes_turns():
    order = []
    repeats = {
        name: lambda n, name=name: order.append((name, n)) or [0.01] * n
        for name in ("op", "floor")
    }
    found = measuring.in_turns(repeats, lambda s: s, cap_s=0.5)
    assert {name: len(all_s) for name, all_s in found.items()} == {
        "op": 50,
        "floor": 50,
    }
    blocks = [entry for entry in order if entry[1] == 10]
    assert blocks == [("op", 10), ("floor", 10)] * measuring.BLOCKS


def test_nobody_leaves_a_meeting_before_the_last_has_come(tmp_path):
    told = []

    def rank(number):
        own = meeting.Meeting(tmp_path / "steps", number, 2, deadline_s=30.0)
        for step in range(50):
            told.append(step)
            own.wait()

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join(30.0)
    assert told == [step for step in range(50) for _ in range(2)]


def test_who_does_not_come_to_a_meeting_is_named(tmp_path):
    own = meeting.Meeting(tmp_path / "steps", 0, 2, deadline_s=0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 did not come within 0\.05 s"):
        own.wait()
