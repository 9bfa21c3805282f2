"""Metrics of the ranks of an elastic fit, when the ranks change."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.callbacks._metric_table import MetricTable, rows_of_next_ranks
from tfdist.training.model_building import build_metrics
from tfdist.training.train_steps import remake_train_function

RULES = ["sum", "max", "min"]
INITIAL = np.array([0.0, -np.inf, np.inf])
ROWS = np.array([[1.0, 5.0, 2.0], [20.0, 4.0, 1.0]])


def combined(rows):
    return [rows[:, 0].sum(), rows[:, 1].max(), rows[:, 2].min()]


def test_further_ranks_begin_with_no_sample_and_change_no_metric():
    """0 would be the smallest value of all."""
    found = rows_of_next_ranks(ROWS, [0, 1, -1, -1], RULES, INITIAL)
    assert np.array_equal(found[:2], ROWS) and np.array_equal(found[2:], [INITIAL] * 2)
    assert combined(found) == combined(ROWS)


def test_the_samples_of_ranks_that_have_left_are_kept():
    found = rows_of_next_ranks(ROWS, [0], RULES, INITIAL)
    assert combined(found) == combined(ROWS)


class Smallest(keras.metrics.Metric):
    """The smallest target; it has seen none at the start."""

    tfdist_merge = {"value": "min"}

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_weight(name="value", shape=(), initializer=_infinite)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(y_true)))

    def result(self):
        return self.value.value

    def reset_state(self):
        self.value.assign(np.inf)


def _infinite(shape, dtype):
    return keras.ops.full(shape, np.inf, dtype)


def test_the_states_without_a_sample_are_those_after_a_reset():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=[Smallest()])
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    table = MetricTable(model, "metrics")
    assert np.inf in [float(value) for value in table.empty_snapshot().values]


def test_a_step_exchanges_the_states_that_it_has_changed():
    tfdist.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=[Smallest()])
    build_metrics(model, (tf.TensorSpec((2, 2)), tf.TensorSpec((2, 1))))
    table = MetricTable(model, "metrics")
    remake_train_function(model, table.with_exchange)
    targets = [[[5.0], [7.0]], [[2.0], [3.0]]]
    for target in targets:
        logs = model.train_function(iter([(np.ones((2, 2)), np.array(target))]))
        logs = table.take_from(logs, generation=3)
        assert set(logs) == {"loss", "smallest"} and table.generation == 3
        own = table._own_states()
        assert np.array_equal(table.rows, [own])
        assert np.min(target) in own.numpy()


def test_a_step_without_an_exchange_is_followed_by_one():
    tfdist.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=[Smallest()])
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    table = MetricTable(model, "metrics")
    logs = table.take_from({"loss": 1.0}, generation=2)
    assert logs == {"loss": 1.0} and np.array_equal(table.rows, [table._own_states()])


class WithoutMetrics(keras.Sequential):
    """A model whose custom steps compute their own numbers."""

    @property
    def metrics(self):
        return []

    def train_step(self, data):
        return {"loss": 0.0, **super().train_step(data)}


def test_a_model_may_have_no_metrics():
    tfdist.init()
    model = WithoutMetrics([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    data = (np.ones((4, 2)), np.ones((4, 1)))
    train = tfdist.data.global_batches(data, global_batch=2)
    model.fit(train, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
    table = MetricTable(model, "metrics")
    table.exchange(generation=1)
    table.regroup(table.plain_rows(), [0, -1], generation=2)
    table.assign(1)
    assert table.snapshot(0).values == [] and table.plain_rows().shape == (2, 0)
