"""The callbacks on several ranks."""

import logging
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.checkpoints import checkpoints_in
from helpers.ranks import run_ranks
from helpers.two_parts import TwoParts

import tfdist
from tfdist.core import native

SAMPLES = 37  # divides by none of the numbers of ranks


def binary_data():
    rng = np.random.default_rng(11)
    x = rng.normal(size=(SAMPLES, 3)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + rng.normal(size=(SAMPLES, 1)) > 0).astype(
        "float32"
    )
    return x, y


def frozen_model(optimizer, loss="binary_crossentropy", **options):
    """Its rate is 0, so that an epoch's metrics are those of one set of weights."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")]
    )
    metrics = [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.F1Score(name="f1", average="macro", threshold=0.5),
    ]
    model.compile(optimizer, loss, metrics=metrics, jit_compile=False, **options)
    return model


def averaged_history(run_eagerly):
    """What MetricAverage, and a callback after it, see on unequal shards."""
    x, y = binary_data()
    model = frozen_model(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), run_eagerly=run_eagerly
    )
    rank, others = tfdist.rank(), tfdist.size() - 1
    own = slice(0, 30) if rank == 0 else slice(30 + rank - 1, None, others)
    later = []

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            later.append(dict(logs))

    history = model.fit(
        x[own],
        y[own],
        batch_size=len(x[own]),  # one step on every rank
        epochs=2,
        verbose=0,
        validation_data=tfdist.data.shard((x, y), batch_size=4),
        callbacks=[tfdist.callbacks.MetricAverage(), Later()],
    ).history
    assert [{k: v[e] for k, v in history.items()} for e in range(2)] == later
    return history


@pytest.mark.parametrize(
    ("size", "run_eagerly"),
    [
        (2, False),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_metrics_are_those_of_all_samples_and_equal_on_all_ranks(size, run_eagerly):
    x, y = binary_data()
    alone = frozen_model(keras.optimizers.SGD(0.0))
    expected = alone.fit(x, y, batch_size=5, verbose=0, validation_data=(x, y)).history
    ranks = run_ranks(averaged_history, size, run_eagerly)
    assert ranks == [ranks[0]] * size
    assert sorted(ranks[0]) == sorted(expected)
    for name, [value] in expected.items():
        np.testing.assert_allclose(ranks[0][name], [value] * 2, rtol=2e-6, err_msg=name)


def evaluated(run_eagerly, steps_per_execution):
    """What evaluate returns on this rank's share, after a fit that validated."""
    x, y = binary_data()
    model = frozen_model(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        run_eagerly=run_eagerly,
        steps_per_execution=steps_per_execution,
    )
    average = tfdist.callbacks.MetricAverage()
    share = tfdist.data.shard((x, y), batch_size=4)
    for _ in range(2):
        history = model.fit(
            share, verbose=0, shuffle=False, validation_data=share, callbacks=[average]
        ).history
        found = model.evaluate(share, verbose=0, return_dict=True, callbacks=[average])
    local = model.evaluate(share, verbose=0, return_dict=True)
    assert {f"val_{k}": [v] for k, v in found.items()}.items() <= history.items()
    return found, local


@pytest.mark.slow  # of one setting: test_fit_arguments.py
@pytest.mark.parametrize(
    ("run_eagerly", "steps_per_execution"), [(False, 1), (True, 1), (False, 3)]
)
def test_evaluate_with_metric_average_is_that_of_all_samples(
    run_eagerly, steps_per_execution
):
    x, y = binary_data()
    alone = frozen_model(keras.optimizers.SGD(0.0))
    expected = alone.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    results = run_ranks(evaluated, 3, run_eagerly, steps_per_execution)
    for found, local in results:
        assert found == results[0][0]
        assert sorted(found) == sorted(expected)
        assert local["loss"] != found["loss"]
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-6, err_msg=name)


def other_models():
    """Their second layers differ on rank 1."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1 + tfdist.rank())])
    try:
        tfdist.broadcast_variables(model.weights)
    except tfdist.MismatchError as error:
        return str(error), error.record.tensor, error.record.cause
    return "", "", ""


def test_a_broadcast_of_different_models_speaks_of_variables():
    for message, tensor, cause in run_ranks(other_models, 2):
        assert "do not agree on the list of variables: entry 0" in message
        assert "gradients" not in message + cause
        assert tensor == "variables"


def other_numbers():
    """Logs that are no metrics: a custom step's, and another callback's."""

    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            return {"loss": logs["loss"], "spread": float(tfdist.rank())}

    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["same"] = 0.25
            logs["words"], logs["flag"], logs["steps"] = "text", True, 7
            rank = tfdist.rank()
            logs["array"], logs["count"] = np.array(rank, "float32"), np.int64(rank)
            logs["tensor"], logs["own"] = tf.constant(rank), np.float32(rank)

    keras.utils.set_random_seed(1)
    keras.utils.clear_session()
    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", jit_compile=False)
    count = [3, 1][tfdist.rank()]
    history = model.fit(
        np.ones((count, 1), "float32"),
        np.ones((count, 1), "float32"),
        batch_size=4,
        verbose=0,
        callbacks=[Adds(), tfdist.callbacks.MetricAverage()],
    ).history
    return {name: values[0] for name, values in history.items()}


def test_numbers_that_are_no_metrics_are_weighted_by_samples():
    for logs in run_ranks(other_numbers, 2):
        assert logs["spread"] == pytest.approx(0.25)  # (0 * 3 + 1 * 1) / 4
        assert logs["same"] == 0.25
        assert (logs["words"], logs["flag"], logs["steps"]) == ("text", True, 7)
        assert isinstance(logs["steps"], int)
        for name in ("array", "count", "tensor", "own"):
            assert logs[name] == pytest.approx(0.25)


def numbers_with_names_of_metrics():
    """The logs of a custom loss, which leaves the trackers of `compile` unused."""

    class Model(keras.Sequential):
        def train_step(self, data):
            value = tf.cast(1 + self.part, tf.float32)
            x = tf.ones((1, 1))
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self(x))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": value, "kl": 2 * value}

        def test_step(self, data):
            value = tf.cast(1 + self.part, tf.float32)
            return {"loss": 4 * value, "kl": 8 * value}

    keras.utils.clear_session()
    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    model.part = tfdist.rank()
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", jit_compile=False)
    ones = np.ones((2, 1), "float32")
    average = tfdist.callbacks.MetricAverage()
    logs = model.fit(
        ones, ones, verbose=0, validation_data=(ones, ones), callbacks=[average]
    ).history
    return {name: values[0] for name, values in logs.items()}


def test_numbers_of_a_step_may_have_the_names_of_unused_metrics():
    for logs in run_ranks(numbers_with_names_of_metrics, 2):
        assert logs == {"loss": 1.5, "kl": 3.0, "val_loss": 6.0, "val_kl": 12.0}


def numbers_without_samples():
    """Warnings of a fit whose model has no loss, so that no samples are counted."""

    class Model(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self(data[0]))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"spread": float(tfdist.rank())}

    class Keeps(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    said = []
    handler = Keeps(level=logging.WARNING)
    logging.getLogger("tfdist").addHandler(handler)
    keras.utils.clear_session()
    model = Model([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, jit_compile=False)
    ones = np.ones((2, 1), "float32")
    average = tfdist.callbacks.MetricAverage()
    history = model.fit(ones, ones, epochs=3, verbose=0, callbacks=[average]).history
    logging.getLogger("tfdist").removeHandler(handler)
    return [history["spread"], [text for text in said if "of samples for" in text]]


def test_ranks_are_weighted_alike_without_samples_and_rank_0_says_so_once():
    results = run_ranks(numbers_without_samples, 2)
    assert [spread for spread, _ in results] == [[0.5] * 3] * 2
    assert [len(said) for _, said in results] == [1, 0]


def differing_logs(kind):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    metrics = ["mae"] if kind == "metrics" and tfdist.rank() else []
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", metrics=metrics, jit_compile=False)
    ones = np.ones((2, 1), "float32")
    validation = (ones, ones) if kind == "validation" and tfdist.rank() == 0 else None
    try:
        model.fit(
            ones,
            ones,
            verbose=0,
            validation_data=validation,
            callbacks=[tfdist.callbacks.MetricAverage()],
        )
    except tfdist.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), [("metrics", "mae"), ("validation", "val")])
def test_logs_that_differ_are_an_error_on_all_ranks(kind, name):
    for message in run_ranks(differing_logs, 2, kind, timeout_s=30):
        assert name in message
        assert "rank 0" in message and "rank 1" in message


def small_fit(callbacks, epochs=1):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")
    data = tfdist.data.shard((x, x[:, :1]), batch_size=2)
    first = [tfdist.callbacks.BroadcastInitialState()]
    model.fit(data, epochs=epochs, verbose=0, callbacks=first + callbacks)
    return model


def checkpoints(folder):
    writes = []

    class Note(tfdist.callbacks.Checkpoint):
        def _write(self, path, model):
            writes.append(os.path.basename(path))
            super()._write(path, model)

    path = os.path.join(folder, "m-{epoch}.keras")
    model = small_fit([Note(path)], epochs=2)
    present = checkpoints_in(folder)  # on every rank: complete when fit returns
    loaded = keras.models.load_model(os.path.join(folder, "m-2.keras"))
    same = all(
        np.array_equal(a, b)
        for a, b in zip(
            model.weights + model.optimizer.variables,
            loaded.weights + loaded.optimizer.variables,
            strict=True,
        )
    )
    return [len(writes), present, same]


def test_rank_0_alone_writes_and_all_ranks_find_the_file(tmp_path):
    results = run_ranks(checkpoints, 3, str(tmp_path))
    assert [writes for writes, _, _ in results] == [2, 0, 0]
    for _, present, same in results:
        assert present == ["m-1.keras", "m-2.keras"]
        assert same


def failing_checkpoint(folder):
    class FailsInEpoch2(tfdist.callbacks.Checkpoint):
        def _write(self, path, model):
            if self._epoch == 1:
                path.write_bytes(b"half of a mod")
                raise OSError(28, "No space left on device")
            super()._write(path, model)

    try:
        small_fit([FailsInEpoch2(os.path.join(folder, "m.keras"))], epochs=3)
    except (OSError, tfdist.RankFailedError) as error:
        record = getattr(error, "record", None)
        culprit = None if record is None else record.rank
        return [type(error).__name__, str(error), culprit, tfdist.allgather_object(1)]
    return None


def test_a_save_that_fails_on_rank_0_is_an_error_on_all_and_keeps_the_last(tmp_path):
    results = run_ranks(failing_checkpoint, 3, str(tmp_path))
    kinds = [kind for kind, *_ in results]
    assert kinds == ["OSError", "RankFailedError", "RankFailedError"]
    for rank, (_, message, culprit, later) in enumerate(results):
        assert "No space left on device" in message
        assert culprit == (0 if rank else None)
        assert later == [1, 1, 1]  # the world goes on
    assert checkpoints_in(tmp_path) == ["m.keras"]
    keras.models.load_model(tmp_path / "m.keras")


def late_checkpoint(folder):
    class Slow(tfdist.callbacks.Checkpoint):
        def _write(self, path, model):
            end = time.monotonic() + 3
            while native.failure() is None and time.monotonic() < end:
                time.sleep(0.05)

    callback = Slow(os.path.join(folder, "m.keras"), timeout_s=0.5)
    try:
        small_fit([callback])
    except (FileNotFoundError, tfdist.TimeoutError, tfdist.RankFailedError) as error:
        return type(error).__name__
    return ""


def test_the_others_wait_for_rank_0_with_a_deadline(tmp_path):
    results = run_ranks(late_checkpoint, 2, str(tmp_path), timeout_s=40)
    assert results[1] == "TimeoutError"


def torn(folder):
    path = os.path.join(folder, "m.keras")
    last = []

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            last.append(batch)
            if len(last) == 9:
                tfdist.barrier()  # rank 0 has applied step 9, too
            if tfdist.rank() == 1 and len(last) == 9:
                native.abort("ValueError: bad sample")
                raise ValueError("bad sample")

    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    ones = np.ones((12, 2), "float32")
    data = tfdist.data.shard((ones, ones[:, :1]), batch_size=1)
    checkpoint = tfdist.callbacks.Checkpoint(path)
    try:
        model.fit(data, epochs=3, verbose=0, callbacks=[Fails(), checkpoint])
    except (ValueError, tf.errors.OpError) as error:
        failure = tfdist.errors.from_tf(error)
        first = failure.record.rank if failure else str(error)
    messages = []
    for save in (
        lambda: model.save(os.path.join(folder, f"torn{tfdist.rank()}.keras")),
        lambda: checkpoint.on_epoch_end(2, {}),
    ):
        try:
            save()
            messages.append("saved")
        except RuntimeError as error:
            messages.append(str(error))
    return [first, messages]


def test_after_a_rank_failed_saving_is_refused_with_the_last_good_step(tmp_path):
    results = run_ranks(torn, 2, str(tmp_path))
    assert results[0][0] == 1
    assert results[1][0] == "bad sample"
    for message in results[0][1]:
        assert "torn" in message
        assert "bad sample" in message
        assert "last good step is 9" in message
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert int(loaded.optimizer.iterations) == 6


def warmed_rates():
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    callbacks = [
        tfdist.callbacks.LearningRateScale(),
        tfdist.callbacks.LearningRateWarmup(warmup_epochs=2),
        Watch(),
    ]
    small_fit(callbacks, epochs=3)
    return rates


def test_warm_up_goes_from_the_rate_of_one_rank_to_that_of_all():
    ranks = run_ranks(warmed_rates, 2)
    assert ranks[0] == ranks[1]
    expected = [0.1 * (1 + min(1, step / 12)) for step in range(18)]
    np.testing.assert_allclose(ranks[0], expected, rtol=1e-6)


def own_samples():
    x = np.arange(11)
    epochs = []
    data = tfdist.data.shard(x, batch_size=2, shuffle=True, seed=tfdist.data.seed(1))
    for _ in range(2):
        epochs.append([b.tolist() for b in data.as_numpy_iterator()])
    return [epochs, tfdist.data.seed(3)]


def test_shard_and_seed_know_their_rank():
    results = run_ranks(own_samples, 3)
    for epoch in range(2):
        batches = [epochs[epoch] for epochs, _ in results]
        assert {len(b) for b in batches} == {2}
        seen = [sample for b in batches for batch in b for sample in batch]
        assert sorted(seen) == list(range(11))
    assert len({seed for _, seed in results}) == 3


def unwrapped():
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    try:
        model.fit(
            np.ones((4, 2)),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[tfdist.callbacks.BroadcastInitialState()],
        )
    except ValueError as error:
        return str(error)
    return ""


class MakesItsOwnFunction(keras.Sequential):
    def make_train_function(self):
        return super().make_train_function()


def wrapped_after_a_fit(jit_compile):
    keras.utils.clear_session()
    model = MakesItsOwnFunction([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.25), "mse", jit_compile=jit_compile)
    x = np.full((4, 2), 1.0 + tfdist.rank(), "float32")
    model.fit(x, x[:, :1], verbose=0)
    tfdist.DistributedOptimizer(model.optimizer)
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=callbacks)
    function = model.train_function
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    return [w.tolist() for w in model.get_weights()], function is model.train_function


@pytest.mark.slow  # through Horovod's names: test_horovod_keras.py
@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_optimizer_that_is_wrapped_after_a_fit_reduces_in_the_next(jit_compile):
    first, second = run_ranks(wrapped_after_a_fit, 2, jit_compile)
    assert first == second
    assert first[1]  # what the second fit has traced is used again


def two_optimizers(kind):
    keras.utils.clear_session()
    model = TwoParts()
    model.build((None, 2))
    first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)
    if kind == "parts of others":  # held, too, but not used by themselves
        model.inner = second
        second = keras.optimizers.LossScaleOptimizer(second)
    first = tfdist.DistributedOptimizer(first)
    if kind == "local":
        second = tfdist.DistributedOptimizer(second, local_variables=lambda v: True)
    elif kind != "one":
        second = tfdist.DistributedOptimizer(second)
    model.compile(jit_compile=False)  # with an optimizer that nobody uses
    model.both = [first, second]
    x = np.full((4, 2), 1.0 + tfdist.rank(), "float32")
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    try:
        model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    except ValueError as error:
        return str(error)
    return [part.kernel.numpy().tolist() for part in model.parts]


def test_two_optimizers_of_which_one_is_not_wrapped_are_refused_before_the_first_step():
    for message in run_ranks(two_optimizers, 2, "one"):
        assert "Of the model's 2 optimizers, one in a list or dict (Adam" in message
        assert "local_variables=lambda variable: True" in message


@pytest.mark.parametrize(
    "kind", [pytest.param("both", marks=pytest.mark.slow), "parts of others"]
)
def test_two_wrapped_optimizers_train_the_same_weights_on_all_ranks(kind):
    first, second = run_ranks(two_optimizers, 2, kind)
    assert len(first) == 2
    assert first == second


@pytest.mark.slow
def test_of_two_optimizers_one_may_have_local_variables_alone():
    (a, b), (other_a, other_b) = run_ranks(two_optimizers, 2, "local")
    assert a == other_a
    assert b != other_b


def test_a_fit_that_would_not_reduce_is_refused_on_all_ranks():
    for message in run_ranks(unwrapped, 2):
        assert "tfdist.DistributedOptimizer(keras.optimizers.SGD(...))" in message
