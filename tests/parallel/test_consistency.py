"""Ranks that come to differ end with an error that names the first difference."""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import exit_report

CB = tfdist.callbacks
SAMPLES = 48
SLOW = pytest.mark.slow


class ActNorm(keras.layers.Layer):
    """The first batch sets trainable weights, as in flow models."""

    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")
        self.ready = self.add_weight((), "zeros", trainable=False, name="ready")

    def call(self, inputs, training=False):
        if training:
            new = 1 / (1e-3 + tf.math.reduce_std(inputs, 0))
            self.scale.assign(tf.where(self.ready < 0.5, new, self.scale))
            self.ready.assign(1.0)
        return inputs * self.scale


class Codebook(keras.layers.Layer):
    """Vectors that follow the inputs by a moving average."""

    def build(self, shape):
        self.codes = self.add_weight(
            (2, shape[-1]), "zeros", trainable=False, name="codes"
        )

    def call(self, inputs, training=False):
        if training:
            nearest = tf.reduce_mean(inputs, 0, keepdims=True)
            self.codes.assign(0.9 * self.codes + 0.1 * nearest)
        return inputs + 0 * self.codes[0]


class SampleCounter(keras.layers.Layer):
    """Counts positive inputs."""

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False, name="seen")

    def call(self, inputs):
        self.seen.assign_add(tf.reduce_sum(tf.cast(inputs > 0, tf.float32)))
        return inputs


class RunningRange(keras.layers.Layer):
    """Scales by the largest input so far."""

    def build(self, shape):
        self.largest = self.add_weight((), "ones", trainable=False, name="largest")

    def call(self, inputs, training=False):
        if training:
            largest = tf.reduce_max(tf.abs(inputs))
            self.largest.assign(tf.maximum(self.largest, largest))
        return inputs / self.largest


class NormalizedKernel(keras.layers.Layer):
    """Divides its own kernel by the norm of its outputs."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 4), "ones", name="kernel")

    def call(self, inputs, training=False):
        if training:
            norm = tf.norm(inputs @ self.kernel) + 1.0
            self.kernel.assign(self.kernel / norm)
        return inputs @ self.kernel


class NoisyWeights(keras.callbacks.Callback):
    """Adds other noise on each rank."""

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.trainable_variables[0]
        kernel.assign(kernel + 0.01 * (1 + tfdist.rank()))


class LateReset(keras.callbacks.Callback):
    """Changes a weight in a hook that the ranks do not run together."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def on_train_batch_end(self, batch, logs=None):
        self.calls += 1
        if self.calls == 3:
            kernel = self.model.trainable_variables[0]
            kernel.assign(0 * kernel)


class OwnScore(keras.callbacks.Callback):
    """Puts a number of this rank into the logs of all."""

    def on_epoch_end(self, epoch, logs=None):
        logs["val_score"] = float(epoch * (1 + tfdist.rank()))


class OwnAverage(keras.Model):
    """A `train_step` with a tape of its own, that follows the loss of this rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.average = self.add_weight((), "zeros", trainable=False, name="average")

    def train_step(self, data):
        x, y = data
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        self.average.assign(0.9 * self.average + 0.1 * loss)
        return {"loss": loss}


def _data(samples=SAMPLES):
    x = np.random.default_rng(3).normal(2, 3, size=(samples, 4)).astype("float32")
    return x, x[:, :1]


def _model(*layers, same=True, wrapped=True, kind=None, **compiled):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1 if same else 1 + tfdist.rank())
    inputs = keras.Input((4,))
    hidden = inputs
    for layer in layers:
        hidden = layer(hidden)
    outputs = keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(hidden))
    model = (kind or keras.Model)(inputs, outputs)
    optimizer = keras.optimizers.SGD(0.01)
    if wrapped:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", **compiled)
    return model


def _fit(model, *callbacks, data=None, epochs=2):
    batches = data or tfdist.data.shard(_data(), batch_size=4)
    model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=[*callbacks])


def _ours(*more):
    return [CB.BroadcastInitialState(), CB.MetricAverage(), *more]


def _loop(model, eager):
    """A loop of the user's own over one epoch, with the tape."""
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    tfdist.broadcast_variables(model.variables + optimizer.variables)

    def step(x, y):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)

    step = step if eager else tf.function(step)
    for x, y in tfdist.data.shard(_data(), batch_size=4):
        step(x, y)


def _act_norm():
    _fit(_model(ActNorm()), *_ours())


def _codebook():
    _fit(_model(Codebook(), steps_per_execution=3), *_ours())


def _counter():
    _loop(_model(SampleCounter(), wrapped=False), eager=False)


def _kernel():
    _loop(_model(NormalizedKernel(), wrapped=False), eager=True)


def _range():
    part = tf.data.Dataset.from_tensor_slices(_data())
    part = part.shard(tfdist.size(), tfdist.rank()).batch(5 + tfdist.rank())
    _fit(_model(RunningRange()), CB.UnevenData(), *_ours(), data=part)


def _noise():
    _fit(_model(), *_ours(NoisyWeights()))


def _late_reset():
    _fit(_model(), *_ours(CB.RankZeroOnly(LateReset())))


def _early_stopping():
    stops = keras.callbacks.EarlyStopping("val_score", mode="max", patience=50)
    _fit(_model(), *_ours(OwnScore(), stops))


def _plateau():
    slows = keras.callbacks.ReduceLROnPlateau("val_score", mode="max", patience=50)
    score = CB.RankZeroOnly(OwnScore())
    _fit(_model(steps_per_execution=2), *_ours(score, slows))


def _own_average():
    # No callback of tfdist: the tape compares, in step 2.
    _fit(_model(kind=OwnAverage, wrapped=False), epochs=1)


def _no_broadcast():
    _fit(_model(same=False), CB.MetricAverage())


def _no_callback():
    _fit(_model(same=False), epochs=1)


# Programs that are wrong, and pieces of the message in their order.
WRONG = {
    "data-dependent initialisation": (_act_norm, ["first step", "act_norm/scale"]),
    "codebook, executions of 3 steps": (_codebook, ["non-trainable", "codebook/codes"]),
    "counter, loop": (_counter, ["step 2", "sample_counter/seen"]),
    "kernel of the layer, eager loop": (_kernel, ["normalized_kernel/kernel"]),
    "range, uneven data": (_range, ["running_range/largest"]),
    "callback with noise": (_noise, ["end of epoch 1", "dense"]),
    "callback of rank 0": (_late_reset, ["end of epoch 1", "dense"]),
    "early stopping": (_early_stopping, ["EarlyStopping has best=", "val_score"]),
    "plateau on rank 0": (_plateau, ["ReduceLROnPlateau has best=", "val_score"]),
    "train_step without callbacks": (_own_average, ["step 2", "average"]),
    "no broadcast": (_no_broadcast, ["first step", "kernel", "BroadcastInitialState"]),
    "no callback": (_no_callback, ["step 2", "kernel", "BroadcastInitialState"]),
}


def _error_of(name):
    try:
        WRONG[name][0]()
    except tf.errors.FailedPreconditionError as error:
        found = tfdist.errors.from_tf(error) or error
        return [type(found).__name__, found.record.cause]
    return ["nothing", ""]


# Each at another place, or in another kind of loop.
FAST = (
    "data-dependent initialisation",
    "kernel of the layer, eager loop",
    "callback with noise",
    "early stopping",
    "no callback",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [SLOW]) for n in WRONG],
)
def test_ranks_that_differ_are_an_error_that_names_the_variable(name):
    errors = run_ranks(_error_of, 2, name, timeout_s=60)
    pattern = ".*".join(map(re.escape, WRONG[name][1]))
    for kind, text in errors:
        assert kind == "MismatchError"
        assert re.search(pattern, text, re.S), text
    assert errors[0] == errors[1]


def test_three_ranks_name_the_one_that_differs():
    for _, text in run_ranks(_third_differs, 3, timeout_s=60):
        assert "on rank 0 and rank 2" in text


def _third_differs():
    model = _model()
    if tfdist.rank() == 2:
        model.trainable_variables[0].assign(tf.ones((4, 4)))
    try:
        _fit(model, CB.MetricAverage())
    except tfdist.MismatchError as error:
        return ["", error.record.cause]
    return ["", "nothing"]


def _checkpoint(folder):
    path = f"{folder}/model.keras"
    saved = CB.RankZeroOnly(keras.callbacks.ModelCheckpoint(f"{folder}/keras.keras"))
    texts = []
    for saves in (CB.Checkpoint(path), saved):
        with pytest.raises(tfdist.MismatchError) as caught:
            _fit(_model(), *_ours(NoisyWeights(), saves))
        texts.append(str(caught.value))
    return texts


def test_weights_that_differ_are_not_saved(tmp_path):
    for first, second in run_ranks(_checkpoint, 2, str(tmp_path), timeout_s=60):
        assert "when a checkpoint is to be saved" in first
        assert "when ModelCheckpoint is to save" in second
    assert list(tmp_path.iterdir()) == []


class _Messages(logging.Handler):
    """Collects warnings of tfdist while it is open."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("tfdist").addHandler(self)
        return self.texts

    def __exit__(self, *error):
        logging.getLogger("tfdist").removeHandler(self)


def _warnings_of_data(names):
    x, y = _data(96)
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    own = np.random.default_rng(tfdist.rank()).normal(size=(96, 4)).astype("float32")
    found = {}
    for name, data_of in {
        "shuffled": lambda: whole.shuffle(96).batch(4),
        "sharded": lambda: tfdist.data.shard((x, y), batch_size=4, shuffle=True),
        "shard of the dataset": lambda: whole.shard(tfdist.size(), tfdist.rank()).batch(
            4
        ),
        "random": lambda: tf.data.Dataset.from_tensor_slices((own, y)).batch(4),
        "equal samples": lambda: (
            tf.data.Dataset.from_tensors((x[0], y[0])).repeat(96).batch(4)
        ),
    }.items():
        if name not in names:
            continue
        with _Messages() as texts:
            _fit(_model(), *_ours(), data=data_of())
        found[name] = texts
    if "arrays" in names:
        with _Messages() as texts:
            _model().fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=_ours())
        found["arrays"] = texts
    return found


SAME = ("shuffled", "arrays")
OTHER = ("sharded", "shard of the dataset", "random", "equal samples")


@pytest.mark.parametrize(
    ("same", "other"),
    [(SAME[:1], OTHER[:1]), pytest.param(SAME, OTHER, marks=SLOW)],
    ids=["some", "all"],
)
def test_data_that_were_not_sharded_are_a_warning_and_others_are_not(same, other):
    first, second = run_ranks(_warnings_of_data, 2, [*same, *other], timeout_s=120)
    assert set(first) == set(second) == {*same, *other}
    for name in same:
        [text] = first.pop(name)
        assert "train on the same data" in text
        assert "samples are used up to 2 times" in text
        assert "tfdist.data.shard" in text
    assert set(map(tuple, first.values())) == {()}
    assert set(map(tuple, second.values())) == {()}


def _shuffled_epochs(looked_at):
    """The weights after three epochs of shuffled data."""
    data = tf.data.Dataset.from_tensor_slices(_data()).shuffle(SAMPLES, seed=5)
    model = _model()
    model.fit(
        data.batch(4),
        epochs=3,
        verbose=0,
        shuffle=False,
        callbacks=_ours() if looked_at else [],
    )
    return [v.numpy() for v in model.weights]


def test_looking_at_samples_changes_neither_their_order_nor_the_bits():
    looked_at = run_ranks(_shuffled_epochs, 2, True, timeout_s=60)
    not_looked_at = run_ranks(_shuffled_epochs, 2, False, timeout_s=60)
    for own, other in zip(looked_at[0], not_looked_at[0], strict=True):
        np.testing.assert_array_equal(own, other)


def _modes():
    """With a warning the training goes on; nothing is said where it is off."""
    with _Messages() as texts:
        _fit(_model(same=False), CB.MetricAverage(), epochs=1)
    return texts


@pytest.mark.parametrize(("mode", "count"), [("warn", 2), ("off", 0)])
def test_the_check_can_warn_or_be_off(mode, count):
    env = {"TFDIST_WEIGHT_CHECK": mode}
    for texts in run_ranks(_modes, 2, env=env, timeout_s=60):
        found = [text for text in texts if "BroadcastInitialState" in text]
        assert len(found) == min(count, 1)
        assert len(texts) >= count


def _declared():
    """Trains models with variables that each rank keeps for itself."""
    layers = [SampleCounter(), keras.layers.BatchNormalization()]
    model = _model(*layers, wrapped=False)
    inner = keras.optimizers.Adam(0.01)
    optimizer = tfdist.DistributedOptimizer(inner, local_variables=[layers[0]])
    model.compile(optimizer, "mse")
    with _Messages() as texts:
        _fit(model, *_ours())
    return texts


def _normalized_in_sets():
    """Synchronized layers whose moving statistics differ between process sets."""
    sets = [tfdist.add_process_set([rank]) for rank in range(2)]
    own = sets[tfdist.rank()]
    model = _model(tfdist.layers.SyncBatchNormalization(process_set=own))
    _fit(model, *_ours())
    return model.layers[1].moving_mean.numpy()


def _stateful():
    stateful = keras.Sequential(
        [
            keras.Input((4, 1), batch_size=4),
            keras.layers.SimpleRNN(2, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    stateful.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with _Messages() as texts:
        _fit(stateful, *_ours())
    return texts


def test_what_differs_by_design_is_no_error():
    first, second = run_ranks(_declared, 2, timeout_s=60)
    [text] = first
    assert "batch_normalization" in text
    assert "CombineMovingStatistics" in text
    assert second == []


def test_statistics_of_process_sets_may_differ():
    own, other = run_ranks(_normalized_in_sets, 2, timeout_s=60)
    assert (own != other).any()


@pytest.mark.slow
def test_the_state_of_a_layer_for_the_batches_of_a_rank_is_no_error():
    assert run_ranks(_stateful, 2, timeout_s=60) == [[], []]


def _without_callbacks(kind):
    """Trains in 2 epochs of 6 steps with nothing of tfdist but the optimizer."""
    steps = 3 if kind == "executions" else 1
    model = _model(steps_per_execution=steps)
    if kind == "accumulation":
        inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(tfdist.DistributedOptimizer(inner), "mse")
    if kind == "loss scale":
        inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
        model.compile(tfdist.DistributedOptimizer(inner), "mse")
    if kind == "eager":
        model.compile(model.optimizer, "mse", run_eagerly=True)
    _fit(model)
    return [v.numpy() for v in model.weights]


@pytest.mark.parametrize(
    "kind",
    [
        *("executions", "loss scale"),
        *(pytest.param(k, marks=SLOW) for k in ("plain", "accumulation", "eager")),
    ],
)
def test_steps_without_callbacks_are_compared_and_go_on(kind):
    first, second = run_ranks(_without_callbacks, 2, kind, timeout_s=60)
    for own, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(own, other)


def _trained_by_sets():
    """One optimizer reduces over all ranks, the other over this rank alone."""
    sets = [tfdist.add_process_set([rank]) for rank in range(2)]
    shared, own = tf.Variable([1.0]), tf.Variable([1.0])
    tfdist.broadcast_variables([shared, own])
    sgd = keras.optimizers.SGD
    of_all = tfdist.DistributedOptimizer(sgd(0.1))
    alone = tfdist.DistributedOptimizer(sgd(0.1), process_set=sets[tfdist.rank()])
    for _ in range(4):
        of_all.apply([tf.constant([1.0])], [shared])
        alone.apply([tf.constant([1.0 + tfdist.rank()])], [own])
    return float(shared[0]), float(own[0])


def test_variables_trained_by_process_sets_may_differ():
    (shared, own), (same, other) = run_ranks(_trained_by_sets, 2, timeout_s=60)
    assert shared == same
    assert own > other


def _uneven_loops():
    """In each epoch rank 1 has 3 steps and rank 0 has 5; then all go on equal."""
    model = _model(wrapped=False)
    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(variables)
    tfdist.broadcast_variables(model.weights + optimizer.variables)

    @tf.function
    def step(x, y):
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    x, y = _data()
    for _ in range(3):
        for _ in range(3 if tfdist.rank() else 5):
            step(x[:4], y[:4])
        last = tfdist.join()
        tfdist.broadcast_variables(model.weights + optimizer.variables, last)
    return [v.numpy() for v in model.weights]


def test_after_a_join_all_ranks_compare_in_the_same_steps():
    first, second = run_ranks(_uneven_loops, 2, timeout_s=60)
    for own, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(own, other)


def _trained_without_wrapper():
    model = _model(wrapped=False)
    _fit(model, data=tfdist.data.shard(_data(), batch_size=4))
    assert int(model.optimizer.iterations) > 0
    return exit_report.unreduced_training(tfdist.size(), 0) or ""


def test_training_without_a_wrapper_is_said_at_the_end():
    for text in run_ranks(_trained_without_wrapper, 2, timeout_s=60):
        assert "2 ranks, and no gradient was reduced" in text
