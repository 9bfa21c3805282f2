"""Which ranks are slower than the others, from the time of their own work. Pure."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks import _progress_text
from tfdist.core.timeline.stragglers import (
    SlowRank,
    Standing,
    Times,
    compare,
    expected_work,
    is_slow,
    steps_to_next,
)


def follow(rows, *, factor=1.5, seconds=30.0, elapsed_s=5.0, samples=None):
    """Compares the work in each row; returns the slow ranks after each of them."""
    standings, found = {}, []
    for row in rows:
        times = {
            rank: Times(elapsed_s, work_s, samples[rank] if samples else 1.0)
            for rank, work_s in enumerate(row)
            if work_s is not None
        }
        standings = compare(standings, times, factor=factor, seconds=seconds)
        found.append([rank for rank, one in standings.items() if one.is_slow])
    return found, standings


# ---- the median ----


@pytest.mark.parametrize(
    ("work", "median"),
    [([3], 3), ([2, 9], 2), ([9, 2], 2), ([4, 3, 9], 4), ([1, 9, 8, 2], 2)],
)
def test_the_median_is_the_lower_one_in_the_middle(work, median):
    times = {rank: Times(10.0, float(w)) for rank, w in enumerate(work)}
    assert expected_work(times) == dict.fromkeys(range(len(work)), float(median))


def test_nothing_is_expected_of_no_rank():
    assert expected_work({}) == {}


def test_a_single_rank_is_never_slow():
    assert follow([[5.0]] * 20)[0][-1] == []


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster_one():
    assert follow([[2.0, 4.8]] * 20)[0][-1] == [1]
    assert follow([[2.0, 2.9]] * 20)[0][-1] == []


def test_half_of_the_ranks_can_be_slow():
    assert follow([[4.8, 2.0, 4.7, 2.0]] * 20)[0][-1] == [0, 2]


def test_a_slow_majority_is_the_median():
    """Then nobody is slow, as nobody knows that the fast rank is the normal one."""
    assert follow([[4.8, 2.0, 4.7]] * 20)[0][-1] == []


# ---- how long ----


def test_a_rank_is_named_after_the_time_and_only_then():
    found, standings = follow([[2.0, 2.0, 4.5]] * 8)
    # The first comparison begins the time, six more are 30 s.
    assert found == [[]] * 6 + [[2]] * 2
    assert standings[2].factor == 2.25 and standings[2].slow_s == 40.0


def test_a_rank_is_slow_until_it_is_as_fast_as_the_others_for_as_long():
    slow, even = [2.0, 4.5], [2.0, 2.1]
    found, standings = follow([slow] * 7 + [even] * 6 + [slow] + [even] * 7 + [even])
    assert found[6] == [1] and found[19] == [1]
    assert found[20] == [] and found[21] == []
    assert standings[1] == Standing()


def test_the_numbers_are_known_when_a_rank_is_not_slow_any_more():
    _, standings = follow([[2.0, 4.0]] * 7 + [[2.0, 2.0]] * 7)
    assert not standings[1].is_slow
    assert standings[1].factor == 2.0 and standings[1].slow_s == 35.0


def test_a_pause_of_any_length_names_nobody():
    standings = {}
    for pause_s in (0.0, 300.0, 0.0, 0.0):  # rank 0 saves a file
        times = {0: Times(5 + pause_s, 4 + pause_s), 1: Times(5 + pause_s, 4.0)}
        standings = compare(standings, times, factor=1.5, seconds=30.0)
        assert not standings[0].is_slow


def test_steps_that_last_longer_than_the_time_need_two_comparisons():
    found, _ = follow([[30.0, 58.0]] * 3, elapsed_s=60.0)
    assert found == [[], [1], [1]]


def test_noise_names_nobody():
    rows = np.random.default_rng(3).gamma(8.0, 0.3, size=(2000, 8))  # 35 % per value
    found, _ = follow(rows)
    assert not any(found)


def test_a_slow_rank_is_found_in_noise():
    rows = np.random.default_rng(3).normal(2.0, 0.1, size=(40, 8))
    rows[:, 5] *= 2.2
    found, _ = follow(rows)
    assert found[5:8] == [[], [5], [5]] and found[-1] == [5]


# ---- who is slow ----


def test_a_rank_with_more_samples_is_not_slow():
    rows, samples = [[2.0, 4.4, 2.0]] * 10, [32, 64, 32]
    assert follow(rows)[0][-1] == [1]
    assert follow(rows, samples=samples)[0][-1] == []
    assert follow([[2.0, 4.4, 4.0]] * 10, samples=samples)[0][-1] == [2]


def test_a_rank_that_costs_the_others_little_is_not_slow():
    """Steps that mostly communicate: twice as much work is 4 % of the time."""
    assert not is_slow(Times(5.0, 0.4), 0.2, factor=1.5)
    assert is_slow(Times(5.0, 1.0), 0.5, factor=1.5)


def test_nobody_is_slow_in_no_time():
    assert not is_slow(Times(0.0, 0.0), 0.0, factor=1.5)


def test_a_rank_whose_data_have_ended_keeps_its_standing():
    found, _ = follow([[2.0, 4.5, 2.0]] * 7 + [[2.0, None, 2.0]] * 9)
    assert found[-1] == [1]


# ---- when ----


def test_the_ranks_compare_every_five_seconds_or_six_times_in_the_time():
    assert steps_to_next(100, 5.0, 60.0) == 100
    assert steps_to_next(100, 5.0, 6.0) == 20
    assert steps_to_next(1, 0.001, 30.0) == 2  # at most twice as many
    assert steps_to_next(8, 0.0, 30.0) == 16
    assert steps_to_next(500, 500.0, 30.0) == 5
    assert steps_to_next(1, 1000.0, 30.0) == 1


# ---- the callback ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1}, "factor to be a number above 1, got 1"),
        ({"factor": "2"}, "factor to be a number above 1, got '2'"),
        ({"seconds": 0}, "seconds to be a number above 0, got 0"),
        ({"seconds": float("inf")}, "seconds to be a number above 0, got inf"),
        ({"replace": "yes"}, "replace=True or False, got 'yes'"),
        ({"batch": 0}, "batch to be a number above 0, got 0"),
        ({"batch": True}, "batch to be a number above 0, got True"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdist.callbacks.Stragglers(**arguments)


def test_only_an_elastic_job_replaces_ranks():
    tfdist.init()
    state = tfdist.elastic.State(tf.Variable(0.0))
    steps = state.steps(1, stragglers=tfdist.callbacks.Stragglers(replace=True))
    with pytest.raises(ValueError, match="this job is not elastic"):
        next(steps)


def test_only_a_loop_that_can_hand_over_replaces_ranks(monkeypatch):
    tfdist.init()
    monkeypatch.setenv("TFDIST_MEMBER", "0")
    callback = tfdist.callbacks.Stragglers(replace=True)
    callback.on_train_begin()
    with pytest.raises(NotImplementedError, match="hand over"):
        callback.on_train_batch_begin(0)


def test_one_rank_is_compared_with_nobody(caplog):
    tfdist.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    watch = tfdist.callbacks.Stragglers(seconds=1e-6)
    x = np.ones((64, 2), "float32")
    model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=[watch])
    assert not [one for one in caplog.messages if "slower" in one]


# ---- the line of progress ----


def test_the_line_names_the_slowest_rank():
    slow = SlowRank(3, "b", 2.13, 41.0), SlowRank(1, "a", 1.6, 90.0)
    status = _progress_text.Status(1, 9, 5, 10, {"loss": 1.0}, stragglers=slow)
    words = "rank 3 (host b) has been 2.1 times slower than the median for 41s"
    assert _progress_text.line(status).endswith(f"{words} (and 1 more)")
    assert "rank 3 2.1x slower" in _progress_text.line(status, 60)
    assert "loss" in _progress_text.line(status, 30)
    assert "slower" not in _progress_text.line(status, 30)


# ---- a loop over the steps of a State ----


class Observer:
    """Notes what a loop tells it."""

    def __init__(self):
        self.calls = []

    def on_loop_begin(self):
        self.calls.append("begin")

    def on_commit(self, committed):
        self.calls.append(committed)


def test_a_loop_calls_its_observer_after_each_commit():
    tfdist.init()
    observer = Observer()
    state = tfdist.elastic.State(tf.Variable(0.0))
    for _ in state.steps(5, start=2, stragglers=observer):
        assert state.commit()
    assert observer.calls == ["begin", 3, 4, 5]
