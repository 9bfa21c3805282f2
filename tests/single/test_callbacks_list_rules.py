"""Which lists of callbacks are refused: the rules, and what is known of a callback."""

import os

import keras
import numpy as np
import pytest

import tfdist
from tfdist.callbacks._callback_list import (
    callback_list_of_the_call,
    describe,
    is_in_fit,
)
from tfdist.callbacks._list_rules import Entry, find_problem
from tfdist.callbacks.rank_zero_only import overridden_hooks


def ours(name, **settings):
    return Entry(name, name, ours=True, settings=settings)


def of_keras(name, place="", **settings):
    return Entry(name, name, place=place, settings=settings)


START = [ours("BroadcastInitialState", root=0), ours("MetricAverage")]
STOP = ours("StopTogether")
EARLY = of_keras("EarlyStopping", patience=1)
NAN = of_keras("TerminateOnNaN")
LOG = of_keras("CSVLogger", place="/log.csv")
SHOWS = ours("Progress", global_batch=8)


@pytest.mark.parametrize(
    "lists",
    [
        [[], []],
        [START, START],
        [[*START, EARLY], [*START, EARLY]],
        [[*START, NAN, STOP], [*START, NAN, STOP]],
        [[*START, NAN, STOP], [*START, STOP]],  # a stop of one rank is for all
        [
            [*START, STOP, of_keras("History"), of_keras("ProgbarLogger")],
            [*START, STOP],
        ],
        [[*START, LOG], START],  # one rank alone writes
        [[*START, LOG], [*START, of_keras("CSVLogger", place="/other.csv")]],
        [[*START, LOG], [*START, of_keras("TensorBoard", place="/log.csv")]],
        [[*START, Entry("Mine")], START],
        [[*START, SHOWS, LOG], [*START, SHOWS]],
        [[SHOWS], [SHOWS]],  # each rank's own metrics are what is wanted
        [[of_keras("LearningRateScheduler")], [of_keras("LearningRateScheduler")]],
        [[of_keras("CSVLogger", place="/a"), of_keras("CSVLogger", place="/a")], []],
    ],
)
def test_lists_that_are_right(lists):
    assert find_problem(lists) is None


@pytest.mark.parametrize(
    ("lists", "mismatch", "words"),
    [
        ([START, START[:1]], True, "[BroadcastInitialState] on rank 1"),
        ([START, START, START[::-1]], True, "rank 2"),
        (
            [
                [ours("Checkpoint", save_freq=1)],
                [ours("Checkpoint", save_freq="epoch")],
            ],
            True,
            "[Checkpoint(save_freq=1)] on rank 0 and [Checkpoint(save_freq='epoch')]",
        ),
        ([[*START, EARLY], START], True, "[EarlyStopping] on rank 0 and []"),
        ([[EARLY], [EARLY]], False, "Put tfdist.callbacks.MetricAverage() before it"),
        ([[EARLY, *START], [EARLY, *START]], False, "metrics of one rank"),
        ([START, [*START, NAN]], False, "StopTogether() at the end"),
        ([[*START, NAN], [*START, NAN]], False, "StopTogether() at the end"),
        ([[STOP, NAN], [STOP]], False, "Move it after TerminateOnNaN"),
        ([[*START, ours("UnevenData")]] * 2, False, "UnevenData has to be the first"),
        ([[LOG], [Entry("Mine")], [LOG]], False, "on rank 0 and on rank 2"),
        ([[Entry("Mine"), LOG]] * 2, False, "on rank 0 and on rank 1"),
        (
            [
                [LOG, LOG, of_keras("TensorBoard", "/t")],
                [of_keras("TensorBoard", "/t")],
            ],
            False,
            "TensorBoard writes to '/t' on rank 0 and on rank 1",
        ),
        ([[], [of_keras("BackupAndRestore")]], False, "RankZeroOnly(keras.callbacks.B"),
        ([[SHOWS, *START]] * 2, False, "Move tfdist.callbacks.Progress after"),
        ([[*START, LOG, SHOWS], [*START, SHOWS]], False, "CSVLogger writes the logs"),
    ],
)
def test_lists_that_are_refused(lists, mismatch, words):
    problem = find_problem(lists)
    assert words in problem.text
    assert problem.mismatch == mismatch


def test_all_mistakes_are_told_at_once():
    plateau = of_keras("ReduceLROnPlateau")
    problem = find_problem([[EARLY, plateau, NAN, LOG]] * 8)
    assert problem.text.startswith("The call of fit has 4 problems:\n1. ")
    lines = problem.text.splitlines()[1:]
    assert [line.split()[1] for line in lines] == [
        "TerminateOnNaN",
        "CSVLogger",
        "EarlyStopping",
        "ReduceLROnPlateau",
    ]
    assert not problem.mismatch


def test_a_mismatch_among_the_mistakes_makes_a_mismatch_of_all():
    problem = find_problem([[*START, NAN], START[:1]], [{"epochs": "2"}] * 2)
    assert problem.mismatch
    assert "1. The ranks' callbacks differ" in problem.text
    assert "2. TerminateOnNaN stops only its own rank" in problem.text


ARGUMENTS = {
    "epochs": "3",
    "steps_per_epoch": "5",
    "validation_data": "given",
    "validation_freq": "1",
    "class_weight": "None",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_fit_that_differ_are_refused(name):
    other = {**ARGUMENTS, name: "other"}
    problem = find_problem([START] * 3, [ARGUMENTS, ARGUMENTS, other])
    assert problem.mismatch
    assert f"Expected the same {name} in fit on every rank, got " in problem.text
    assert f"rank 1: {ARGUMENTS[name]}; rank 2: other" in problem.text


def test_arguments_that_may_differ():
    uneven = [ours("UnevenData"), *START]
    steps = {**ARGUMENTS, "steps_per_epoch": "4"}
    assert find_problem([uneven] * 2, [ARGUMENTS, steps]) is None
    alone = {**ARGUMENTS, "validation_data": "none", "validation_freq": "-"}
    assert find_problem([START[:1]] * 2, [ARGUMENTS, alone]) is None
    fixed = [START[0], ours("Elastic", elastic_job=False)]
    assert find_problem([fixed] * 2, [ARGUMENTS, alone]) is None
    for one in (ours("StopOnSignal"), ours("Elastic", elastic_job=True)):
        meets = [START[0], one]
        assert "validation_data" in find_problem([meets] * 2, [ARGUMENTS, alone]).text


class Mine(keras.callbacks.EarlyStopping):
    """A class of the user's own."""


def test_what_is_known_of_a_callback():
    k = keras.callbacks
    early = describe(Mine("loss", patience=2, min_delta=0.5))
    assert (early.name, early.kind) == ("Mine", "EarlyStopping")
    log = describe(k.CSVLogger("log.csv"))
    assert log == of_keras("CSVLogger", place=os.path.abspath("log.csv"))
    saves = describe(k.ModelCheckpoint("gs://bucket/m.keras"))
    assert saves.place == "gs://bucket/m.keras"
    assert describe(k.TerminateOnNaN()).kind == "TerminateOnNaN"
    of_keras_3_11 = k.TerminateOnNaN()
    vars(of_keras_3_11).pop("raise_error", None)
    assert describe(of_keras_3_11).kind == "TerminateOnNaN"
    assert describe(k.TerminateOnNaN(raise_error=True)).kind == ""
    assert describe(k.LambdaCallback()) == Entry("LambdaCallback")
    inner = tfdist.callbacks.RankZeroOnly(k.CSVLogger("log.csv"))
    assert describe(inner).name == "RankZeroOnly(CSVLogger)"
    assert describe(inner).kind == "RankZeroOnly"

    class Sub(tfdist.callbacks.MetricAverage):
        pass

    assert describe(Sub()) == Entry("Sub", "MetricAverage", ours=True)


def test_the_settings_known_are_the_arguments_and_not_what_was_counted():
    callback = keras.callbacks.EarlyStopping("loss", patience=2)
    before = describe(callback)
    callback.wait = 1
    callback.best = 0.5
    assert describe(callback) == before
    assert before.settings["patience"] == 2


def test_the_list_is_found_from_inside_a_hook_of_keras():
    found = []

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(callback_list_of_the_call())

    looks = Looks()
    later = keras.callbacks.History()
    listed = keras.callbacks.CallbackList([looks, later])
    listed.on_train_begin()
    assert found == [listed]
    looks.on_train_begin()  # a loop of the user's own has no list
    assert found[1] is None


def test_a_model_is_in_its_own_fit_alone():
    models = [keras.Sequential([keras.layers.Dense(1)]) for _ in range(2)]
    found = []
    looks = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append([is_in_fit(one) for one in models])
    )
    models[0].compile("sgd", "mse")
    models[0].fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[looks])
    assert found == [[True, False]]
    assert not is_in_fit(models[0])


def test_a_loop_of_the_users_own_may_call_the_callbacks():
    tfdist.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    inner = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    ours = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.RankZeroOnly(inner),
        tfdist.callbacks.StopTogether(),
    ]
    listed = keras.callbacks.CallbackList(ours, model=model)
    listed.on_train_begin()
    listed.on_epoch_begin(0)
    listed.on_train_batch_begin(0)
    listed.on_train_batch_end(0)
    listed.on_epoch_end(0)
    listed.on_train_end()


# ---- RankZeroOnly


def test_only_the_hooks_that_a_callback_has_are_forwarded():
    class Few(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            pass

    few = Few()
    few.on_epoch_end = lambda epoch, logs: None  # as LambdaCallback does
    assert overridden_hooks(few) == {"on_test_batch_end", "on_epoch_end"}
    wrapped = tfdist.callbacks.RankZeroOnly(few)
    default = keras.callbacks.Callback
    for hook in dir(default):
        if hook.startswith(("on_test_", "on_predict_")) and hook != "on_test_batch_end":
            assert getattr(wrapped, hook).__func__ is getattr(default, hook)
            assert not overridden_hooks(few) & {hook}
    assert "on_test_batch_end" in overridden_hooks(wrapped)
    assert overridden_hooks(keras.callbacks.TerminateOnNaN()) == {"on_train_batch_end"}


@pytest.mark.parametrize(
    ("callback", "error", "words"),
    [
        (None, TypeError, "Expected a Keras callback"),
        (Mine, TypeError, "Expected a Keras callback"),
        (tfdist.callbacks.MetricAverage(), ValueError, "has to run on all ranks"),
        (keras.callbacks.TerminateOnNaN(), ValueError, "the loss on every rank"),
        (keras.callbacks.SwapEMAWeights(), ValueError, "must not run on rank 0 only"),
    ],
)
def test_what_cannot_run_on_rank_0_only_is_refused(callback, error, words):
    with pytest.raises(error, match=words):
        tfdist.callbacks.RankZeroOnly(callback)
