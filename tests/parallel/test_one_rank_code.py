"""A collective in code that one rank runs alone is refused at once, on all ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import BroadcastInitialState, Checkpoint, RankZeroOnly

SECONDS = 20.0  # of 300 until the deadline; with a fit on a busy machine


@keras.saving.register_keras_serializable("tests")
class Asks(keras.layers.Dense):
    """Its configuration holds the number of ranks, which it asks for together."""

    def get_config(self):
        tfdist.allreduce(1.0)
        return super().get_config()


def made(layer=keras.layers.Dense):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), layer(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25))
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(50 + tfdist.rank())
    x = rng.normal(size=(8, 2)).astype("float32")
    return model, x, x[:, :1]


def fit_with(hook, call):
    """Runs `call(model, x, y)` in a hook of a callback in RankZeroOnly."""
    model, x, y = made()
    own = keras.callbacks.LambdaCallback(**{hook: lambda *_, **__: call(model, x, y)})
    callbacks = [BroadcastInitialState(), RankZeroOnly(own)]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)


def inner_fit(model, x, y):
    other, _, _ = made()
    other.fit(x, y, verbose=0, callbacks=[BroadcastInitialState()])


def inner_steps(model, x, y):
    other, _, _ = made()
    other.train_on_batch(x, y)


def saved(path):
    model, x, y = made(Asks)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Checkpoint(path)])


def chosen_set(model, x, y):
    """A process set of this rank alone is allowed: nobody waits for it."""
    tfdist.allreduce(tf.constant(1.0), process_set=tfdist.process_sets()[0])


CALLS = {
    "evaluate": (
        "on_epoch_end",
        lambda m, x, y: tfdist.evaluate(m, x, y, verbose=0),
        "tfdist.evaluate",
    ),
    "allreduce": (
        "on_epoch_begin",
        lambda m, x, y: tfdist.allreduce(1.0),
        "tfdist.allreduce",
    ),
    "repeated": (
        "on_train_end",
        lambda m, x, y: tfdist.allreduce(tf.constant(1.0), name="loss"),
        "tfdist.allreduce",
    ),
    "fit": ("on_epoch_end", inner_fit, "BroadcastInitialState at the start of fit"),
    "train_on_batch": ("on_epoch_end", inner_steps, "model.train_on_batch"),
    "step": (
        "on_train_batch_end",
        lambda m, x, y: tfdist.broadcast_object(1),
        "tfdist.broadcast_object",
    ),
    "set": (
        "on_epoch_end",
        lambda m, x, y: tfdist.add_process_set([0, 1]),
        "tfdist.add_process_set",
    ),
    "join": ("on_epoch_end", lambda m, x, y: tfdist.join(), "tfdist.join"),
}


def refused(which):
    hook, call, _ = CALLS[which]
    return outcome(lambda: fit_with(hook, call))


# These come to a place that another one comes to as well.
ALIKE = ("evaluate", "repeated", "train_on_batch", "set")


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(which, marks=[pytest.mark.slow] if which in ALIKE else [])
        for which in CALLS
    ],
)
def test_a_collective_inside_rank_zero_only_names_the_call_and_the_place(which):
    hook, _, called = CALLS[which]
    for rank, own in enumerate(run_ranks(refused, 2, which)):
        assert own["class"] == ["MismatchError", "RankFailedError"][rank]
        assert called in own["message"], own
        assert f"inside RankZeroOnly(LambdaCallback).{hook}, " in own["message"]
        assert "which only rank 0 runs" in own["message"]
        assert own["seconds"] < SECONDS


def refused_in_save(path):
    return outcome(lambda: saved(path))


def test_a_collective_in_get_config_at_a_save_of_rank_zero_is_refused(tmp_path):
    for rank, own in enumerate(run_ranks(refused_in_save, 3, f"{tmp_path}/m.keras")):
        assert own["class"] == ("RankFailedError" if rank else "MismatchError")
        assert "tfdist.allreduce (test_one_rank_code.py:" in own["message"]
        assert "the save of tfdist.callbacks.Checkpoint, which only" in own["message"]
        assert "and ranks 1, 2 would not call it" in own["message"]
        assert own["seconds"] < SECONDS


def allowed():
    tfdist.add_process_set([0])
    fit_with("on_epoch_end", chosen_set)
    return tfdist.rank()


def test_a_rank_may_call_what_needs_no_rank_that_does_not_run_it():
    assert run_ranks(allowed, 2) == [0, 1]
