"""Callbacks of models that some of the ranks train, at the same time as others."""

import csv

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import (
    BroadcastInitialState,
    Checkpoint,
    CombineMovingStatistics,
    MetricAverage,
    RankZeroOnly,
    StopTogether,
    UnevenData,
)


def train(folder, sets):
    """Each set trains a model of its own; weights, and who wrote what."""
    rank = tfdist.rank()
    made = [tfdist.add_process_set(ranks) for ranks in sets]
    own = next((one for one in made if rank in one.ranks), None)
    if own is None:
        return None
    keras.utils.set_random_seed(rank)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=own)
    model.compile(optimizer, loss="mse")
    begun = [v.numpy() for v in model.weights]
    log = keras.callbacks.CSVLogger(f"{folder}/{rank}.csv")
    x = np.random.default_rng(rank).normal(size=(4 * (rank + 1), 2))
    model.fit(
        x,
        x.sum(axis=1),
        batch_size=4,
        epochs=2,
        verbose=0,
        callbacks=[
            UnevenData(),
            BroadcastInitialState(),
            MetricAverage(),
            CombineMovingStatistics(),
            RankZeroOnly(log),
            Checkpoint(f"{folder}/{own.ranks[0]}.keras"),
            StopTogether(),
        ],
    )
    return [begun, [v.numpy() for v in model.weights]]


@pytest.mark.parametrize(
    "sets", [[[0], [1, 2]], pytest.param([[1, 2]], marks=pytest.mark.slow)]
)
def test_the_ranks_of_a_set_train_a_model_of_their_own(sets, tmp_path):
    told = run_ranks(train, 3, str(tmp_path), sets)
    begun = told[1][0]
    for a, b in zip(told[1][1], told[2][1], strict=True):
        assert a.tobytes() == b.tobytes()
    if len(sets) == 2:
        assert not np.array_equal(told[0][1][0], told[1][1][0])
    assert not np.array_equal(begun[0], told[1][1][0])
    first = [str(ranks[0]) for ranks in sets]
    assert sorted(p.stem for p in tmp_path.glob("*.csv")) == sorted(first)
    with (tmp_path / "1.csv").open() as log:
        assert len(list(csv.DictReader(log))) == 2
    saved = keras.models.load_model(tmp_path / "1.keras")
    for a, b in zip(saved.weights, told[1][1], strict=True):
        assert np.array_equal(a, b)
