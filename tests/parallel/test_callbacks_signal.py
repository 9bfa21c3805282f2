"""StopOnSignal: a signal to one rank ends all ranks at one step, with a checkpoint."""

import contextlib
import os
import signal
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.checkpoints import checkpoints_in
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import Checkpoint, StopOnSignal
from tfdist.core import runtime, world
from tfdist.core.rendezvous.renewal import Place

STEPS = 6


class Kill(keras.callbacks.Callback):
    """Sends this process a signal after one step of the second epoch, or another."""

    def __init__(self, step, number, epoch=1):
        super().__init__()
        self.step, self.number, self.of_epoch = step, number, epoch
        self.seen = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if (self.epoch, batch) == (self.of_epoch, self.step):
            os.kill(os.getpid(), self.number)


def compiled(accumulation=None):
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    adam = keras.optimizers.Adam(0.25, gradient_accumulation_steps=accumulation)
    model.compile(tfdist.DistributedOptimizer(adam), "mse", jit_compile=False)
    return model


def ended(folder, number, accumulation=None):
    """Trains until rank 1 is told to end in step 3 of epoch 2."""
    model = compiled(accumulation)
    x = np.random.default_rng(tfdist.rank()).normal(size=(STEPS * 2, 2))
    kill = Kill(2 if tfdist.rank() == 1 else None, number)
    before = signal.getsignal(number)
    validated = []
    try:
        model.fit(
            x,
            x[:, :1],
            batch_size=2,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=(x, x[:, :1]),
            callbacks=[
                kill,
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: validated.append(epoch)
                ),
                StopOnSignal(Checkpoint(folder + "/step-{step}.keras")),
            ],
        )
    except SystemExit as exit:
        state = [np.array(v) for v in model.weights + model.optimizer.variables]
        same = signal.getsignal(number) is before
        return [exit.code, kill.seen, validated, same, *state]
    return "went on"


def ended_while_data_have(folder, without):
    """Each rank is told to end at its step 5, when `without` has no more data."""
    model = compiled()
    x = np.ones((2 * (3 if tfdist.rank() == without else 9), 2))
    kill = Kill(4, signal.SIGTERM, epoch=0)
    checkpoint = Checkpoint(folder + "/{epoch}-{step}-{val_loss:.3f}.keras")
    try:
        model.fit(
            x,
            x[:, :1],
            batch_size=2,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[tfdist.callbacks.UnevenData(), kill, StopOnSignal(checkpoint)],
        )
    except SystemExit as exit:
        return [exit.code, kill.seen, *[np.array(v) for v in model.weights]]
    return "went on"


@pytest.mark.parametrize("without", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_signal_when_the_data_of_a_rank_have_ended_saves_and_ends_all(
    without, tmp_path
):
    results = run_ranks(ended_while_data_have, 2, str(tmp_path), without)
    steps = [3 if rank == without else 5 for rank in range(2)]
    assert [own[:2] for own in results] == [[128 + signal.SIGTERM, n] for n in steps]
    for a, b in zip(results[0][2:], results[1][2:], strict=True):
        np.testing.assert_array_equal(a, b)
    # A value that nobody knows yet (val_loss) is no reason to lose the work.
    assert checkpoints_in(tmp_path) == ["1-5-none.keras"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_to_one_rank_saves_and_ends_all_at_the_same_step(number, tmp_path):
    results = run_ranks(ended, 2, str(tmp_path), int(number))
    for code, steps, epochs, handler_is_back, *state in results:
        assert (code, steps, epochs) == (128 + number, STEPS + 3, [0])
        assert handler_is_back
        for a, b in zip(state, results[0][4:], strict=True):
            np.testing.assert_array_equal(a, b)
    assert checkpoints_in(tmp_path) == [f"step-{STEPS + 3}.keras"]
    saved = keras.saving.load_model(tmp_path / f"step-{STEPS + 3}.keras")
    for a, b in zip(saved.weights, results[0][4:], strict=False):
        np.testing.assert_array_equal(a, b)


def test_batches_that_wait_for_their_update_are_finished_first(tmp_path):
    results = run_ranks(ended, 2, str(tmp_path), int(signal.SIGTERM), 2)
    assert [own[1] for own in results] == [STEPS + 4] * 2
    assert checkpoints_in(tmp_path) == ["step-5.keras"]


class Signals(keras.layers.Layer):
    """Sends its process a signal while TensorFlow traces it, or its config is saved."""

    where = ""  # where to send it the next time

    def call(self, x, training=False):
        self.send("tracing of the step" if training else "tracing of the validation")
        return x

    def get_config(self):
        self.send("save")
        return super().get_config()

    @classmethod
    def send(cls, where):
        if cls.where == where:
            cls.where = ""
            os.kill(os.getpid(), signal.SIGTERM)


class MeetsInTest(keras.Model):
    """A model whose test step is an operation of all ranks."""

    def test_step(self, data):
        loss = tfdist.allreduce(super().test_step(data)["loss"])
        return {"loss": loss}


def ended_in_each(folder, cases):
    """Training in epochs of `STEPS` steps, and where it ended.

    Args:
        folder: of the checkpoints.
        cases: for each training its name, the first epoch, and for each rank where it
            gets the signal: a name that `Signals` knows; a hook, perhaps with a batch;
            or nothing.
    """
    found = []
    for name, initial_epoch, of_ranks in cases:
        where, _, batch = of_ranks[tfdist.rank()].partition(" at batch ")
        found.append(ended_in(f"{folder}/{name}", initial_epoch, where, batch or "0"))
    return found


def ended_in(path, epoch, where, at_batch):
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1)(Signals()(inputs))
    meets = "meets" in path
    model = (MeetsInTest if meets else keras.Model)(inputs, outputs)
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25))
    model.compile(sgd, "mse", jit_compile=False)
    x = np.random.default_rng(tfdist.rank()).normal(size=(STEPS * 2, 2))
    batches = 4 if meets else 3 + 2 * tfdist.rank()  # not alike
    held = np.ones((2 * batches, 2))
    seen = {"steps": 0, "tested": 0, "ended": 0}

    def at(hook, batch=0):
        if where == hook and str(batch) == at_batch:
            os.kill(os.getpid(), signal.SIGTERM)

    def count(kind, hook, batch):
        seen[kind] += 1
        at(hook, batch)

    watch = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: at("on_train_begin"),
        on_epoch_end=lambda epoch, logs: count("ended", "on_epoch_end", 0),
        on_train_end=lambda logs: None,
    )
    watch.on_train_batch_end = lambda b, logs: count("steps", "on_train_batch_end", b)
    watch.on_test_begin = lambda logs: at("on_test_begin")
    watch.on_test_batch_end = lambda b, logs: count("tested", "on_test_batch_end", b)
    watch.on_test_end = lambda logs: at("on_test_end")
    checkpoint = Checkpoint(path + "-{step}-{val_loss:.1f}.keras")
    Signals.where = where
    try:
        model.fit(
            *(x, x[:, :1]),
            batch_size=2,
            initial_epoch=epoch,
            epochs=epoch + 2,
            shuffle=False,
            verbose=0,
            validation_data=(held, held[:, :1]),
            validation_batch_size=2,
            callbacks=[
                tfdist.callbacks.BroadcastInitialState(),
                watch,
                tfdist.callbacks.MetricAverage(),
                *([checkpoint] if where == "save" or "save" in path else []),
                StopOnSignal(checkpoint),
            ],
        )
    except SystemExit as exit:
        weights = [np.array(v) for v in model.weights]
        return [exit.code, int(sgd.iterations), list(seen.values()), weights]
    finally:
        Signals.where = ""
    return ["went on", *seen.values()]


NO = ""
# name: [where each rank gets its signal, steps that are saved, validated batches of
# each rank, epochs that ended, what stands for the result of the validation]
PHASES = {
    "start": [["on_train_begin", NO], 0, [0, 0], 0, "none"],
    "tracing": [["tracing of the step"] * 2, 1, [0, 0], 0, "none"],
    "step": [[NO, "on_train_batch_end at batch 2"], 3, [0, 0], 0, "none"],
    "last_step": [[NO, "on_train_batch_end at batch 5"], 6, [0, 0], 0, "none"],
    "before": [["on_test_begin"] * 2, 6, [0, 0], 0, "none"],
    "traced": [["tracing of the validation"] * 2, 6, [1, 1], 0, "none"],
    "apart": [
        *[["on_test_batch_end at batch 0", "on_test_batch_end at batch 3"], 6],
        *[[1, 4], 0, "none"],
    ],
    "alone": [["on_test_batch_end at batch 1", NO], 6, [2, 5], 0, "none"],
    "meets": [["on_test_batch_end at batch 1", NO], 6, [4, 4], 0, "none"],
    "ended": [[NO, "on_test_end"], 6, [3, 5], 0, "none"],
    "save": [["save", NO], 6, [3, 5], 1, "1.0"],
}


SOME = ("tracing", "apart", "save")  # in a step, in a validation, while a file is made


@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param(tuple(PHASES), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_signal_in_each_phase_saves_what_is_done(names, tmp_path):
    cases = [[name, 0, PHASES[name][0]] for name in names]
    results = run_ranks(ended_in_each, 2, str(tmp_path), cases, timeout_s=120)
    for index, name in enumerate(names):
        _, steps, tested, ended, _ = PHASES[name]
        for rank in range(2):
            code, updates, seen, weights = results[rank][index]
            assert code == 128 + signal.SIGTERM, name
            assert [updates, *seen] == [steps, steps, tested[rank], ended], name
            for a, b in zip(weights, results[0][index][3], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
        files = sorted(path.name for path in tmp_path.glob(f"{name}-*.keras"))
        assert f"{name}-{steps}" in files[0] and len(files) == 1, (name, files)
        saved = keras.saving.load_model(
            tmp_path / files[0],
            custom_objects={"Signals": Signals, "MeetsInTest": MeetsInTest},
        )
        for a, b in zip(saved.weights, results[0][index][3], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        assert int(saved.optimizer.iterations) == steps


def told_at_the_end():
    """The signal comes when nobody asks for it any more, but before the end of fit."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam()), "mse", jit_compile=False
    )
    kill = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGUSR1)
    )
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        stop = StopOnSignal(Checkpoint("none.keras"))
        model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=[kill, stop])
    finally:
        signal.signal(signal.SIGUSR1, before)
    return received


def test_a_signal_that_came_too_late_has_the_effect_it_had_before():
    assert run_ranks(told_at_the_end, 1) == [[signal.SIGUSR1]]


def told_after_an_error(kinds):
    """A fit that raises, or the second one of the same model; who gets the signal."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.Adam()), "mse", jit_compile=False
    )
    found = {}

    def fit(stop, at_step):
        acts = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: at_step()
        )
        model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=[stop, acts])

    def fails():
        raise ZeroDivisionError

    def tell():
        os.kill(os.getpid(), signal.SIGUSR1)

    def tell_twice():
        tell()
        received.append("once")
        tell()

    def stop_of():
        made = StopOnSignal(Checkpoint("none.keras"))
        made.checkpoint.save_now = lambda logs, batch: None
        return made

    received = []

    def mine(number, frame):
        received.append(int(number))

    for kind in kinds:
        received.clear()
        before = signal.signal(signal.SIGUSR1, mine)
        stop, code = stop_of(), None
        try:
            with contextlib.suppress(ZeroDivisionError):
                fit(stop, fails)
            if kind != "outside":
                try:
                    fit(stop if kind == "again" else stop_of(), tell_twice)
                except SystemExit as exit:
                    code = exit.code
            tell()
            back = signal.getsignal(signal.SIGUSR1) is mine
        finally:
            signal.signal(signal.SIGUSR1, before)
        found[kind] = [code, list(received), back]

    # A handler that is set after such a fit is there again after the next one.
    before, stop = signal.getsignal(signal.SIGUSR1), stop_of()
    try:
        with contextlib.suppress(ZeroDivisionError):
            fit(stop, fails)
        signal.signal(signal.SIGUSR1, mine)
        fit(stop, lambda: None)
        found["kept"] = signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
    return found


def test_after_a_fit_that_raised_signals_have_their_former_effect():
    number = int(signal.SIGUSR1)
    [found] = run_ranks(told_after_an_error, 1, ["outside", "again", "anew"])
    assert found["outside"] == [None, [number], True]
    # The first signal is the callback's; the second, and those after fit, are not.
    expected = [128 + number, ["once", number, number], True]
    assert found["again"] == found["anew"] == expected
    assert found["kept"]


def told_twice(folder):
    """A launcher passes on a signal that its batch system has also sent to the rank."""

    def tell(batch, logs):
        for _ in range(2 if batch == 1 else 0):
            os.kill(os.getpid(), signal.SIGUSR1)

    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    x, stop = np.ones((6, 2)), StopOnSignal(Checkpoint(folder + "/{step}.keras"))
    listed = [keras.callbacks.LambdaCallback(on_train_batch_begin=tell), stop]
    try:
        compiled().fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=listed)
    except SystemExit as exit:
        return [exit.code, len(received)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    return "went on"


@pytest.mark.parametrize(
    ("env", "passed_on"), [({"TFDIST_SIGNAL_GRACE_S": "25"}, 0), ({}, 1)]
)
def test_a_repeated_signal_is_ignored_under_a_launcher(env, passed_on, tmp_path):
    [found] = run_ranks(told_twice, 1, str(tmp_path), env=env)
    assert found == [128 + signal.SIGUSR1, passed_on]
    assert checkpoints_in(tmp_path) == ["2.keras"]


def next_generation():
    alone = {"rank": 0, "local_rank": 0, "cross_rank": 0}
    alone |= {"size": 1, "local_size": 1, "cross_size": 1}
    place = Place(generation=runtime.generation() + 1, **alone)
    with unittest.mock.patch.dict(os.environ):
        world.reconnect(place, timeout_s=30.0)


def signals_after_a_custom_loop():
    """Signals that the previous handler has got after each of three custom loops.

    After the first loop the world stays as it is. After the second loop it is replaced
    by the next generation of an elastic job, and after the third it is shut down.
    """
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False
    )
    received, found = [], []

    def send():
        os.kill(os.getpid(), signal.SIGUSR1)
        found.append(list(received))

    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        for end in (None, next_generation, tfdist.shutdown):
            stop = StopOnSignal(Checkpoint("none.keras"))
            listed = keras.callbacks.CallbackList([stop], model=model)
            listed.on_train_begin()  # and never on_train_end, as if the loop had raised
            if end is not None:
                end()
            send()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return found


def test_after_a_custom_loop_that_raised_signals_have_their_effect_again_at_shutdown():
    # Until then the signals are noted by the callback, whose loop might still run.
    assert run_ranks(signals_after_a_custom_loop, 1) == [[[], [], [signal.SIGUSR1]]]


def unreduced(folder, others):
    """The error of a step that reduces nothing."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

    keras.utils.clear_session()
    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    stop = StopOnSignal(Checkpoint(f"{folder}/m.keras"))
    called = [*(getattr(tfdist.callbacks, name)() for name in others), stop]
    ones = np.ones((4, 1))
    with pytest.raises(RuntimeError) as caught:
        model.fit(ones, ones, verbose=0, callbacks=called)
    return str(caught.value)


@pytest.mark.parametrize("others", [[], ["MetricAverage"]])
def test_gradients_that_are_not_reduced_are_found_with_it(tmp_path, others):
    for message in run_ranks(unreduced, 2, str(tmp_path), others):
        assert "The first step reduced no gradients" in message


def wrong(folder):
    best = Checkpoint(folder + "/best.keras", save_best_only=True)
    return outcome(lambda: StopOnSignal(best))


def test_a_checkpoint_that_may_not_save_is_refused(tmp_path):
    for result in run_ranks(wrong, 1, str(tmp_path)):
        assert result["class"] == "ValueError"
        assert "separate Checkpoint to StopOnSignal" in result["message"]


def kept(folder):
    """Two fits of the same callbacks, files by steps: 2, 4, 6, ... updates."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25)),
        "mse",
        jit_compile=False,
    )
    x = np.ones((STEPS * 2, 2))
    path = folder + "/step-{step:02d}.keras"
    best = Checkpoint(
        folder + "/best.keras",
        monitor="loss",
        save_best_only=True,
        initial_value_threshold=-1.0,
    )
    callbacks = [Checkpoint(path, save_freq=2, keep=2), best]
    for _ in range(2):
        model.fit(
            x, x[:, :1], batch_size=2, shuffle=False, verbose=0, callbacks=callbacks
        )
    return 0


def test_only_the_newest_files_are_kept_and_a_threshold_is_for_the_first_save(tmp_path):
    run_ranks(kept, 2, str(tmp_path))
    names = checkpoints_in(tmp_path)
    assert names == ["step-10.keras", "step-12.keras"]
