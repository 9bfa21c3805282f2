"""Allreduces that hide the loss of a rank, in jobs whose processes are killed.

The ranks need no TensorFlow; tests/parallel/test_hidden_failures.py has what does.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
from helpers import core_client
from helpers.deadline import deadline
from helpers.ranks import Pool

from tfdist.core import native, runtime

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def pool():
    pool = Pool(imports="core")
    yield pool
    pool.close()


def record_of(failure):
    return [failure.payload["kind"], failure.payload["rank"]]


def own_input(number):
    return np.arange(1000, dtype=np.float32) * (number + 1) + runtime.rank()


def submit(name, number, in_place):
    return core_client.submit(
        [own_input(number)], name=f"{name} {number}", in_place=in_place
    )


def end_of(number, get_pending):
    """Whether the allreduce returns its input, or the record of its error."""
    try:
        return bool(np.array_equal(get_pending().wait()[0], own_input(number)))
    except native.CoreError as error:
        return record_of(error)


def submitted_before_and_after(on):
    """Allreduces of ranks 0 and 1; rank 2 takes part in none of them."""
    core_client.barrier()
    if runtime.rank() == 2:
        time.sleep(0.3)  # the others wait by then
        os.kill(os.getpid(), signal.SIGKILL)
    kinds = list(enumerate([False, True, False]))
    with core_client.hiding(on):
        before = [submit("before", i, in_place) for i, in_place in kinds]
        ends = [end_of(i, lambda x=x: x) for i, x in enumerate(before)]
        counts = [native.take_hidden(), native.take_hidden()]
        ends += [
            end_of(i, lambda i=i, in_place=in_place: submit("after", i, in_place))
            for i, in_place in kinds
        ]
        counts.append(native.take_hidden())
    return [ends, counts, record_of(native.failure())]


@deadline(120)
@pytest.mark.parametrize("on", [pytest.param(False, marks=pytest.mark.slow), True])
def test_operations_of_a_lost_world_return_their_inputs_if_failures_are_hidden(
    pool, on
):
    found = pool.run(submitted_before_and_after, 3, on, may_die=[2])
    assert found.pop() == -signal.SIGKILL
    lost = ["rank_failed", 2]
    for ends, counts, failure in found:
        assert ends == [True if on else lost] * 6
        assert counts == ([3, 0, 3] if on else [0, 0, 0])
        assert failure == lost


def sums_until_the_end(lives_s):
    """Allreduces of 4 MB, one after the other, until one has hidden the failure."""
    inputs = np.ones(1 << 20, np.float32)
    end_s = time.monotonic() + 30
    core_client.barrier()
    if runtime.rank() == 2:
        threading.Timer(lives_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    sums = []
    with core_client.hiding(True):
        while native.take_hidden() == 0 and time.monotonic() < end_s:
            total = core_client.submit([inputs], name="sum").wait()[0]
            sums.append(np.unique(total).tolist())
    return sums


@deadline(120)
@pytest.mark.parametrize(
    "lives_s",
    [0.2, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.203, 0.207))],
)
def test_a_death_in_the_middle_of_an_operation_leaves_a_sum_or_the_input(pool, lives_s):
    found = pool.run(sums_until_the_end, 3, lives_s, may_die=[2])
    assert found.pop() == -signal.SIGKILL
    for *before, last in found:
        assert all(values == [3.0] for values in before)
        assert last == [1.0]
