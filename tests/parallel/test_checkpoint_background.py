"""Checkpoints in the background, on several ranks: all stay in step, whatever fails."""

import os
import shutil
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.checkpoints import checkpoints_in
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import BroadcastInitialState, Checkpoint, StopOnSignal

STEPS = 4


def compiled():
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dropout(0.5), keras.layers.Dense(3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    adam = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(adam, "mse", jit_compile=False)
    return model


def fit(model, *callbacks, epochs=3):
    x = np.random.default_rng(tfdist.rank()).normal(size=(2 * STEPS, 2))
    model.fit(
        x,
        x[:, :1],
        batch_size=2,
        epochs=epochs,
        verbose=0,
        callbacks=[BroadcastInitialState(), *callbacks],
    )


def state(model):
    return [v.numpy().tolist() for v in model.weights + model.optimizer.variables]


def saved_and_restored(folder):
    model = compiled()
    path = os.path.join(folder, "step-{step}.keras")
    fit(model, Checkpoint(path, background=True, keep=2, verbose=1))
    other = compiled()
    step = tfdist.restore(other, folder)
    return [step, state(other) == state(model), state(other)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with files, which nobody changes, and what the ranks say of it."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(saved_and_restored, 2, str(folder))


def test_all_ranks_restore_the_newest_file_after_fit(saved):
    folder, results = saved
    assert [result[:2] for result in results] == [[3 * STEPS, True]] * 2
    assert results[0][2] == results[1][2]
    assert checkpoints_in(folder) == ["step-12.keras", "step-8.keras"]


def step_of(model):
    return int(model.optimizer.iterations)


def restored(folder):
    model = compiled()
    path = folder if tfdist.rank() == 0 else "nowhere"  # rank 0 alone has the files
    return {**outcome(lambda: tfdist.restore(model, path)), "step": step_of(model)}


def test_a_damaged_file_is_skipped_with_any_number_of_ranks(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    newest = tmp_path / f"step-{3 * STEPS}.keras"
    newest.write_bytes(newest.read_bytes()[:-1])
    for ranks in (1, 3):
        results = run_ranks(restored, ranks, str(tmp_path))
        assert [result["step"] for result in results] == [2 * STEPS] * ranks
    older = tmp_path / f"step-{2 * STEPS}.keras"
    older.unlink()
    results = run_ranks(restored, 2, str(tmp_path))
    assert [result["class"] for result in results] == ["ValueError", "RankFailedError"]
    for result in results:
        assert "Expected an undamaged checkpoint, but" in result["message"]


def on_a_full_disk(folder):
    class Full(Checkpoint):
        def _write(self, path, model):
            path.write_bytes(b"half of a mod")
            raise OSError(28, "No space left on device")

    model = compiled()
    fit(model, Full(os.path.join(folder, "m.keras"), background=True))
    return [int(model.optimizer.iterations), tfdist.allgather_object(1)]


def test_a_full_disk_ends_the_training_on_no_rank(tmp_path):
    assert run_ranks(on_a_full_disk, 2, str(tmp_path)) == [[3 * STEPS, [1, 1]]] * 2
    assert checkpoints_in(tmp_path) == []


def stopped(folder):
    class Slow(Checkpoint):
        def _write(self, path, model):
            time.sleep(0.3)
            super()._write(path, model)

    def kill(batch, logs):
        if tfdist.rank() == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    model = compiled()
    path = os.path.join(folder, "step-{step}.keras")
    checkpoint = Slow(path, background=True, save_freq=1)
    listed = [keras.callbacks.LambdaCallback(on_train_batch_end=kill), checkpoint]
    try:
        fit(model, *listed, StopOnSignal(checkpoint))
    except SystemExit as exit:
        newest = Path(folder, f"step-{int(model.optimizer.iterations)}.keras")
        return [exit.code, newest.exists()]
    return None


def test_a_signal_waits_for_the_file(tmp_path):
    assert run_ranks(stopped, 2, str(tmp_path)) == [[128 + 15, True]] * 2
    assert tfdist.newest_checkpoint(tmp_path).name == "step-3.keras"
    assert checkpoints_in(tmp_path)[-1] == "step-3.keras"


def different(folder):
    background = tfdist.rank() == 0
    path = os.path.join(folder, "m.keras")
    return outcome(lambda: fit(compiled(), Checkpoint(path, background=background)))


def test_background_on_some_ranks_only_is_refused(tmp_path):
    for result in run_ranks(different, 2, str(tmp_path)):
        assert result["class"] == "MismatchError"
        assert "background" in result["message"]
