"""The callbacks of `horovod.keras` in one process: rates, the best model, commits."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.collectives.local_variables import identity
from tfdist.horovod import _warnings
from tfdist.horovod._keras.callbacks import slots_of
from tfdist.horovod._keras.rates import warmup_multiplier
from tfdist.training.optimizer import is_distributed

X = np.ones((4, 2), "float32")
Y = np.zeros((4, 1), "float32")


@pytest.fixture(autouse=True)
def world():
    keras.utils.clear_session()
    hvd.init()
    yield
    tfdist.shutdown()


def trained(optimizer, loss="mse", epochs=1, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss, **options)
    model.fit(X, Y, epochs=epochs, verbose=0)
    return model


def test_slots_of_a_variable_are_found():
    first, second = keras.Variable([1.0]), keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.Adam(0.5, use_ema=True, gradient_accumulation_steps=2)
    optimizer.build([first, second])
    found = slots_of(optimizer, [identity(second)])
    assert len(found) == 4 and {v.shape for v in found} == {(2,)}


def test_devices_are_told_once(caplog):
    _warnings.reset()
    with caplog.at_level(logging.WARNING, "tfdist"):
        for _ in range(2):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), device_dense="/gpu:0")
            hvd.callbacks.MetricAverageCallback(device="/cpu:0")
    assert [r.getMessage().split(" ")[0] for r in caplog.records] == [
        "device_dense='/gpu:0'",
        "device='/cpu:0'",
    ]


def test_the_warm_up_is_the_formula_of_the_documentation():
    for size in (1, 2, 4, 8):
        for warmup in (1, 3, 5):
            assert warmup_multiplier(0, warmup, size) == pytest.approx(1 / size)
            assert warmup_multiplier(warmup, warmup, size) == pytest.approx(1)
            middle = (size - 1) / warmup * (warmup / 2) + 1
            assert warmup_multiplier(warmup / 2, warmup, size) * size == middle


def rates_with(callback, epochs=4):
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    history = model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback])
    return history.history["lr"]


def test_calls_of_horovod_before_0_21_take_the_rate_of_the_optimizer(caplog):
    """As most scripts for ImageNet have them; a number is a constant factor there."""
    _warnings.reset()
    schedule = hvd.callbacks.LearningRateScheduleCallback
    warmup = hvd.callbacks.LearningRateWarmupCallback
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    callbacks = [
        warmup(warmup_epochs=1, verbose=0),
        schedule(start_epoch=1, end_epoch=2, multiplier=1.0),
        schedule(start_epoch=2, end_epoch=4, multiplier=0.5),
        schedule(lambda epoch: 0.25, start_epoch=4),
    ]
    model = trained(optimizer)
    with caplog.at_level(logging.WARNING, "tfdist"):
        found = model.fit(X, Y, epochs=5, verbose=0, callbacks=callbacks).history["lr"]
        assert found == [0.5, 0.5, 0.25, 0.25, 0.125]
        # A second fit goes on from the same rate, and not from what is left of it.
        assert model.fit(X, Y, verbose=0, callbacks=callbacks).history["lr"] == [0.5]
        warmup(5)
    texts = [r.getMessage() for r in caplog.records]
    assert [text.split("(")[0] for text in texts] == [
        "LearningRateWarmupCallback",
        "LearningRateScheduleCallback",
        "LearningRateWarmupCallback",
    ]
    assert "Write initial_lr=" in texts[0] and "write warmup_epochs=5" in texts[2]
    with pytest.raises(ValueError, match="warmup_epochs=5, momentum_correction=True"):
        warmup(5, True)
    with pytest.raises(TypeError, match="multiplier"):
        schedule(0.5)


def test_a_number_as_multiplier_decays_from_the_first_epoch_on(caplog):
    _warnings.reset()
    schedule = hvd.callbacks.LearningRateScheduleCallback
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert rates_with(schedule(2.0, 0.5, start_epoch=1)) == [1.0, 2.0, 1.0, 0.5]
        assert rates_with(schedule(2.0, 1.0, start_epoch=1)) == [1.0, 2.0, 2.0, 2.0]
        assert rates_with(schedule(2.0, 0.5, 1, 2)) == [1.0, 2.0, 2.0, 2.0]
    texts = [r.getMessage() for r in caplog.records if "multiplier" in r.getMessage()]
    assert len(texts) == 1 and "write multiplier=lambda epoch: 0.5" in texts[0]


def test_a_function_is_asked_per_epoch_or_per_batch():
    schedule = hvd.callbacks.LearningRateScheduleCallback
    asked = []

    def multiplier(epoch):
        asked.append(epoch)
        return 0.5

    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    for staircase in (True, False):
        model.fit(
            *(X, Y),
            batch_size=2,
            epochs=2,
            verbose=0,
            callbacks=[schedule(1.0, multiplier, staircase=staircase)],
        )
    assert asked == [0, 1, 0.0, 0.5, 1.0, 1.5]


def test_rates_that_cannot_be_set_are_refused():
    schedule = hvd.callbacks.LearningRateScheduleCallback
    with pytest.raises(ValueError, match="`initial_lr` is required"):
        schedule(None, 1.0)
    cosine = keras.optimizers.schedules.CosineDecay(0.5, 10)
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(cosine)))
    with pytest.raises(TypeError, match="Give the optimizer a number"):
        model.fit(X, Y, verbose=0, callbacks=[schedule(0.5, 1.0)])
    warmup = hvd.callbacks.LearningRateWarmupCallback(1.0)

    def forever():
        while True:
            yield X, Y

    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    data = tf.data.Dataset.from_generator(
        forever,
        output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1))),
    )
    with pytest.raises(ValueError, match="Could not autodetect"):
        model.fit(data.take(2), verbose=0, callbacks=[warmup])


@pytest.mark.slow
def test_the_end_of_the_warm_up_is_said(capsys):
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=1, verbose=1)
    rates_with(warmup, epochs=2)
    told = capsys.readouterr().out
    assert told.count("Epoch 1: finished gradual learning rate warmup to 0.25.") == 1


def test_the_best_model_is_saved_where_it_is_said_later(tmp_path):
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="no file to write to"):
        model.fit(X, Y, verbose=0, callbacks=[best])
    best.filepath = str(tmp_path / "best.keras")
    model.fit(X, Y, verbose=0, callbacks=[best])
    assert is_distributed(hvd.load_model(best.filepath).optimizer)
    weights = hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=True)
    weights.filepath = str(tmp_path / "best.weights.h5")
    model.fit(X, Y, verbose=0, callbacks=[weights])
    model.load_weights(weights.filepath)


@pytest.mark.slow
def test_commits_are_counted():
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        hvd.elastic.CommitStateCallback(state, batches_per_commit=0)
    commits = []
    state.commit = lambda: commits.append(int(model.optimizer.iterations))
    callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=3)
    model.fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    assert commits == [1 + n for n in (3, 4, 7, 8)]
