"""Rank 0 is killed inside a callback; a killed training goes on from its backup."""

import os
import signal
import time

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import BroadcastInitialState, MetricAverage, RankZeroOnly

EPOCHS, STEPS = 5, 3


def model_and_data():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3 + tfdist.rank())  # the broadcast makes them equal
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.0625))
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(50 + tfdist.rank())
    x = rng.normal(size=(4 * STEPS, 2)).astype("float32")
    return model, tfdist.data.shard(
        (np.tile(x, (2, 1)), np.tile(x, (2, 1))[:, :1]), batch_size=4
    )


class Dies(keras.callbacks.Callback):
    """Ends one rank in the middle of an epoch: rank 0 is killed, another raises."""

    def __init__(self, rank, epoch):
        super().__init__()
        self.rank, self.epoch, self.now = rank, epoch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (tfdist.rank(), self.now, batch) == (self.rank, self.epoch, 1):
            if self.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            tfdist.core.native.abort(
                "ValueError: bad sample"
            )  # as an uncaught one does
            raise ValueError("bad sample")


def trained(folder, victim, order):
    """The epochs trained, and everything that was trained."""
    model, data = model_and_data()
    epochs = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch)
    )
    first = [BroadcastInitialState(), RankZeroOnly(_backup(folder))]
    if order == "backup first":
        first.reverse()
    callbacks = [*first, MetricAverage(), seen, Dies(victim, 2)]
    try:
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except Exception as error:
        known = tfdist.errors.from_tf(error) or error
        return [type(known).__name__, epochs]
    values = [v.numpy() for v in model.weights + model.optimizer.variables]
    return [epochs, int(model.optimizer.iterations), values]


def _backup(folder):
    return keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))


@pytest.mark.parametrize(
    ("victim", "order"),
    [
        (0, "backup last"),
        pytest.param(1, "backup first", marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_goes_on_from_the_backup_with_the_same_bits(
    tmp_path, victim, order
):
    (tmp_path / "whole").mkdir()
    whole = run_ranks(trained, 2, str(tmp_path / "whole"), -1, "backup last")
    killed = run_ranks(
        trained, 2, str(tmp_path), victim, order, may_die=[0], timeout_s=60
    )
    failed = [-signal.SIGKILL, ["ValueError", [0, 1, 2]]]
    assert killed[victim] == failed[victim]
    assert killed[1 - victim] == ["RankFailedError", [0, 1, 2]]
    assert (tmp_path / "backup").is_dir()
    resumed = run_ranks(trained, 2, str(tmp_path), -1, order, timeout_s=60)
    for (epochs, iterations, values), (_, wanted, expected) in zip(
        resumed, whole, strict=True
    ):
        assert epochs == [2, 3, 4]
        assert iterations == wanted == EPOCHS * STEPS
        for a, b in zip(values, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not (tmp_path / "backup").exists()  # finished: rank 0 has removed it


def dies_in_a_callback():
    began = time.monotonic()
    model, data = model_and_data()
    callbacks = [BroadcastInitialState(), RankZeroOnly(Dies(0, 1))]
    try:
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    except Exception as error:
        known = tfdist.errors.from_tf(error)
        return [type(known).__name__, known.record.rank, time.monotonic() - began]
    return []


# In `make test`: the test above kills rank 0 there too.
@pytest.mark.slow
def test_a_rank_0_that_dies_in_a_callback_ends_the_others():
    died, other = run_ranks(
        dies_in_a_callback,
        2,
        env={"TFDIST_TIMEOUT_S": "60"},
        timeout_s=50,
        may_die=[0],
    )
    assert died == -signal.SIGKILL
    assert other[:2] == ["RankFailedError", 0]
    assert other[2] < 30  # not at the deadline
