"""A stop on one rank stops all, at the end of the same step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

STEPS, EPOCHS = 3, 2


def tiny_model(optimizer=None, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.0625)
    model.compile(
        tfdist.DistributedOptimizer(optimizer), "mse", jit_compile=False, **options
    )
    return model


def own_data(steps=STEPS, rank=None):
    """One sample a step, small integers, different on every rank."""
    rng = np.random.default_rng(100 + (tfdist.rank() if rank is None else rank))
    x = rng.integers(-2, 3, (steps, 2)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(1)


class StopAt(keras.callbacks.Callback):
    """Stops one rank at one step, or at the end of an epoch (step None)."""

    def __init__(self):
        super().__init__()
        self.rank, self.epoch, self.step = -1, 0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._stop(batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop(None)

    def _stop(self, step):
        if (tfdist.rank(), self.now, step) == (self.rank, self.epoch, self.step):
            self.model.stop_training = True


def hundred_fits():
    """The step at which each fit ended, for changing ranks, steps and hooks."""
    model = tiny_model()
    data = own_data()
    stop = StopAt()
    callbacks = [stop, tfdist.callbacks.StopTogether()]
    ended = []
    for number in range(100):
        stop.rank = number % tfdist.size()
        stop.epoch = number // 2 % EPOCHS  # with the rank and the step: all 16
        stop.step = [*range(STEPS), None][number // 4 % (STEPS + 1)]
        before = int(model.optimizer.iterations)
        history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        steps = int(model.optimizer.iterations) - before
        done = STEPS if stop.step is None else stop.step + 1
        ended.append([steps, stop.epoch * STEPS + done, len(history.epoch)])
    return ended, [v.numpy() for v in model.variables]


@pytest.mark.slow
def test_a_stop_on_one_rank_stops_all_at_the_same_step_in_100_of_100_fits():
    ranks = run_ranks(hundred_fits, 2, env={"TFDIST_TIMEOUT_S": "20"}, timeout_s=100)
    for ended, weights in ranks:
        assert len(ended) == 100
        assert [steps for steps, _, _ in ended] == [wanted for _, wanted, _ in ended]
        assert ended == ranks[0][0]
        for a, b in zip(weights[:2], ranks[0][1][:2], strict=True):
            np.testing.assert_array_equal(a, b)


def stop_in_an_execution(where):
    model = tiny_model(steps_per_execution=2)
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            if where == "batch" and tfdist.rank() == 1 and batch == 3:
                self.model.stop_training = True

        def on_test_end(self, logs=None):
            if where == "validation" and tfdist.rank() == 1:
                self.model.stop_training = True

    model.fit(
        own_data(6),
        epochs=2,
        verbose=0,
        validation_data=own_data(2),
        callbacks=[Stop(), tfdist.callbacks.StopTogether()],
    )
    return seen


@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("batch", [1, 3]),
        pytest.param("validation", [1, 3, 5], marks=pytest.mark.slow),
    ],
)
def test_with_several_steps_in_an_execution_all_stop_after_the_same_one(where, steps):
    assert run_ranks(stop_in_an_execution, 2, where) == [steps, steps]


def nan_on_rank_1(raises):
    x = np.ones((6, 2), "float32")
    y = np.ones((6, 1), "float32")
    if tfdist.rank() == 1:
        y[3] = np.nan
    model = tiny_model()
    callback = keras.callbacks.TerminateOnNaN(raise_error=raises)
    together = [] if raises else [tfdist.callbacks.StopTogether()]
    try:
        model.fit(
            x,
            y,
            batch_size=1,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=[tfdist.callbacks.BroadcastInitialState(), callback, *together],
        )
    except RuntimeError as error:
        tfdist.core.native.abort(
            f"RuntimeError: {error}"
        )  # as the hook of a program does
        return [str(error)[:30], int(model.optimizer.iterations)]
    except tf.errors.OpError as error:
        return [str(tfdist.errors.from_tf(error).record.cause)[:44]]
    return int(model.optimizer.iterations)


def test_terminate_on_nan_on_one_rank_stops_all_at_the_step_of_the_nan():
    assert run_ranks(nan_on_rank_1, 2, False, timeout_s=40) == [4, 4]


def test_terminate_on_nan_that_raises_ends_the_other_ranks_too():
    others, own = run_ranks(nan_on_rank_1, 2, True, timeout_s=40)
    assert own == ["NaN or Inf loss encountered at", 4]
    assert others == ["RuntimeError: NaN or Inf loss encountered at"]


def different_numbers_of_steps():
    model = tiny_model()
    try:
        model.fit(
            own_data(4 - tfdist.rank()),
            epochs=2,
            verbose=0,
            callbacks=[tfdist.callbacks.StopTogether()],
        )
    except tf.errors.OpError as error:
        return type(tfdist.errors.from_tf(error)).__name__
    return ""


@pytest.mark.slow  # of the same kind: test_deadlock.py
def test_different_numbers_of_steps_end_in_an_error_before_the_deadline():
    results = run_ranks(different_numbers_of_steps, 2, timeout_s=40)
    assert results == ["MismatchError"] * 2
