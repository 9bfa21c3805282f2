"""tfdist.evaluate and tfdist.predict where something is wrong: nobody waits."""

import os

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

ROWS = 37


class Undeclared(keras.metrics.Metric):
    """It does not say how its state is combined."""

    def __init__(self):
        super().__init__()
        self.most = self.add_variable((), "zeros", name="most")


ERRORS = [
    ("metric", ("RankFailedError", "KeyError"), "no such label"),
    ("undeclared", ("ValueError",), 'tfdist_merge = "sum"'),
    ("data", ("MismatchError",), "arrays of 36 samples"),
    ("order", ("MismatchError",), "with rows"),
    ("sample weights", ("MismatchError",), "'sample_weight'"),
    ("weights", ("MismatchError",), "dense/bias' differs from rank 0"),
    ("statistics", ("MismatchError",), "combine_moving_statistics(model)"),
    ("made by evaluate", ("MismatchError",), "kernel' differs from rank 0"),
    ("made by predict", ("MismatchError",), "kernel' differs from rank 0"),
    ("function", ("MismatchError",), "before the first batch"),
    ("kind", ("RankFailedError", "ValueError"), "at least one sample"),
    ("gather", ("MismatchError",), "'root' on rank 0"),
]


SOME = ("metric", "data", "weights", "made by predict", "kind", "gather")


def errors(kinds):
    """The error of each kind on this rank; the world goes on after each of them."""
    rank = tfdist.rank()
    x = np.ones((ROWS, 3), "float32")
    y = x[:, :1]
    mixed = np.arange(3.0 * ROWS, dtype="float32").reshape(ROWS, 3)

    class Fails(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if rank == 1:
                raise KeyError("no such label")

    def model(*metrics, add=0.0):
        keras.utils.clear_session()
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.weights[1].assign([add])
        model.compile(None, "mse", metrics=list(metrics), run_eagerly=True)
        return model

    def moved():
        layer = keras.layers.BatchNormalization()
        normalized = keras.Sequential([keras.Input((3,)), layer])
        layer.moving_mean.assign([float(rank == 2)] * 3)
        return normalized

    def unbuilt():
        keras.utils.clear_session()
        keras.utils.set_random_seed(rank)  # of the weights that the first batch makes
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(None, "mse", run_eagerly=True)
        return model

    calls = {
        "metric": lambda: tfdist.evaluate(model(Fails()), x, y),
        "undeclared": lambda: tfdist.evaluate(model(Undeclared()), x, y),
        "data": lambda: tfdist.evaluate(model(), x[: ROWS - rank], y[: ROWS - rank]),
        "order": lambda: tfdist.predict(model(), np.roll(mixed, rank, axis=0)),
        "sample weights": lambda: tfdist.evaluate(
            model(), x, y, sample_weight=y[:, 0] if rank == 1 else None
        ),
        "weights": lambda: tfdist.predict(model(add=float(rank == 2)), x),
        "statistics": lambda: tfdist.predict(moved(), x),
        "made by evaluate": lambda: tfdist.evaluate(unbuilt(), x, y),
        "made by predict": lambda: tfdist.predict(unbuilt(), x),
        "function": lambda: (
            tfdist.predict(model(), x) if rank else tfdist.evaluate(model(), x, y)
        ),
        "kind": lambda: tfdist.predict(model(), None if rank == 1 else x),
        "gather": lambda: tfdist.predict(model(), x, gather="all" if rank else "root"),
    }
    found = {}
    for kind in kinds:
        try:
            calls[kind]()
        except Exception as error:
            found[kind] = [type(error).__name__, str(error)]
        assert tfdist.allgather_object(rank) == [0, 1, 2]
    return found


@pytest.mark.parametrize(
    "kinds",
    [SOME, pytest.param([row[0] for row in ERRORS], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_an_error_on_one_rank_is_one_on_all_and_nobody_waits(kinds):
    results = run_ranks(errors, 3, kinds, timeout_s=40)
    for kind, names, text in [row for row in ERRORS if row[0] in kinds]:
        for rank, found in enumerate(results):
            name, message = found[kind]
            assert name == names[-1 if rank == 1 else 0], kind
            assert text in message, kind


def dies_while_evaluating():
    class Dies(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if tfdist.rank() == 1:
                os._exit(3)

    x = np.ones((3, 3), "float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(None, "mse", metrics=[Dies()], run_eagerly=True)
    try:
        tfdist.evaluate(model, x, x[:, :1], batch_size=1)
    except tfdist.RankFailedError as error:
        return error.record.rank
    return None


@pytest.mark.slow
def test_a_rank_that_dies_while_it_works_is_an_error_on_the_others():
    found = run_ranks(dies_while_evaluating, 3, timeout_s=30, may_die=[1])
    assert found == [1, 3, 1]
