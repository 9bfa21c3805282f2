"""Checkpoints that a thread writes have the values of the step at which they were due.

The campaign (tests/campaign/checkpoints.py) tries the same much more often.
"""

import logging
import os
import shutil
import threading

import h5py
import keras
import numpy as np
import pytest
from campaign import checkpoint_program, checkpoints
from helpers.checkpoints import checkpoints_in

import tfdist
from tfdist.callbacks import Checkpoint
from tfdist.callbacks._weights_file import save_weights
from tfdist.core import native, runtime


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


def saver(path, model, **options):
    checkpoint = Checkpoint(path, background=True, **options)
    checkpoint.set_model(model)
    return checkpoint


class Held(Checkpoint):
    """The thread waits before it writes the first file."""

    def __init__(self, path, **options):
        super().__init__(path, background=True, **options)
        self.may_write = threading.Event()

    def _write(self, path, model):
        assert self.may_write.wait(20)
        super()._write(path, model)


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_has_the_values_of_its_step_and_keras_loads_it(ending, tmp_path):
    model = checkpoint_program.build()
    weights_only = ending != ".keras"
    path = tmp_path / f"{{step}}{ending}"
    checkpoint = Held(path, save_weights_only=weights_only)
    checkpoint.set_model(model)
    checkpoint_program.set_step(model, 7)
    checkpoint.save_now({}, None)
    checkpoint_program.set_step(model, 8)
    assert checkpoint_program.wrong_with(model, 8) == ""  # the model is not changed
    checkpoint.may_write.set()
    checkpoint.wait_until_finished()
    assert checkpoints_in(tmp_path) == [f"7{ending}"]
    if weights_only:
        model.load_weights(tmp_path / "7.weights.h5")
        assert checkpoint_program.wrong_with(model, 7) == ""
    else:
        loaded = keras.models.load_model(tmp_path / "7.keras")
        assert checkpoint_program.wrong_with(loaded, 7) == ""


def test_a_file_is_written_while_the_ranks_connect_again(tmp_path, monkeypatch):
    model = checkpoint_program.build()
    checkpoint = Held(tmp_path / "{step}.keras")
    checkpoint.set_model(model)
    for step in (7, 8):
        checkpoint_program.set_step(model, step)
        checkpoint.save_now({}, None)
    with monkeypatch.context() as reconnecting:
        reconnecting.setattr(runtime.state, "topology", None)
        checkpoint.may_write.set()
        assert checkpoint._writer.wait(20)
    assert checkpoints_in(tmp_path) == ["7.keras", "8.keras"]


def test_it_is_the_file_that_is_saved_in_the_foreground(tmp_path):
    x = np.ones((8, checkpoint_program.UNITS))
    model = checkpoint_program.build()
    callbacks = [
        Checkpoint(tmp_path / "foreground-{epoch}.keras"),
        Checkpoint(tmp_path / "background-{epoch}.keras", background=True),
    ]
    model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert len(checkpoints_in(tmp_path)) == 4  # complete when fit returns
    for epoch in (1, 2):
        states = []
        for kind in ("foreground", "background"):
            step = tfdist.restore(model, tmp_path / f"{kind}-{epoch}.keras")
            states.append([step, *(v.numpy() for v in model.variables)])
            states[-1] += [v.numpy() for v in model.optimizer.variables]
        assert all(map(np.array_equal, *states))


def test_memory_is_used_again_when_the_file_is_written_and_freed_at_the_end(tmp_path):
    model = checkpoint_program.build()
    checkpoint = Held(tmp_path / "{step}.keras")
    checkpoint.set_model(model)
    addresses = []
    for step in (1, 2, 3, 4):
        checkpoint_program.set_step(model, step)
        checkpoint.save_now({}, None)
        if step == 1:  # while this file waits, its values must stay
            continue
        checkpoint.may_write.set()
        assert checkpoint._writer.wait(20)
        arrays = [array for _, array in checkpoint._snapshots._unused.values()]
        addresses.append([array.ctypes.data for array in arrays])
    assert addresses[0] == addresses[1] == addresses[2] != []
    for step in (1, 2, 3, 4):
        loaded = keras.models.load_model(tmp_path / f"{step}.keras")
        assert checkpoint_program.wrong_with(loaded, step) == ""
    checkpoint.on_train_end()
    assert checkpoint._snapshots._unused == {}


@pytest.mark.parametrize(
    "recovers", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_full_disk_is_a_warning_and_training_goes_on(recovers, tmp_path, caplog):
    class Full(Checkpoint):
        attempts = 0

        def _write(self, path, model):
            self.attempts += 1
            if self.attempts == 2 or (self.attempts > 2 and not recovers):
                path.write_bytes(b"half of a mod")
                raise OSError(28, "No space left on device")
            super()._write(path, model)

    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            assert full._writer.wait(20)

    x = np.ones((4, checkpoint_program.UNITS))
    full = Full(tmp_path / "{epoch}.keras", keep=1, background=True)
    model = checkpoint_program.build()
    # The last write of `fit` fails, and is repeated at its end.
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[full, Slow()])
    words = f"{tmp_path}/2.keras was not saved: OSError: [Errno 28] No space left"
    assert [words in message for message in caplog.messages] == [True] * (2 - recovers)
    assert checkpoints_in(tmp_path) == [f"{1 + recovers}.keras"]
    assert tfdist.restore(model, tmp_path) == 1 + recovers


def test_the_best_model_is_kept_for_a_disk_that_is_full_for_a_while(tmp_path):
    is_full = [True]

    class Full(Checkpoint):
        def _write(self, path, model):
            if is_full[0]:
                raise OSError(28, "No space left on device")
            super()._write(path, model)

    model = checkpoint_program.build()
    best = Full(
        tmp_path / "best.keras",
        background=True,
        save_best_only=True,
        monitor="loss",
        mode="min",
    )
    best.set_model(model)
    for step, loss in ((1, 0.5), (2, 0.7)):
        checkpoint_program.set_step(model, step)
        best.save_now({"loss": loss}, None)
        assert best._writer.wait(20)
        is_full[0] = False
    assert checkpoint_program.restored(model, tmp_path) == (1, "")


@pytest.mark.parametrize("name", ["best.keras", "best-{epoch}.keras"])
def test_a_new_rank_0_knows_which_file_its_predecessor_has_not_written(
    name, tmp_path, caplog
):
    model = checkpoint_program.build()

    class Lost(Checkpoint):
        """Its process is killed while it writes a second file."""

        def _save(self, path, model, epoch):
            if path.exists() or not name.startswith("best.") and epoch == 1:
                (tmp_path / f".partial-01234567-{path.name}").touch()
            else:
                super()._save(path, model, epoch)

    options = {"save_best_only": True, "monitor": "loss", "background": True}
    lost, other = (cls(tmp_path / name, **options) for cls in (Lost, Checkpoint))
    for epoch, loss in ((0, 0.5), (1, 0.3)):
        for one in (lost, other):
            one.set_model(model)
            one.on_epoch_begin(epoch)
        lost.on_epoch_end(epoch, {"loss": loss})
        lost.wait_until_finished()
        other._latest, other._best = lost._latest, lost._best
        other.on_ranks_changed(becomes_first=True)  # rank 0 has left, and still writes
        assert other._best == loss
        other.on_first_rank_lost()
        assert len(caplog.messages) == epoch
    other.on_epoch_begin(2)
    other.on_epoch_end(2, {"loss": 0.4})
    other.wait_until_finished()
    assert other._best == 0.4
    assert list(tmp_path.glob(".partial-*")) != []  # its process may be alive


@pytest.mark.parametrize("name", ["latest.keras", "x/latest.keras"])
def test_a_complete_file_or_an_unknown_one_is_not_reported_as_lost(
    name, tmp_path, caplog
):
    model = checkpoint_program.build()
    (tmp_path / ".partial-01234567-latest.keras").touch()  # of a killed job
    checkpoint = saver(tmp_path / name, model)
    checkpoint.save_now({}, None)
    checkpoint.wait_until_finished()
    if name.startswith("x"):
        shutil.rmtree(tmp_path / "x")
        (tmp_path / "x").touch()
    checkpoint.on_first_rank_lost()
    assert caplog.messages == []


def test_a_variable_in_no_list_is_part_of_the_next_file(tmp_path, caplog):
    class Part(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(2,), name="seen")
            self.hidden = keras.Variable([1.0, 2.0], name="hidden")
            self._untrack_variable(self.hidden)

        def call(self, x):
            return x

        def save_own_variables(self, store):
            store["seen"], store["hidden"] = self.seen, self.hidden

        def load_own_variables(self, store):
            self.hidden.assign(store["hidden"])

    model = keras.Sequential([keras.Input((2,)), Part(), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    checkpoint = saver(tmp_path / "{epoch}.weights.h5", model, save_weights_only=True)
    checkpoint.save_now({}, None)
    checkpoint.wait_until_finished()
    assert checkpoints_in(tmp_path) == []
    assert (
        "in no list of the model, and was not copied; the next save will include it"
        in caplog.text
    )
    model.layers[0].hidden.assign([3.0, 4.0])
    checkpoint.save_now({}, None)
    model.layers[0].hidden.assign([5.0, 6.0])
    checkpoint.wait_until_finished()
    model.load_weights(tmp_path / "1.weights.h5")
    assert model.layers[0].hidden.numpy().tolist() == [3.0, 4.0]


def test_a_snapshot_from_before_an_aborted_step_is_written(tmp_path, monkeypatch):
    model = checkpoint_program.build()
    checkpoint = Held(tmp_path / "{step}.keras")
    x = np.ones((4, checkpoint_program.UNITS))
    checkpoint.may_write.set()
    model.fit(x, x[:, :1], verbose=0, callbacks=[checkpoint])
    checkpoint.may_write.clear()
    checkpoint_program.set_step(model, 7)
    checkpoint.save_now({}, None)
    monkeypatch.setattr(native, "failure", lambda: native.CoreError(10, "rank 1 died"))
    monkeypatch.setattr(native, "good_steps", lambda: 7)
    with pytest.raises(RuntimeError, match="last good step is 7"):
        checkpoint.save_now({}, None)
    checkpoint.may_write.set()
    assert checkpoint._writer.wait(20)
    assert checkpoints_in(tmp_path) == ["1.keras", "7.keras"]


def test_a_disk_that_does_not_answer_does_not_hold_the_end_of_fit(tmp_path, caplog):
    model = checkpoint_program.build()
    checkpoint = Held(tmp_path / "m.keras", timeout_s=0.5)
    x = np.ones((4, checkpoint_program.UNITS))
    model.fit(x, x[:, :1], verbose=0, callbacks=[checkpoint])
    assert "is still being written after 0.25 s" in caplog.text
    checkpoint.may_write.set()
    assert checkpoint._writer.wait(20)
    assert checkpoints_in(tmp_path) == ["m.keras"]


@pytest.mark.parametrize(
    ("saved_by_keras", "moments"),
    [(False, 1 + 6 + 6), pytest.param(True, 4 + 6 + 6, id="no checksum at first")],
)
def test_a_file_that_is_replaced_has_its_checksum_at_each_moment(
    saved_by_keras, moments, tmp_path, monkeypatch
):
    """A kill between any two changes of the folder leaves a loadable file."""
    path = tmp_path / "latest.keras"
    model = checkpoint_program.build()
    if saved_by_keras:
        model.save(path)
    replace, found = os.replace, []

    def observed(source, target):
        if path.exists():
            found.append(tfdist.newest_checkpoint(path))
        replace(source, target)
        if path.exists():
            found.append(tfdist.newest_checkpoint(path))

    monkeypatch.setattr(os, "replace", observed)
    checkpoint = Checkpoint(path)
    checkpoint.set_model(model)
    for step in (1, 2, 3):
        checkpoint_program.set_step(model, step)
        checkpoint.save_now({}, None)
    assert found == [path] * moments
    assert (tmp_path / "latest.keras.sha256").exists()


@pytest.mark.parametrize("background", [False, True])
def test_names_of_files_that_were_removed_are_forgotten(background, tmp_path):
    class Small(Checkpoint):
        may_write = threading.Event()

        def _write(self, path, model):
            assert self.may_write.wait(20)
            path.write_bytes(b"")

    model = checkpoint_program.build()
    checkpoint = Small(tmp_path / "{step}.keras", keep=2, background=background)
    checkpoint.set_model(model)
    for step in range(1, 21):
        # In the background, the first file is written while others replace each other.
        if step == 5 or not background:
            checkpoint.may_write.set()
        checkpoint_program.set_step(model, step)
        checkpoint.save_now({}, None)
        if step >= 5:
            assert checkpoint._writer.wait(20)
    assert checkpoints_in(tmp_path) == ["19.keras", "20.keras"]
    assert len(checkpoint._names) <= 4


@pytest.fixture
def quiet():
    logger = logging.getLogger("tfdist")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_while_it_saves_goes_on(seed, quiet):
    assert checkpoints.chain(seed, 2)["faults"] == []


def test_a_file_that_cannot_grow_is_not_saved_and_the_next_is(tmp_path):
    model = checkpoint_program.build()
    size = checkpoints.size_of_file(model)
    for place, limit in enumerate((0, 1024, size // 2, size - 1, size)):
        folder = tmp_path / f"{place}"
        folder.mkdir()
        row = checkpoints.limited(model, folder, limit)
        assert row == {"size": limit, "failed": limit < size, "faults": []}


@pytest.mark.slow
def test_a_full_disk_keeps_the_earlier_files():
    rows = checkpoints.disks_apart(0.06)
    if rows is None:
        pytest.skip("no file systems can be mounted here")
    assert {row["name"] for row in rows} == set(checkpoints.NAMES)
    assert sum(row["failures"] for row in rows) > 0
    assert [row["faults"] for row in rows] == [[]] * len(rows)


def test_weights_are_those_that_keras_saves(tmp_path):
    model = checkpoint_program.build()
    checkpoint_program.set_step(model, 7)
    model.save_weights(tmp_path / "keras.weights.h5")
    save_weights(model, tmp_path / "ours.weights.h5")
    files = []
    for name in ("keras", "ours"):
        found = {}
        with h5py.File(tmp_path / f"{name}.weights.h5") as file:
            file.visititems(
                lambda path, item, found=found: found.update(
                    {path: item[()].tolist() if isinstance(item, h5py.Dataset) else 0}
                )
            )
        files.append(found)
    assert files[0] == files[1] and len(files[0]) > 20


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_flipped_bits_are_found(count, quiet):
    assert checkpoints.flips(0, count)["faults"] == []


def test_the_checkpoint_program_finds_a_wrong_bit(tmp_path):
    model = checkpoint_program.build()
    checkpoint_program.set_step(model, 3)
    assert checkpoint_program.wrong_with(model, 3) == ""
    kernel = model.layers[0].kernel
    values = np.array(kernel)
    values[0, 0] = np.nextafter(values[0, 0], np.float32(9))
    kernel.assign(values)
    assert "does not have the values of step 3" in checkpoint_program.wrong_with(
        model, 3
    )
