"""Keras's own callbacks on several ranks: right, or refused before the first step."""

import os

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

EPOCHS = 6


def model_and_data():
    """Data that differ so much that ranks would decide differently on their own."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.25))
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(50 + tfdist.rank())
    x = rng.normal(size=(12, 2)).astype("float32")
    y = rng.normal(size=(12, 1)).astype("float32") * (1 + 3 * tfdist.rank())
    return model, x, y


def fit(callbacks, epochs=EPOCHS):
    """The model after training, and the rate in each epoch."""
    model, x, y = model_and_data()
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                rates.append(float(self.model.optimizer.learning_rate))

    model.fit(
        x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[Rates(), *callbacks]
    )
    return model, rates


def everything(model):
    return [v.numpy() for v in model.weights + model.optimizer.variables]


def same_on_all(results):
    for own in results:
        for a, b in zip(own, results[0], strict=True):
            np.testing.assert_array_equal(a, b)


def start():
    return [tfdist.callbacks.BroadcastInitialState(), tfdist.callbacks.MetricAverage()]


# ---- refused before the first step


def bad_lists(folder):
    """The lists that are refused, with the words of the refusal."""
    k, t = keras.callbacks, tfdist.callbacks
    rank = tfdist.rank()
    b = t.BroadcastInitialState
    path = os.path.join(folder, "never")
    only_0 = [k.ReduceLROnPlateau("loss")] if rank == 0 else []

    class Mine(k.EarlyStopping):
        pass

    return {
        "EarlyStopping decides on the metrics of one rank": [b(), k.EarlyStopping()],
        "Mine decides on the metrics of one rank": [b(), Mine(), t.MetricAverage()],
        "ReduceLROnPlateau decides on": [b(), k.ReduceLROnPlateau(), t.MetricAverage()],
        "[] on rank 1": [*start(), *only_0],
        "[EarlyStopping(patience=1)] on rank 0 and [EarlyStopping(patience=2)]": [
            *start(),
            k.EarlyStopping(patience=1 + rank),
        ],
        "[LearningRateScheduler] on rank 0": [
            b(),
            *([k.LearningRateScheduler(lambda epoch: 0.5)] if rank == 0 else []),
        ],
        "[SwapEMAWeights] on rank 0": [b()] + [k.SwapEMAWeights()] * (rank == 0),
        "StopTogether() at the end": [b(), k.TerminateOnNaN()],
        "Move it after TerminateOnNaN": [b(), t.StopTogether(), k.TerminateOnNaN()],
        "RankZeroOnly(CSVLogger(...))": [b(), k.CSVLogger(path)],
        "RankZeroOnly(TensorBoard(...))": [b(), k.TensorBoard(path)],
        "Checkpoint(...), or": [b(), k.ModelCheckpoint(path + ".keras")],
        "RankZeroOnly(RemoteMonitor(...))": [
            b(),
            k.RemoteMonitor("http://localhost:1"),
        ],
        "RankZeroOnly(keras.callbacks.BackupAndRestore": [
            b(),
            k.BackupAndRestore(path + str(rank)),
        ],
        "on rank 0 and [BroadcastInitialState] on rank 1": [b()]
        + [t.MetricAverage()] * (rank == 0),
        "[BroadcastInitialState(root=0)] on rank 0 and": [b(root=rank)],
    }


def refusals(folder):
    found = []
    model, x, y = model_and_data()
    for words, callbacks in bad_lists(folder).items():
        text = "nothing"
        try:
            model.fit(x, y, epochs=1, verbose=0, callbacks=callbacks)
        except (ValueError, tfdist.MismatchError) as error:
            text = f"{type(error).__name__}: {error}"
        found.append([words, text, int(model.optimizer.iterations)])
    try:
        model.fit(x, y, epochs=1 + tfdist.rank(), verbose=0, callbacks=start())
    except tfdist.MismatchError as error:
        found.append(
            ["got rank 0: 1; rank 1: 2", str(error), int(model.optimizer.iterations)]
        )
    return found


def test_lists_that_would_let_ranks_differ_are_refused_before_the_first_step(tmp_path):
    ranks = run_ranks(refusals, 2, str(tmp_path), env={"TFDIST_TIMEOUT_S": "15"})
    assert ranks[0] == ranks[1]  # the same words on every rank
    assert len(ranks[0]) == 17
    for words, text, steps in ranks[0]:
        assert words in text, (words, text)
        assert steps == 0


# ---- right


def stopped_early():
    k = keras.callbacks
    stop = k.EarlyStopping("loss", min_delta=0.2, restore_best_weights=True)
    best = []

    class Keep(k.Callback):
        def on_epoch_end(self, epoch, logs=None):
            best.append([v.numpy() for v in self.model.trainable_variables])

    model, rates = fit([*start(), Keep(), stop], epochs=40)
    assert 1 < len(rates) < 40 and stop.best_epoch < len(rates) - 1
    for now, then in zip(model.trainable_variables, best[stop.best_epoch], strict=True):
        np.testing.assert_array_equal(now, then)
    return [np.array(rates), *everything(model)]


def test_early_stopping_after_the_average_stops_and_restores_alike():
    same_on_all(run_ranks(stopped_early, 2))


def reduced_rates():
    k = keras.callbacks
    plateau = k.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5)
    model, rates = fit([*start(), plateau])
    assert rates[-1] < rates[0]
    return [np.array(rates), *everything(model)]


def test_the_rates_of_a_plateau_are_those_of_all_ranks():
    same_on_all(run_ranks(reduced_rates, 2))


def scheduled_rates():
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model, rates = fit([*start(), schedule])
    assert rates == [0.25 / 2 ** (epoch + 1) for epoch in range(EPOCHS)]
    return everything(model)


@pytest.mark.slow
def test_the_rates_of_a_scheduler_are_those_of_all_ranks():
    same_on_all(run_ranks(scheduled_rates, 2))


def different_rates():
    half = tfdist.rank() * 0.125
    calls = []
    schedule = keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.25 + (half if epoch == 2 else 0)
    )
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: calls.append(batch)
    )
    try:
        fit([*start(), schedule, seen])
    except tfdist.MismatchError as error:
        return [str(error), len(calls), tfdist.allgather_object(1)]
    return []


def test_a_rate_that_differs_is_an_error_before_the_step_that_would_use_it():
    for message, steps, later in run_ranks(different_rates, 2):
        assert "rank 0: epoch 3, learning rate 0.25" in message
        assert "rank 1: epoch 3, learning rate 0.375" in message
        assert steps == 6  # two epochs of three
        assert later == [1, 1]  # the ranks are still connected


def own_places(folder):
    k = keras.callbacks
    own = os.path.join(folder, str(tfdist.rank()))
    os.mkdir(own)
    callbacks = [
        *([k.ProgbarLogger()] if tfdist.rank() == 0 else []),
        k.History(),
        k.CSVLogger(os.path.join(own, "log.csv")),
        k.ModelCheckpoint(os.path.join(own, "m-{epoch}.keras")),
        k.LambdaCallback(
            on_epoch_end=lambda epoch, logs: open(
                os.path.join(own, f"{epoch}-{logs['loss']}"), "x"
            ).close()
        ),
    ]
    model, _ = fit([*start(), *callbacks], epochs=2)
    return [sorted(os.listdir(own)), len(everything(model))]


def test_a_place_for_each_rank_is_accepted_and_has_the_averaged_metrics(tmp_path):
    ranks = run_ranks(own_places, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert {"log.csv", "m-1.keras", "m-2.keras"} <= set(ranks[0][0])
    logs = [(tmp_path / rank / "log.csv").read_text() for rank in "01"]
    assert logs[0] == logs[1]


def averages_swapped():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5)
    model.compile(tfdist.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    _, x, y = model_and_data()
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[*start(), keras.callbacks.SwapEMAWeights()],
    )
    return everything(model)


def test_swapped_averages_are_those_of_all_ranks():
    same_on_all(run_ranks(averages_swapped, 2))
