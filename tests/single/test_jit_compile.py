"""`jit_compile=True` at size 1: what XLA compiles, and which steps it does not get.

Without `libtfdist_xla.so`, also where it is built; `test_xla.py` has the other way.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

import tfdist
from tfdist.callbacks import BroadcastInitialState, LearningRateScale, MetricAverage
from tfdist.gradients import reduction, xla

RNG = np.random.default_rng(1)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def world_of_one(monkeypatch):
    monkeypatch.setattr(xla, "unusable", lambda: xla.NOT_BUILT)
    tfdist.init()
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)


def traced_for_xla():
    graph = tf.compat.v1.get_default_graph()
    return control_flow_util.GraphOrParentsInXlaContext(graph)


class Noting(keras.optimizers.SGD):
    """Notes whether its update is traced for XLA."""

    def update_step(self, gradient, variable, learning_rate):
        self.inside = [*getattr(self, "inside", []), traced_for_xla()]
        super().update_step(gradient, variable, learning_rate)


class Net(keras.Model):
    """Notes for every trace: training or not, and whether XLA compiles it."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.2)
        self.out = keras.layers.Dense(1)
        self.traces = []

    def call(self, x, training=False):
        if not tf.executing_eagerly():
            self.traces.append([bool(training), traced_for_xla()])
        x = self.norm(self.hidden(x), training=training)
        return self.out(self.drop(x, training=training))

    def forward(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        return loss, tape.gradient(loss, self.trainable_variables)


class OwnStep(Net):
    def train_step(self, data):
        loss, gradients = self.forward(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "rate": self.optimizer.learning_rate}


class LooksAfter(Net):
    """Returns the norm of the weights after the update."""

    def train_step(self, data):
        loss, gradients = self.forward(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        norm = tf.function(lambda: tf.norm(self.out.kernel))  # nested: found as well
        return {"loss": loss, "norm": norm()}


class Halving(Noting):
    """Halves the weights after each step."""

    def apply_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        super().apply_gradients(pairs)
        for _, v in pairs:
            v.assign(v * 0.5)


class LogsAVariable(Net):
    """Returns a variable, which is read when the step has ended."""

    def train_step(self, data):
        loss, gradients = self.forward(data)
        logs = {"loss": loss, "bias": self.out.bias}
        self.optimizer.apply(gradients, self.trainable_variables)
        return logs


class SetsRateAfter(OwnStep):
    def train_step(self, data):
        logs = super().train_step(data)
        self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.5)
        return logs


class InBranch(Net):
    def train_step(self, data):
        loss, gradients = self.forward(data)

        def update():
            self.optimizer.apply(gradients, self.trainable_variables)
            return loss

        return {"loss": tf.cond(loss < 1e9, update, lambda: loss)}


class WithTape(Net):
    def train_step(self, data):
        x, y = data
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def built(cls):
    model = cls()
    model(X)  # or it would be built by its first batch, which traces it once more
    model.traces.clear()
    return model


def compiled(cls, reducing=True, **options):
    optimizer = Noting(0.05)
    if reducing:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    model = built(cls)
    model.compile(optimizer, "mse", **{"jit_compile": True, **options})
    return model


def fit(model, *callbacks, **options):
    callbacks = callbacks or (BroadcastInitialState(), MetricAverage())
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, Y, callbacks=list(callbacks), **options).history


@pytest.mark.parametrize(
    ("cls", "how"),
    [
        (Net, {}),
        pytest.param(OwnStep, {"steps_per_execution": 3}, marks=pytest.mark.slow),
    ],
)
def test_forward_and_backward_are_compiled_and_the_update_is_not(cls, how, caplog):
    caplog.set_level(logging.INFO, logger="tfdist")
    model = compiled(cls, **how)
    fit(model, validation_data=(X, Y))
    assert model.traces
    assert all(in_xla for _, in_xla in model.traces)  # evaluate too
    assert {training for training, _ in model.traces} == {True, False}
    assert model.optimizer.inside
    assert not any(model.optimizer.inside)
    lines = [r for r in caplog.records if "jit_compile=True" in r.message]
    assert [r.levelname for r in lines] == ["INFO"]


def test_the_model_is_as_before_and_a_second_fit_compiles_nothing(caplog):
    caplog.set_level(logging.INFO, logger="tfdist")
    model = compiled(Net)
    fit(model)
    assert model.jit_compile is True
    assert not {"make_train_function", "train_step"} & set(vars(model))
    traces, steps = list(model.traces), int(model.optimizer.iterations)
    caplog.clear()
    fit(model)
    assert int(model.optimizer.iterations) == 2 * steps == 6
    assert model.traces == traces
    assert caplog.records == []


def test_it_holds_when_a_callback_makes_the_train_function_anew():
    model = compiled(Net)
    model.optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(0.1, 9)
    fit(model, LearningRateScale(2.0), BroadcastInitialState())
    assert [True, True] in model.traces
    assert [True, False] not in model.traces


def test_after_a_fit_that_failed_the_next_one_is_right():
    model = compiled(Net)

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(model, BroadcastInitialState(), Fails())
    model.compile(tfdist.DistributedOptimizer(Noting(0.05)), "mse", jit_compile=True)
    fit(model)
    assert "make_train_function" not in vars(model)
    assert int(model.optimizer.iterations) == 3
    model.compile(Noting(0.05), "mse", jit_compile=True)  # Keras's own, update and all
    fit(model, keras.callbacks.Callback())
    assert model.optimizer.inside and all(model.optimizer.inside)


def test_eager_models_run_without_xla():
    model = compiled(Net, run_eagerly=True, jit_compile="auto")
    fit(model)
    assert model.traces == []


def test_a_gpu_machines_automatic_xla_works(monkeypatch):
    model = built(Net)
    monkeypatch.setattr(model, "_resolve_auto_jit_compile", lambda: True)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile="auto")
    fit(model, MetricAverage())  # any of our callbacks
    assert [True, True] in model.traces


def test_a_layer_without_xla_support_turns_it_off_as_in_keras():
    with pytest.warns(UserWarning, match="doesn't support"):
        model = built(Net)
        model.drop.supports_jit = False
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", jit_compile=True)
    fit(model)
    assert model.traces
    assert not any(in_xla for _, in_xla in model.traces)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (LooksAfter, "kernel after its call of the optimizer"),
        pytest.param(
            LogsAVariable,
            "bias after its call of the optimizer",
            marks=pytest.mark.slow,
        ),
        pytest.param(InBranch, "tf.cond", marks=pytest.mark.slow),
        pytest.param(
            SetsRateAfter,
            "learning_rate after its call of the optimizer",
            marks=pytest.mark.slow,
        ),
        pytest.param(WithTape, "DistributedGradientTape", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_cannot_be_cut_runs_whole_with_a_warning(cls, reason, caplog):
    found = []
    for jit_compile in (False, True):
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        model = compiled(cls, reducing=cls is not WithTape, jit_compile=jit_compile)
        history = fit(model, epochs=2)
        found.append([*history["loss"], *[w.numpy().tolist() for w in model.weights]])
    assert found[0] == found[1]
    [record] = [r for r in caplog.records if "has no effect" in r.message]
    assert record.levelname == "WARNING"
    assert reason in record.message
    assert f"{cls.__name__}.train_step" in record.message


class MakesVariables(keras.Model):
    """Its first step builds layers, a metric, the optimizer and a variable."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        self.scale = self.shift = None

    def call(self, x):
        return self.body(x) * self.scale + self.shift

    def train_step(self, data):
        x, y = data
        if self.scale is None:
            self.scale = tf.Variable(0.5)
            self.shift = tf.Variable(tf.ones([1]))  # a tensor of the trace
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        logs = self.compute_metrics(x, y, y_pred)
        variables = self.body.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables, weight=1)
        return {**logs, **self.after()}

    def after(self):
        return {"rate": self.optimizer.learning_rate}


class MakesVariablesOnly(MakesVariables):
    def after(self):
        return {}


@pytest.mark.parametrize(
    ("cls", "library", "line"),
    [
        (MakesVariables, False, "has no effect"),
        pytest.param(MakesVariables, True, "has no effect", marks=pytest.mark.slow),
        pytest.param(
            *(MakesVariablesOnly, True, "run outside XLA, because"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_variables_of_an_abandoned_trace_have_values(
    cls, library, line, monkeypatch, caplog
):
    if library:  # the weight is refused; what was traced for XLA until then is lost
        monkeypatch.setattr(xla, "unusable", lambda: None)
    caplog.set_level(logging.INFO, logger="tfdist")
    found = []
    for jit_compile in (False, True):
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        model = cls()
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(rate))
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
        history = fit(model, MetricAverage(), epochs=2)
        found.append([*history.values(), *[w.numpy() for w in model.weights]])
        assert {"loss", "mae"} <= set(history)
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    [record] = [r for r in caplog.records if "jit_compile=True" in r.message]
    assert line in record.message


def test_sparse_gradients_and_weights_of_samples_cross_the_cut():
    ids = RNG.integers(0, 7, size=(len(X), 3))
    found = []
    for jit_compile in (False, True):
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1))
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        weights = np.linspace(0, 1, len(X))
        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        callbacks = [BroadcastInitialState()]
        model.fit(ids, Y, sample_weight=weights, callbacks=callbacks, **options)
        found.append([w.numpy() for w in model.weights])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Weighted(Net):
    """Its weight of a batch is a number, or is computed in the step."""

    def train_step(self, data):
        loss, gradients = self.forward(data)
        weight = tf.shape(data[0])[0] if self.computed else 3
        variables = self.trainable_variables
        self.optimizer.apply(gradients, variables, weight=weight)
        return {"loss": loss}


@pytest.mark.parametrize(
    "computed", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_weights_of_batches_cross_the_cut(computed, monkeypatch):
    seen = []

    def share_of(weight, process_set, name):
        assert not traced_for_xla()
        seen.append(weight)
        return tf.constant(1.0, tf.float64)

    monkeypatch.setattr(reduction, "share_of", share_of)
    model = compiled(Weighted)
    model.computed = computed
    fit(model)
    assert [True, True] in model.traces
    assert seen
    assert all(tf.is_tensor(w) if computed else w == 3 for w in seen)


def test_without_a_callback_both_ways_out_are_named():
    model = compiled(Net)
    words = r"(?s)BroadcastInitialState\(\).*jit_compile=False"
    with pytest.raises(NotImplementedError, match=words):
        fit(model, keras.callbacks.Callback())
    assert int(model.optimizer.iterations) == 0


def test_an_apply_gradients_of_the_class_runs_after_what_is_compiled():
    weights = []
    for how in ({"jit_compile": True}, {"run_eagerly": True}):
        keras.utils.set_random_seed(2)
        model, optimizer = built(Net), tfdist.DistributedOptimizer(Halving(0.05))
        model.drop.rate = 0.0  # XLA has other random numbers
        model.compile(optimizer, "mse", **how)
        fit(model, BroadcastInitialState())
        assert all(in_xla for _, in_xla in model.traces)
        assert set(optimizer.inside) == {False}
        weights.append([w.numpy() for w in model.trainable_weights])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert np.abs(weights[0][0]).max() < 0.3  # halved three times


class Scaling(keras.optimizers.SGD):
    """Its methods take an argument of their own, which Keras's do not know."""

    def apply(self, grads, trainable_variables=None, scale=1.0):
        super().apply([g * scale for g in grads], trainable_variables)


class ScalingPairs(keras.optimizers.SGD):
    """The same of pairs."""

    def apply_gradients(self, grads_and_vars, scale=1.0):
        super().apply_gradients([(g * scale, v) for g, v in grads_and_vars])


class Scaled(Net):
    """Gives it in the step: a number, or what is computed there."""

    def train_step(self, data):
        loss, gradients = self.forward(data)
        scale = 0.5 + 0.0 * loss if self.computed else 0.5
        pairs = zip(gradients, self.trainable_variables, strict=True)
        if isinstance(self.optimizer, ScalingPairs):
            self.optimizer.apply_gradients(pairs, scale=scale)
        else:
            self.optimizer.apply(*zip(*pairs, strict=True), scale=scale)
        return {"loss": loss}


@pytest.mark.parametrize(
    "own_class", [pytest.param(Scaling, marks=pytest.mark.slow), ScalingPairs]
)
def test_arguments_of_the_class_reach_its_methods(own_class):
    weights = []
    eager, reducing = {"run_eagerly": True}, tfdist.DistributedOptimizer
    for computed, wrap, callback, how in (
        (False, lambda plain: plain, keras.callbacks.Callback, eager),
        (False, reducing, BroadcastInitialState, eager),
        (True, reducing, BroadcastInitialState, {"jit_compile": True}),
    ):
        keras.utils.set_random_seed(2)
        model = built(Scaled)
        model.computed, model.drop.rate = computed, 0.0
        model.compile(wrap(own_class(0.05)), "mse", **how)
        fit(model, callback())
        weights.append([w.numpy() for w in model.trainable_weights])
    for a, b, c in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
