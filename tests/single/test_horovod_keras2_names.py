"""The public names of Keras 2.15: each works, warns, or says its new spelling."""

import importlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import keras2_table
from helpers.keras2_mode import X, Y, linear_model, mode, told  # noqa: F401

from tfdist.horovod import keras2
from tfdist.horovod.keras2 import _removed_names

FROM = "from {module} import {name}"


@pytest.fixture
def outside():
    """Out of the mode in which the other tests run."""
    keras2.deactivate()


def test_a_name_without_a_word_is_an_empty_cell(monkeypatch):
    assert "Leave it out" in keras2_table.in_mode("callbacks.BaseLogger")
    monkeypatch.delitem(_removed_names.GONE["callbacks"], "BaseLogger")
    assert keras2_table.in_mode("callbacks.BaseLogger") == ""


@pytest.mark.parametrize("face", ["keras", "tensorflow.keras"])
def test_names_can_be_imported(face):
    losses = importlib.import_module(f"{face}.losses")
    for name in ("mse", "MSE", "mean_squared_error"):
        found = float(getattr(losses, name)(tf.zeros([2]), tf.constant([1.0, 3.0])))
        assert found == 5.0
    names = {}
    for line in (
        FROM.format(module=f"{face}.metrics", name="categorical_accuracy, KLD"),
        FROM.format(module=f"{face}.layers.experimental", name="preprocessing"),
        FROM.format(module=f"{face}.layers.normalization", name="BatchNormalization"),
        FROM.format(module=f"{face}.preprocessing.text", name="Tokenizer"),
        FROM.format(module=f"{face}.optimizers.legacy", name="Adadelta"),
        FROM.format(module=f"{face}.utils", name="np_utils"),
        f"import {face}.layers.experimental.preprocessing",
    ):
        exec(line, names)
    assert names["preprocessing"].Rescaling is keras.layers.Rescaling
    assert names["BatchNormalization"] is keras.layers.BatchNormalization
    assert names["Adadelta"] is keras.optimizers.Adadelta
    assert names["np_utils"].to_categorical([1]).tolist() == [[0.0, 1.0]]
    assert names["Tokenizer"]().texts_to_sequences(["a"]) == [[]]


@pytest.mark.parametrize("face", ["keras", "tensorflow.keras"])
@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("callbacks", "BaseLogger", "Leave it out"),
        ("layers.experimental", "RandomFourierFeatures", "keras.layers.Layer"),
        ("estimator", "model_to_estimator", "model.fit"),
        ("applications.regnet", "RegNetX002", "keras-hub"),
        ("wrappers.scikit_learn", "KerasClassifier", "SKLearnClassifier"),
    ],
)
def test_an_import_says_what_to_do(face, module, name, words):
    with pytest.raises(ImportError, match=words):
        exec(FROM.format(module=f"{face}.{module}", name=name), {})


def test_other_names_are_missing_as_ever():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(FROM.format(module="keras.layers", name="nothing"), {})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras.losses.nothing
    assert not hasattr(tf.keras.callbacks, "BaseLogger")


def test_nothing_is_left_of_the_mode(outside):
    assert not hasattr(keras.losses, "mse")
    assert not hasattr(keras.layers, "experimental")
    assert "keras.layers.experimental" not in sys.modules
    assert not hasattr(keras.Variable, "ref")
    with pytest.raises(ImportError, match="cannot import name 'BaseLogger'"):
        exec(FROM.format(module="keras.callbacks", name="BaseLogger"), {})


def test_variables_have_what_a_tf_variable_has():
    v, other = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    (ref, texts) = told(v.ref)
    assert ref == v.ref() != other.ref() and {ref: 1}[v.ref()] == 1
    assert ref.deref() is v and "id(variable)" in texts[0]
    assert v.read_value().numpy().tolist() == [1.0, 2.0]
    v.assign_add([1.0, 1.0])
    v.scatter_nd_update([[0]], [7.0])
    v.load(v.read_value() + 1)
    assert v.numpy().tolist() == [8.0, 4.0]
    assert v.get_shape().as_list() == [2] and "CPU" in v.device
    assert v.is_initialized()


def test_layers_and_models_have_their_attributes():
    model = linear_model("sgd")
    layer = model.layers[-1]
    assert (layer.input_shape, layer.output_shape) == ((None, 2), (None, 1))
    assert layer.get_output_at(0) is layer.output
    assert layer.get_input_shape_at(0) == (None, 2)
    assert model.input_shape == (None, 2)
    assert (model.state_updates, layer.updates, layer.dynamic) == ([], [], False)
    assert len(layer.inbound_nodes) == 1
    done = []
    layer.add_update([lambda: done.append(1), tf.zeros([])])
    assert done == [1]
    _, texts = told(lambda: model.summary(print_fn=lambda text: None))
    assert texts == []  # Keras asks for them too
    unused = keras.layers.Dense(1)
    with pytest.raises(AttributeError, match="never been called"):
        _ = unused.output_shape
    unused.output_shape = (5,)  # as a class of the user's own may do
    assert unused.output_shape == (5,)


def test_tensorflow_and_keras_do_not_see_them(tmp_path):
    """A checkpoint asks objects whether they have slots; others ask for `graph`."""
    model = linear_model(keras.optimizers.SGD(0.0625, momentum=0.5))
    model.fit(X, Y, verbose=0)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(tmp_path / "checkpoint")
    before = model.get_weights()[0]
    model.layers[-1].kernel.assign([[9.0], [9.0]])
    saved.restore(path)
    assert np.array_equal(model.get_weights()[0], before)
    model.export(tmp_path / "exported", verbose=False)
    again = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(again.serve(X), X @ before, rtol=1e-6)
    assert "get_slot_names" not in dir(model.optimizer)


def reset_by_old_name(self):
    super(type(self), self).reset_states()
    self.total.assign_add(5.0)


@pytest.mark.parametrize("base", ["Mean", "Sum", "Metric"])
def test_a_metric_may_reset_itself_by_its_old_name(base):
    parent = getattr(keras.metrics, base)
    metric = type("Old", (parent,), {"reset_states": reset_by_old_name})()
    if base == "Metric":
        metric.total = metric.add_weight(name="total", initializer="zeros")
    metric.total.assign(3.0)
    metric.reset_state()
    assert float(metric.total) == 5.0
    plain = keras.metrics.Mean()
    plain.update_state(3.0)
    plain.reset_states()
    assert float(plain.result()) == 0.0


def test_a_model_forgets_the_states_of_its_layers():
    layer = keras.layers.LSTM(1, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 1)), layer])
    model(np.ones((2, 3, 1), "float32"))
    assert float(layer.states[0].numpy()[0, 0]) != 0.0
    model.reset_states()
    assert float(layer.states[0].numpy()[0, 0]) == 0.0


@pytest.mark.parametrize("scaled", [False, True])
def test_minimize_takes_a_step(scaled):
    w = keras.Variable([3.0])
    optimizer = keras.optimizers.SGD(0.5)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    (_, texts) = told(lambda: optimizer.minimize(lambda: w * w, [w]))
    assert w.numpy().tolist() == [0.0] and "apply_gradients" in texts[0]
    w.assign([3.0])
    with tf.GradientTape() as tape:
        loss = w * w
    optimizer.minimize(loss, [w], tape=tape)
    assert w.numpy().tolist() == [0.0]
    if not scaled:
        w.assign([3.0])
        ((grad, variable),) = optimizer.compute_gradients(lambda: w * w, lambda: [w])
        assert grad.numpy().tolist() == [6.0] and variable is w
        with pytest.raises(ValueError, match="tape is required"):
            optimizer.minimize(loss, [w])


def old_dense(self, grad, var, apply_state=None):
    var.assign_sub(grad)


def old_step(self, gradient, variable):
    variable.assign_sub(gradient)


@pytest.mark.parametrize(
    "method", [("_resource_apply_dense", old_dense), ("update_step", old_step)]
)
@pytest.mark.parametrize("base", ["Optimizer", "SGD"])
def test_an_optimizer_written_for_keras_2_says_how_it_is_written_now(method, base):
    cls = type("Mine", (getattr(keras.optimizers, base),), dict([method]))
    with pytest.raises(NotImplementedError, match="update_step.self, gradient, var"):
        cls(name="mine")
    for name in ("add_slot", "_set_hyper", "get_slot"):
        with pytest.raises(AttributeError, match="not exist in Keras 3"):
            getattr(keras.optimizers.SGD(0.5), name)


def test_an_optimizer_written_for_keras_3_trains():
    class Mine(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, gradient * learning_rate)

    model = linear_model(Mine(learning_rate=0.0625, name="mine"))
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.get_weights()[0].tolist() == [[0.75], [0.75]]
