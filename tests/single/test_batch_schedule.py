"""BatchSchedule: epochs, steps and samples of a batch that grows."""

import itertools

import numpy as np
import pytest

from tfdist.data import BatchSchedule, epoch_order, global_batches, samples_of_step

TOTAL = 22
GROWING = BatchSchedule({0: 4, 2: 7, 3: 11})
STEPS = [5, 5, 3, 2, 2]  # of the epochs


def test_the_batch_is_that_of_the_latest_change():
    assert [GROWING.batch_of(epoch) for epoch in range(5)] == [4, 4, 7, 11, 11]
    assert BatchSchedule({3: 2, 0: 1}).batches == {0: 1, 3: 2}


def test_steps_are_counted_over_all_epochs():
    before = [GROWING.steps_before(epoch, total=TOTAL) for epoch in range(6)]
    assert before == [0, *itertools.accumulate(STEPS)]
    places = [(e, s) for e, steps in enumerate(STEPS) for s in range(steps)]
    found = [GROWING.place_of(step, total=TOTAL) for step in range(sum(STEPS))]
    assert found == places
    assert GROWING.place_of(1017, total=TOTAL) == (3 + 1004 // 2, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_sample_is_used_once_in_an_epoch_across_the_changes(size):
    options = {"global_batch": GROWING, "seed": 5, "size": size}
    steps = iter(range(sum(STEPS)))
    for epoch, count in enumerate(STEPS):
        used = [
            samples_of_step(TOTAL, step=step, rank=rank, **options)
            for step in itertools.islice(steps, count)
            for rank in range(size)
        ]
        batch = GROWING.batch_of(epoch)
        order = epoch_order(TOTAL, seed=5, epoch=epoch)[: count * batch]
        np.testing.assert_array_equal(np.concatenate(used), order)


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ({}, ValueError, "a global batch for epoch 0"),
        ({1: 4}, ValueError, "a global batch for epoch 0"),
        ({0: 0}, ValueError, "global_batch"),
        ({0: 4, -1: 4}, ValueError, "epoch"),
        ({0: 4.0}, TypeError, "global_batch"),
        ([(0, 4)], TypeError, "expected a dict"),
    ],
)
def test_wrong_batches_are_refused(batches, error, words):
    with pytest.raises(error, match=words):
        BatchSchedule(batches)


def test_there_have_to_be_samples_for_the_largest_batch():
    for call in (
        lambda: global_batches(np.arange(10), global_batch=GROWING),
        lambda: GROWING.place_of(0, total=10),
        lambda: samples_of_step(
            10, global_batch=GROWING, seed=0, step=0, rank=0, size=1
        ),
    ):
        with pytest.raises(ValueError, match=r"10 samples|of samples\), got 11"):
            call()


def test_without_the_callback_a_dataset_says_what_it_needs():
    data = global_batches(np.arange(TOTAL), global_batch=GROWING)
    with pytest.raises(
        Exception, match=r"BatchSchedule need tfdist\.callbacks\.Elastic"
    ):
        next(iter(data))
