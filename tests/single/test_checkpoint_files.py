"""What is in the files of Checkpoint, and where they may be."""

import json
import re
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from helpers import recipe
from helpers.checkpoints import checkpoints_in

import tfdist
from tfdist.callbacks import BroadcastInitialState, Checkpoint
from tfdist.callbacks._atomic_file import atomic_write
from tfdist.collectives import all_ranks
from tfdist.layers.seed_generators import states_of_generators

MEMBER = "tfdist/seed_generators.json"


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


def noisy(*rates):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dropout(rate) for rate in rates]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def saved(model, path):
    ones = np.ones((4, 4))
    callbacks = [Checkpoint(path)]
    model.fit(ones, ones[:, :1], batch_size=2, verbose=0, callbacks=callbacks)
    return path


def states(model):
    return [np.array(state).tolist() for state in states_of_generators(model)]


def test_generators_go_on_and_keras_loads_the_file(tmp_path):
    model = noisy(0.5, 0.25)
    path = saved(model, tmp_path / "m.keras")
    assert [drawn for _, drawn in states(model)] == [2, 2]
    other = noisy(0.5, 0.25)
    tfdist.restore(other, path)
    assert states(other) == states(model)
    loaded = keras.models.load_model(path, compile=False)
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rates", [(0.5,), (0.0, 0.0)])
def test_other_generators_stay_as_they_are_and_that_is_said(rates, tmp_path, caplog):
    path = saved(noisy(0.5, 0.25), tmp_path / "m.keras")
    model = noisy(*rates)
    before = states(model)
    tfdist.restore(model, path)
    assert states(model) == before
    words = f"states of 2 random number generators .* has {len(before)} generators"
    assert re.search(words, caplog.messages[-1])


def test_a_file_of_keras_alone_says_nothing_of_generators(tmp_path):
    model = noisy(0.5)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "m.keras")
    before = states(model)
    tfdist.restore(model, tmp_path / "m.keras")
    assert states(model) == before


@pytest.mark.parametrize("text", ["{", "7", json.dumps([[1]])])
def test_damaged_states_are_an_error_before_anything_is_read(text, tmp_path):
    model = noisy(0.5)
    path = saved(model, tmp_path / "m.keras")
    whole = tmp_path / "whole.keras"
    path.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, text if name == MEMBER else old.read(name))
    other = noisy(0.5)
    before = [np.array(v) for v in other.weights]
    with pytest.raises(ValueError, match="Use an older checkpoint"):
        tfdist.restore(other, path)
    for a, b in zip(before, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_remote_place_is_refused_and_not_made_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"mounted folder, got 'gs://bucket/m\.keras'"):
        Checkpoint("gs://bucket/m.keras")
    with pytest.raises(FileNotFoundError, match="Copy it to this machine first"):
        tfdist.restore(noisy(0.5), "gs://bucket/m.keras")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["checkpoint", "rank_zero_only"])
def test_the_first_error_stays_when_a_rank_that_was_told_ends(name, monkeypatch):
    def has_ended(*unused, **also_unused):
        raise tfdist.errors.RankFailedError("rank 1 failed", None)

    def is_full(*unused, **also_unused):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(all_ranks, "broadcast_object", has_ended)
    model = noisy(0.5)
    if name == "checkpoint":
        callback = Checkpoint("none.keras")
        monkeypatch.setattr(callback, "_save_if_better", is_full)
    else:
        log = keras.callbacks.LambdaCallback(on_epoch_end=is_full)
        callback = tfdist.callbacks.RankZeroOnly(log)
    callback.set_model(model)
    with pytest.raises(OSError, match="No space left"):
        callback.on_epoch_end(0, {})


def test_a_full_disk_is_named(tmp_path):
    def is_full(path):
        raise OSError(28, "No space left on device")

    path = tmp_path / "m.keras"
    with pytest.raises(OSError, match="No space left") as caught:
        atomic_write(path, is_full)
    assert (caught.value.errno, caught.value.filename) == (28, str(path))


def test_checkpoints_within_an_epoch_do_not_replace_those_of_epochs(tmp_path):
    module = recipe.script()
    flags.FLAGS(["resnet50_imagenet.py", "--notensorboard", "--keep=2"])
    flags.FLAGS.checkpoint_steps = 2
    plan = module.Plan(8, tfdist.data.BatchSchedule({0: 2}), 2, 0, 3, 0)
    model = noisy(0.5)
    [count] = [
        callback
        for callback in module.make_callbacks(plan, tmp_path)
        if isinstance(callback, module.CountSteps)
    ]
    count.set_params({"steps": 8})
    count.set_model(model)
    for epoch in range(3):
        count.on_epoch_begin(epoch)
        for batch in range(8):
            count.on_train_batch_end(batch, {})
            count.on_train_end()  # waits for the file
    kept = checkpoints_in(tmp_path / "checkpoints")
    assert kept == [f"step-{step:08d}.keras" for step in (8, 10, 12)]


class TwoOptimizers(keras.Model):
    """A model that is trained by optimizers in attributes, as a GAN is."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled_with = compiled
        self.layer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.compile(*compiled, jit_compile=False)
        for name in ("first", "second"):
            optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
            optimizer.build(self.trainable_variables)
            setattr(self, name, optimizer)

    def get_config(self):
        return {"compiled": self.compiled_with}

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        for optimizer in (self.first, self.second, self.second):
            ones = [tf.ones_like(v) for v in self.trainable_variables]
            optimizer.apply(ones, self.trainable_variables)
        return {"loss": tf.zeros(())}


@pytest.mark.parametrize("compiled", [[None], []], ids=["none", "unused default"])
def test_steps_are_the_updates_of_the_first_optimizer_in_use(compiled, tmp_path):
    x = np.ones((6, 4))
    callbacks = [
        BroadcastInitialState(),
        Checkpoint(tmp_path / "{step}.keras", save_freq=1),
    ]
    TwoOptimizers(compiled).fit(x, batch_size=2, verbose=0, callbacks=callbacks)
    assert checkpoints_in(tmp_path) == ["1.keras", "2.keras", "3.keras"]
    assert tfdist.restore(TwoOptimizers(compiled), tmp_path) == 3
