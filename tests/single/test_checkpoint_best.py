"""Checkpoint(save_best_only=True): which epoch is the best, and who says so."""

from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from absl import flags
from helpers import recipe
from helpers.checkpoints import checkpoints_in

import tfdist
from tfdist.callbacks import Checkpoint
from tfdist.callbacks._metric_mode import mode_of

SEEN = [0.1, 0.5, 0.3, 0.8, 0.05]


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


def saved(monitor, metrics, folder, **options):
    """The epochs, from 1, that were saved, when `monitor` took the values of SEEN."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=metrics, jit_compile=False)
    scripted = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update({monitor: SEEN[epoch]})
    )
    best = Checkpoint(
        folder / "{epoch}.keras", monitor=monitor, save_best_only=True, **options
    )
    ones = np.ones((1, 1))
    callbacks = [scripted, best]
    model.fit(ones, ones, epochs=len(SEEN), verbose=0, callbacks=callbacks)
    return sorted(int(Path(name).stem) for name in checkpoints_in(folder))


def test_the_metric_of_that_name_says_what_is_best(tmp_path):
    metrics = [keras.metrics.BinaryAccuracy("top_1")]
    assert saved("val_top_1", metrics, tmp_path) == [1, 2, 4]


def test_a_metric_that_says_less_is_better_counts_more_than_its_name(tmp_path):
    metrics = [keras.metrics.MeanAbsoluteError("inaccuracy")]
    assert saved("inaccuracy", metrics, tmp_path) == [1, 5]


def test_the_mode_that_was_given_counts_most(tmp_path):
    metrics = [keras.metrics.BinaryAccuracy("top_1")]
    options = {"mode": "min", "initial_value_threshold": 0.07}
    assert saved("top_1", metrics, tmp_path, **options) == [5]


def validated(folder, validation_freq, monitor="val_loss"):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    ones = np.ones((1, 1))
    best = Checkpoint(
        folder / "{epoch}.keras", monitor=monitor, save_best_only=True, mode="min"
    )
    model.fit(
        *(ones, ones),
        epochs=4,
        verbose=0,
        validation_data=(ones, ones),
        validation_freq=validation_freq,
        callbacks=[best],
    )
    return [Path(name).stem for name in checkpoints_in(folder)]


@pytest.mark.parametrize(
    "validation_freq", [pytest.param(2, marks=pytest.mark.slow), [2, 4]]
)
def test_an_epoch_that_is_not_validated_saves_nothing(validation_freq, tmp_path):
    assert validated(tmp_path, validation_freq) == ["2", "4"]


def test_a_wrong_name_is_found_at_the_first_validation(tmp_path):
    with pytest.raises(ValueError, match=r"'val_loss'\], got 'val_los'"):
        validated(tmp_path, 2, "val_los")


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        *[(name, "max") for name in ("val_acc", "a_accuracy", "auc_2", "f1_macro")],
        *[(name, "max") for name in ("precision", "val_top5_recall", "val_b_score")],
        *[(name, "min") for name in ("loss", "val_loss", "val_a_loss", "a_error")],
    ],
)
def test_names_of_which_it_is_known(monitor, mode):
    score = keras.metrics.R2Score(name="score")
    error = keras.metrics.MeanSquaredError("error")
    metrics = [SimpleNamespace(metrics=[score]), error]
    model = SimpleNamespace(metrics=metrics, output_names=["a", "b"])
    assert mode_of(monitor, model) == mode


def test_the_recipe_keeps_the_best_model_also_when_it_is_resumed(tmp_path):
    keras.utils.clear_session()
    module = recipe.script()
    flags.FLAGS(["resnet50_imagenet.py", "--notensorboard"])
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    found = []
    for begin, end in ((0, 3), (3, 5)):
        plan = module.Plan(2, tfdist.data.BatchSchedule({0: 2}), 1, 0, 5, 0)
        listed = module.make_callbacks(plan, tmp_path)
        files = [c for c in listed if isinstance(c, Checkpoint)]
        [best] = [c for c in files if c.filepath.endswith("best.keras")]
        best.set_model(model)
        best._write = lambda path, _: (found.append(epoch), path.touch())  # noqa: B023
        for epoch in range(begin, end):
            best.on_epoch_begin(epoch)
            best.on_epoch_end(epoch, {"val_top_1": SEEN[epoch]})
            best.wait_until_finished()
        rows = [f"{i},{value}" for i, value in enumerate(SEEN[:end])]
        (tmp_path / "log.csv").write_text("\n".join(["epoch,val_top_1", *rows]))
    assert found == [0, 1, 3]
