"""The state of a callback that is sent to other ranks is plain data, and complete."""

import io
import logging
import signal
import threading
import time
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest

import tfdist
from tfdist.callbacks import Progress, RankZeroOnly, elastic, rank_zero_only
from tfdist.callbacks._callback_changes import CallbackChanges
from tfdist.callbacks._callback_states import (
    MAX_STATE_BYTES,
    plain_state,
    state_to_send,
)
from tfdist.callbacks._elastic_fit import ElasticFit
from tfdist.callbacks._fit_place import place_of_hook, place_of_step
from tfdist.callbacks._fit_position import FitPosition
from tfdist.callbacks._fit_state import FitState, Received
from tfdist.callbacks.elastic import _check_best_weights
from tfdist.collectives.object_codec import decode, encode


def test_numbers_arrays_and_their_collections_are_sent():
    state = {
        "wait": 3,
        "best": np.float32(0.5),
        "weights": [np.zeros(2), None],
        "history": {"loss": [1.0, 2.0]},
        "names": ["a.keras"],
        "halves": [np.zeros(2, ml_dtypes.bfloat16)],
    }
    assert plain_state(state) == state


def test_what_belongs_to_a_process_is_not_sent():
    state = {
        "params": {"steps": 3},
        "path": "log.csv",
        "lock": threading.Lock(),
        "signals": (signal.SIGTERM,),
        "models": [[object()]],
        "texts": np.array(["a"]),
    }
    assert plain_state(state) == {}


def state_after_sending(callback):
    return decode(
        encode(state_to_send(callback), max_bytes=MAX_STATE_BYTES),
        max_bytes=MAX_STATE_BYTES,
    )


def test_long_lists_are_sent():
    callback = keras.callbacks.Callback()
    callback.losses = [0.5] * 250_000
    callback.epochs = {"losses": [1] * 250_000}
    sent = state_after_sending(callback)
    assert sent == {"losses": callback.losses, "epochs": callback.epochs}


@pytest.mark.parametrize(
    "value",
    [
        [np.str_("a")],
        [np.datetime64("2026-01-01")],
        [1 << 64],
        ["\ud800"],
        np.ma.array([1.0], mask=[True]),
    ],
)
def test_what_cannot_be_sent_is_left_out_and_named_once(value, caplog):
    callback = keras.callbacks.Callback()
    callback.good, callback.odd = [1.0], value
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert state_after_sending(callback) == {"good": [1.0]}
        assert state_after_sending(callback) == {"good": [1.0]}
    assert [one.args[0] for one in caplog.records] == ["odd"]


class Halve(keras.callbacks.Callback):
    """Halves the learning rate at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def on_epoch_end(self, epoch, logs=None):
        self.calls += 1
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) / 2


def in_elastic_fit(callback, units=1):
    """A RankZeroOnly as in a job that continues when a rank is lost."""
    tfdist.init()
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(units)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    model.optimizer.build(model.trainable_variables)
    wrapped = RankZeroOnly(callback)
    wrapped.set_model(model)
    wrapped.set_params({})
    wrapped._keeps_copies = True
    wrapped._looks = lambda: True
    return wrapped, model


def test_changes_that_a_lost_rank_has_interrupted_are_sent_again(monkeypatch):
    callback = Halve()
    wrapped, model = in_elastic_fit(callback)

    def lose(*arguments):
        raise RuntimeError("rank 2 was lost")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(rank_zero_only, "share", lose)
        with pytest.raises(RuntimeError, match="rank 2 was lost"):
            wrapped.on_epoch_end(0, {})
    model.optimizer.learning_rate.assign(0.5)  # the hook is undone
    wrapped.on_epoch_end(0, {})
    assert (callback.calls, float(model.optimizer.learning_rate)) == (1, 0.25)
    wrapped.on_epoch_end(1, {})
    assert (callback.calls, float(model.optimizer.learning_rate)) == (2, 0.125)


def test_changes_are_not_kept_in_memory_during_the_steps():
    class Halves(Halve):
        def on_train_begin(self, logs=None):
            self.on_epoch_end(0)

    wrapped, _ = in_elastic_fit(Halves())
    wrapped._run_on_first_rank("on_train_begin", {})
    assert not wrapped._latest  # this hook is not repeated
    wrapped.on_epoch_end(0, {})
    assert wrapped._latest
    wrapped.on_train_batch_begin(0, {})
    assert not wrapped._latest


def test_the_best_weights_of_a_large_model_are_sent():
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    wrapped, model = in_elastic_fit(best, units=1 << 18)
    best.on_train_begin()
    wrapped.on_epoch_end(0, {"loss": 1.0})
    assert best.best == 1.0 and best.best_weights is not None


@pytest.mark.parametrize("wrap", [lambda one: one, RankZeroOnly])
def test_best_weights_that_cannot_be_sent_are_refused(wrap, monkeypatch):
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    _, model = in_elastic_fit(keras.callbacks.Callback(), units=100)
    callbacks = [wrap(best)]
    _check_best_weights(model, callbacks)
    monkeypatch.setattr(elastic, "MAX_CALLBACK_BYTES", 800)  # for 200 weights
    with pytest.raises(NotImplementedError, match="Omit restore_best_weights"):
        _check_best_weights(model, callbacks)
    best.restore_best_weights = False
    _check_best_weights(model, callbacks)


def test_a_new_rank_0_keeps_the_columns_of_a_log(tmp_path):
    path = tmp_path / "log.csv"
    wrapped, _ = in_elastic_fit(keras.callbacks.CSVLogger(str(path)))
    log = wrapped.callback
    log.on_train_begin()
    log.on_epoch_end(0, {"loss": 1.0, "rate": 0.5})
    wrapped.on_ranks_changed(becomes_first=True)
    log.on_epoch_end(1, {"loss": 2.0, "rate": 0.5, "val_loss": 3.0})
    assert path.read_text().splitlines() == [
        "epoch,loss,rate,val_loss,val_rate",
        "0,1.0,0.5,NA,NA",
        "1,2.0,0.5,3.0,NA",
    ]


def test_the_clock_of_another_host_is_not_used(monkeypatch):
    tfdist.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    sender, newcomer = (Progress(4, file=io.StringIO()) for _ in range(2))
    for one in (sender, newcomer):
        one.set_model(model)
        one.set_params({"epochs": 2, "steps": 2})
        one.on_train_begin()
    now_s = time.monotonic
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(time, "monotonic", lambda: now_s() + 1e6)
        sender.on_epoch_begin(0)
        sender.on_train_batch_begin(0)
        sender.on_train_batch_end(0)
    vars(newcomer).update(state_to_send(sender))
    newcomer.on_ranks_changed(becomes_first=False)
    newcomer.on_train_batch_begin(1)
    newcomer.on_train_batch_end(1)
    logs = {}
    newcomer.on_epoch_end(0, logs)
    assert 0 <= logs["epoch_s"] < 100
    assert logs["samples_per_s"] > 0


def test_a_newcomer_saves_with_the_others_if_the_job_ends_as_it_joins(monkeypatch):
    fit, saves = ElasticFit.__new__(ElasticFit), []
    received = SimpleNamespace(place=place_of_step(1, 2))

    def enter():
        fit._received = received

    def save(place, of_another):
        saves.append(of_another)
        raise SystemExit(143)

    fit._place, fit._generations = place_of_step(0, 0), SimpleNamespace(is_last=True)
    monkeypatch.setattr(fit, "_enter_next_generation", enter)
    monkeypatch.setattr(fit, "_save_and_end", save)
    with pytest.raises(SystemExit):
        fit._join()
    assert saves == [received]


@pytest.mark.parametrize(("batch", "is_enough"), [(1, False), (2, True)])
def test_a_newcomer_accepts_validation_batches_that_suffice_for_the_job(
    batch, is_enough, monkeypatch
):
    """A replacement of one of two ranks starts as rank 2 of 3."""
    tfdist.init()
    x = np.ones((12, 1))
    train, validation = (
        tfdist.data.global_batches((x, x), global_batch=size) for size in (6, batch)
    )
    found = {"x": train, "validation_data": validation}
    monkeypatch.setattr(elastic, "variables_of_fit", lambda model: found)
    monkeypatch.setattr(elastic.runtime, "size", lambda: 3)
    of_newcomer = {"MEMBER": "2", "RANK": "2", "SIZE": "3", "MAX_SIZE": "2"}
    for name, value in of_newcomer.items():
        monkeypatch.setenv(f"TFDIST_{name}", value)
    if is_enough:
        assert elastic._sources_of_fit(None, 0)[1] is not None
    else:
        with pytest.raises(ValueError, match="a global_batch of at least 2"):
            elastic._sources_of_fit(None, 0)


@pytest.mark.parametrize("place", ["hook", "validation"])
def test_a_second_loss_does_not_undo_what_a_new_rank_0_has_set_up(place, monkeypatch):
    """Two ranks are lost one after the other; the first was rank 0."""

    class Log(keras.callbacks.Callback):
        file = None
        tries = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.tries += 1
            if len(losses) < 2:
                raise RuntimeError("a rank was lost")

    def validate(check):
        log.on_epoch_begin(0)
        return {"val_loss": 1.0}

    def recover(*arguments):
        if not losses:  # this rank becomes rank 0
            log.file = "open"
        losses.append("a rank")

    tfdist.init()
    log, losses, fit = Log(), [], ElasticFit.__new__(ElasticFit)
    fit._epoch, fit._taken, fit._starts_at, fit._resumes_at = 0, None, None, None
    fit._generations = SimpleNamespace(is_elastic=True, check_between_commits=None)
    fit._methods = SimpleNamespace(evaluate_with=validate)
    fit._state = SimpleNamespace(
        save=lambda: None,
        read=lambda: None,
        completed=0,
        callbacks=[log],
        validation=SimpleNamespace(exchange=lambda generation: None),
    )
    monkeypatch.setattr(fit, "_progress", lambda: (0, 1))
    monkeypatch.setattr(fit, "_is_loss", lambda error: True)
    monkeypatch.setattr(fit, "_recover", recover)
    if place == "hook":
        at = place_of_hook("on_epoch_begin", 0, 0, 0)
        fit._call(at, "on_epoch_begin", log, (0,), {})
    else:
        assert fit._validate() == {"val_loss": 1.0}
    assert (log.file, log.tries, len(losses)) == ("open", 1, 2)


def test_a_hook_that_is_repeated_begins_with_the_same_attributes_and_logs():
    callback, logs = keras.callbacks.Callback(), {"loss": 1.0}
    callback.count = callback.other = 1
    changes = CallbackChanges([callback], logs)
    callback.count, callback.added = 2, 3
    logs.update(loss=2.0, mae=3.0)
    changes.undo()
    assert (callback.count, hasattr(callback, "added"), logs) == (1, False, {"loss": 1})
    callback.other = 4  # on a rank that becomes rank 0, after the hook
    changes.redo()
    assert (callback.count, callback.added, callback.other) == (2, 3, 4)
    assert logs == {"loss": 2.0, "mae": 3.0}


def test_metrics_are_kept_if_the_other_rank_has_begun_the_next_epoch():
    tfdist.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse")
    model.build((None, 1))
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
    state = FitState(model, [])
    [total, *_] = model.metrics[0].variables
    rest = {"callbacks": [], "logs": {}, "stop": False, "start": 0}
    for epoch, expected in ((1, 5.0), (0, 0.0)):
        total.assign(5.0)
        received = Received(
            place_of_step(epoch, 0), [], position=FitPosition(1, 1), **rest
        )
        state.take_metrics(received, place_of_step(0, 3))
        assert float(total) == expected
