"""How long functions and callbacks with a `timeout_s` wait for a rank that is late."""

import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist

SHORT_S = 0.4
DEADLINE_S = 20.0


def a_plain_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def a_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def at_a_hook(callback, hook, *arguments):
    """Calls a hook as `fit` does; the others are at the same place, but later."""
    callback.set_model(a_model())
    callback.set_params({"epochs": 1, "steps": 1})
    callback._checked = True
    getattr(callback, hook)(*arguments)


def calls(folder):
    """Calls that wait for the other rank, by name."""
    records, rows = tfdist.data.Records, np.ones((4, 1))
    callbacks = tfdist.callbacks
    checkpoint = callbacks.Checkpoint(f"{folder}/m.keras")
    own = {"timeout_s": SHORT_S}
    return {
        "from_tfrecords": lambda: records.from_tfrecords([f"{folder}/r"], **own),
        "from_files": lambda: records.from_files([f"{folder}/r"], **own),
        "restore": lambda: tfdist.restore(a_model(), f"{folder}/saved.keras", **own),
        "evaluate": lambda: tfdist.evaluate(a_model(), rows, rows, **own),
        "predict": lambda: tfdist.predict(a_model(), rows, **own),
        "StopOnSignal": lambda: at_a_hook(
            callbacks.StopOnSignal(checkpoint, **own), "on_epoch_end", 0, {}
        ),
        "StopTogether": lambda: at_a_hook(
            callbacks.StopTogether(**own), "on_epoch_end", 0, {}
        ),
    }


def of_a_late_rank(folder):
    """Of each call of rank 0 the class of the error and the seconds until then."""
    found = {}
    for name, call in calls(folder).items():
        done = Path(folder, name)
        if tfdist.rank() == 0:
            error = outcome(call)
            found[name] = [error["class"], error["seconds"]]
            done.touch()
        deadline_s = time.monotonic() + DEADLINE_S
        while not done.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        tfdist.shutdown()
        tfdist.init()
    return found


def test_a_call_waits_as_long_as_it_is_told(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "r")) as writer:
        writer.write(b"one")
    a_plain_model().save(tmp_path / "saved.keras")
    found, _ = run_ranks(of_a_late_rank, 2, str(tmp_path), timeout_s=110)
    assert {name: error for name, (error, _) in found.items()} == dict.fromkeys(
        found, "TimeoutError"
    )
    assert all(SHORT_S <= seconds < DEADLINE_S for _, seconds in found.values())


def in_its_own_set(path):
    """Rank 0 restores alone, in a set of its own."""
    sets = [tfdist.add_process_set([rank]) for rank in range(2)]
    if tfdist.rank() == 1:
        return None
    model = a_model()
    steps = tfdist.restore(model, path, process_set=sets[0], timeout_s=DEADLINE_S)
    return [steps, *(w.numpy() for w in model.weights)]


def test_a_rank_in_a_set_of_its_own_waits_for_nobody(tmp_path):
    model = a_plain_model()
    model.save(tmp_path / "saved.keras")
    found, _ = run_ranks(in_its_own_set, 2, str(tmp_path / "saved.keras"))
    for one, saved in zip(found[1:], model.weights, strict=True):
        np.testing.assert_array_equal(one, saved.numpy())
