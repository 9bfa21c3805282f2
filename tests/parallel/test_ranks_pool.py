"""The pool of worker processes itself: it must tell what happened, and recover."""

import os
import sys
import time
import types

import numpy as np
import pytest
from helpers import ranks
from helpers.ranks import Pool, RankError, RanksHungError, run_ranks

import tfdist


def place(*args):
    return [tfdist.rank(), tfdist.size(), os.getpid(), *args]


def test_each_rank_is_a_process_of_its_own_that_lives_on():
    first = run_ranks(place, 2, 1.5, "text", {"key": [1, None]})
    assert [row[:2] for row in first] == [[0, 2], [1, 2]]
    assert all(row[3:] == [1.5, "text", {"key": [1, None]}] for row in first)
    again = run_ranks(place, 2)
    assert [row[2] for row in again] == [row[2] for row in first]


def doubled(array):
    return array * 2


def test_arrays_travel_both_ways():
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    (result,) = run_ranks(doubled, 1, array)
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, array * 2)


def environment():
    return {k: v for k, v in os.environ.items() if k.startswith("TFDIST_")}


def test_variables_of_one_call_do_not_reach_the_next():
    (seen,) = run_ranks(environment, 1, env={"TFDIST_SPIN_US": "7"})
    assert seen["TFDIST_SPIN_US"] == "7"
    (seen,) = run_ranks(environment, 1)
    assert sorted(seen) == ["TFDIST_JOB_ID", "TFDIST_RANK", "TFDIST_SIZE"]


def one_fails():
    if tfdist.rank() == 1:
        raise ValueError("the first to fail")
    tfdist.barrier()


def test_the_traceback_of_the_first_failing_rank_is_shown():
    with pytest.raises(RankError) as caught:
        run_ranks(one_fails, 3)
    message = str(caught.value)
    assert message.startswith("rank 1 failed first")
    assert 'raise ValueError("the first to fail")' in message
    assert "rank 0 then" in message
    assert [row[0] for row in run_ranks(place, 3)] == [0, 1, 2]


def takes_long_to_clear():
    if tfdist.rank() == 1:
        utils = types.SimpleNamespace(clear_session=lambda: time.sleep(60))
        sys.modules["keras"] = types.SimpleNamespace(utils=utils)
    return os.getpid()


def test_a_worker_that_takes_long_to_clear_is_replaced(monkeypatch):
    monkeypatch.setattr(ranks, "CLEAR_TIMEOUT_S", 0.3)
    pool = Pool(imports="core")
    try:
        before = pool.run(takes_long_to_clear, 2)
        after = [row[2] for row in pool.run(place, 2)]
        assert after[0] == before[0] and after[1] != before[1]
    finally:
        pool.close()


def one_hangs():
    while tfdist.rank() == 1:
        time.sleep(0.05)


def test_ranks_that_hang_are_killed_and_their_stacks_shown():
    pool = Pool(imports="core")  # four starts of workers
    try:
        before = pool.run(place, 2)
        with pytest.raises(RanksHungError) as caught:
            pool.run(one_hangs, 2, timeout_s=1.0)
        message = str(caught.value)
        assert "ranks [1] did not end within 3 s" in message
        assert "in one_hangs" in message
        after = pool.run(place, 2)
        assert [row[0] for row in after] == [0, 1]
        assert after[1][2] != before[1][2]
    finally:
        pool.close()
