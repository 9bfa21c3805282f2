"""Arguments of Keras 2 that Keras 3 lacks: each has its effect, or an error."""

import keras
import pytest
import tensorflow as tf
from helpers import keras2_table
from helpers.keras2_calls import WORKS, X3, adapted, compiled, picture
from helpers.keras2_mode import X, Y, linear_model, mode  # noqa: F401

from tfdist.horovod import keras2

layers = keras.layers
# Value that has no counterpart → words of the error.
REFUSED = {
    "layers.Layer(dynamic)": (lambda: layers.Dense(1, dynamic=True), "run_eagerly"),
    "layers.Layer(virtual_batch_size)": (
        lambda: layers.BatchNormalization(virtual_batch_size=2),
        "without it",
    ),
    "layers.LSTM(time_major)": (lambda: layers.LSTM(1, time_major=True), "swapaxes"),
    "layers.Embedding(sparse)": (
        lambda: layers.Embedding(2, 3, sparse=True),
        "sparse=True",
    ),
    "layers.Layer.add_metric(value)": (
        lambda: layers.Dense(1).add_metric(value=1.0, name="a"),
        "metric",
    ),
    "layers.Layer.add_metric(name)": (
        lambda: layers.Dense(1).add_metric(1.0, name="a"),
        "metric",
    ),
    "layers.RNN.call(constants)": (
        lambda: layers.SimpleRNN(1)(X3, constants=[X3]),
        "constants",
    ),
    "layers.RNN.get_initial_state(inputs)": (
        lambda: layers.RNN(layers.LSTMCell(1)).get_initial_state(inputs=X3),
        "batch_size",
    ),
    "Model.compile(sample_weight_mode)": (
        lambda: compiled(sample_weight_mode="temporal"),
        "shape of y",
    ),
    "Model.save(save_format)": (
        lambda: linear_model("sgd").save("m", save_format="tf"),
        "save_format",
    ),
    "Model.save(signatures)": (
        lambda: linear_model("sgd").save("m.keras", signatures=[1]),
        "model.export",
    ),
    "callbacks.BackupAndRestore(save_before_preemption)": (
        lambda: keras.callbacks.BackupAndRestore("a", save_before_preemption=True),
        "tfdist.callbacks.Checkpoint",
    ),
    "callbacks.TensorBoard(write_grads)": (
        lambda: keras.callbacks.TensorBoard(write_grads=True),
        "tf.summary",
    ),
    "datasets.mnist.load_data(cache_dir)": (
        lambda: keras.datasets.mnist.load_data(cache_dir="a"),
        "KERAS_HOME",
    ),
    "initializers.serialize(use_legacy_format)": (
        lambda: keras.initializers.serialize(
            keras.initializers.Zeros(), use_legacy_format=True
        ),
        "without it",
    ),
    "layers.Normalization.adapt(steps)": (lambda: adapted(steps=1), "take"),
    "utils.load_img(grayscale)": (lambda: picture(grayscale=True), "color_mode"),
    "utils.plot_model(layer_range)": (
        lambda: keras.utils.plot_model(linear_model("sgd"), layer_range=["a"]),
        "without it",
    ),
    "utils.to_categorical(dtype)": (
        lambda: keras.utils.to_categorical([0], 2, dtype="int8"),
        "astype",
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture.path = str(tmp_path / "picture.png")


@pytest.mark.parametrize("name", WORKS)
def test_it_works_or_changes_nothing(name):
    call, expected = WORKS[name]
    assert call() == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_says_what_to_write(name):
    call, words = REFUSED[name]
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=words):
        call()


def test_files_of_models_take_them(tmp_path):
    model = linear_model("sgd")
    model.save(tmp_path / "m.h5", save_format="h5", options=None, save_traces=False)
    model.save_weights(tmp_path / "m.weights.h5", options=None)
    model.layers[-1].kernel.assign([[7.0], [7.0]])
    model.load_weights(tmp_path / "m.weights.h5", options=None)
    assert model.get_weights()[0].tolist() == [[1.0], [1.0]]
    model.layers[-1].kernel.assign([[7.0], [7.0]])
    model.load_weights(tmp_path / "m.h5", by_name=True)
    assert model.get_weights()[0].tolist() == [[1.0], [1.0]]
    keras.models.save_model(model, tmp_path / "m.keras", save_format="keras")
    assert (tmp_path / "m.keras").is_file()


def test_metrics_of_a_batch_go_on_where_they_are_not_reset():
    model = linear_model(keras.optimizers.SGD(0.0), metrics=["mae"])
    assert model.train_on_batch(X * 3, Y)[1] == 6.0
    assert model.train_on_batch(X, Y, reset_metrics=True, return_dict=True)["mae"] == 2
    assert model.test_on_batch(X, Y)[1] == 2.0
    assert model.test_on_batch(X * 2, Y, reset_metrics=False)[1] == 3.0
    assert model.train_on_batch(X * 3, Y, reset_metrics=False)[1] == 4.0
    assert model.test_on_batch(X, Y)[1] == 2.0


def test_a_loss_takes_the_reductions_of_keras_2():
    class Mine(keras.losses.Loss):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)

        def call(self, y_true, y_pred):
            return tf.abs(y_true - y_pred)

    for loss in (Mine("none"), Mine(reduction=keras.losses.Reduction.NONE, name="a")):
        assert loss(tf.zeros([2]), tf.constant([1.0, 3.0])).numpy().tolist() == [1, 3]
    for loss in (Mine("auto", "a"), Mine(reduction="auto"), Mine(name="a")):
        assert float(loss(tf.zeros([2]), tf.constant([1.0, 3.0]))) == 2.0


def test_a_layer_without_a_constructor_is_saved_and_loaded():
    """Its configuration is made from the parameters of Keras's own constructor."""

    @keras.saving.register_keras_serializable("test")
    class Twice(layers.Layer):
        def call(self, x):
            return 2 * x

    config = keras.saving.serialize_keras_object(Twice(name="twice"))
    keras2.deactivate()
    assert config == keras.saving.serialize_keras_object(Twice(name="twice"))
    assert keras.saving.deserialize_keras_object(config).name == "twice"


def test_every_parameter_of_the_table_is_here():
    keras2.deactivate()
    given = {*WORKS, *REFUSED}
    of_files = ("Model.load_weights", "Model.save", "Model.save_weights", "models.save")
    of_batches = ("Model.train_on_batch", "Model.test_on_batch")
    # One function for all of them, of which one is called above.
    alike = ("use_legacy_format)", "model_name)", "jit_compile)", "cache_dir)")
    alike += ("layer_range)", "adapt(batch_size)", "adapt(steps)")
    reading = ("(max_queue_size)", "(workers)", "(use_multiprocessing)")
    missing = [
        name
        for name, test in keras2_table.parameters_of_tests()
        if test == keras2_table.ARGUMENTS
        and name not in given
        and not name.startswith((*of_files, *of_batches))
        and not name.endswith((*alike, *reading))
    ]
    assert not missing, "\n".join(missing)
