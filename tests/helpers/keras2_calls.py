"""Calls with the arguments of Keras 2 that work in its mode, and what comes of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras2_mode import X, Y, linear_model, step_of

layers = keras.layers
X3 = np.ones((2, 3, 1), "float32")


def weights_of(layer, shape=(2,)):
    layer.build((None, *shape))
    return [np.asarray(w) for w in layer.get_weights()]


class Layer(layers.Layer):
    """Makes a weight in `build`, as the test says."""

    def __init__(self, *args, **named):
        super().__init__()
        self.given = args, named

    def build(self, shape):
        args, named = self.given
        self.own = self.add_weight(*args, **named)


class Count(keras.metrics.Metric):
    """A metric that makes its state as those for Keras 2 do."""

    def __init__(self, *args, **named):
        super().__init__(name="count")
        self.own = self.add_weight(*args, **named)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.own.assign_add(1.0)

    def result(self):
        return self.own


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(losses=tf.reduce_sum(x), inputs=True)
        return x


def first_input(**named):
    model = keras.Sequential([layers.LSTM(1, stateful=True, **named)])
    return tuple(model.input_shape)


def lambdas():
    seen = []
    model = linear_model("sgd")
    callback = keras.callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: seen.append("begin"),
        on_batch_end=lambda batch, logs: seen.append("end"),
    )
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    return seen


def set_states():
    layer = layers.LSTM(1, stateful=True)
    layer(X3)
    layer.reset_states([np.full((2, 1), 3.0), np.full((2, 1), 4.0)])
    return [float(v.numpy()[0, 0]) for v in layer.states]


def adapted(**named):
    layer = layers.Normalization()
    layer.adapt(np.array([[1.0], [3.0]], "float32"), **named)
    return float(np.ravel(layer.mean)[0])


def reference(**named):
    made = keras.optimizers.SGD(0.5)
    return made.add_variable_from_reference(keras.Variable([1.0, 2.0]), **named)


def compiled(**named):
    model = linear_model("sgd", **named)
    return model.steps_per_execution


def add_loss():
    layer = AddsLoss()
    layer(X)
    return layer.losses[0]


def sources(**named):
    x = keras.Input((2,))
    return len(keras.utils.get_source_inputs(layers.Dense(1)(x), **named))


def picture(**named):
    pixels = keras.utils.array_to_img(np.zeros((2, 2, 3)))
    pixels.save(picture.path)
    return keras.utils.load_img(picture.path, **named).mode


# Parameter → a call that gives it, and what comes of it.
WORKS = {
    "Input(type_spec)": (lambda: keras.Input((2,), type_spec=None).shape, (None, 2)),
    "Model.compile(pss_evaluation_shards)": (
        lambda: compiled(pss_evaluation_shards=0),
        1,
    ),
    "Model.compile(experimental_run_tf_function)": (
        lambda: compiled(experimental_run_tf_function=False),
        1,
    ),
    "Model.compile(experimental_steps_per_execution)": (
        lambda: compiled(experimental_steps_per_execution=3),
        3,
    ),
    **{
        f"Model.compile({name})": (lambda name=name: compiled(**{name: None}), 1)
        for name in ("sample_weight_mode", "target_tensors", "distribute")
    },
    "layers.Layer(input_dim)": (
        lambda: keras.Sequential([layers.Dense(1, input_dim=3)]).input_shape,
        (None, 3),
    ),
    "layers.Layer(input_shape)": (
        lambda: keras.Sequential([layers.Dense(1, input_shape=(4,))]).input_shape,
        (None, 4),
    ),
    "layers.Layer(batch_input_shape)": (
        lambda: first_input(batch_input_shape=(2, 3, 1)),
        (2, 3, 1),
    ),
    "layers.Layer(batch_size)": (
        lambda: first_input(input_shape=(3, 1), batch_size=5),
        (5, 3, 1),
    ),
    "layers.Layer(weights)": (
        lambda: weights_of(
            layers.Dense(1, weights=[np.array([[3.0], [4.0]]), np.ones(1)])
        )[0][1, 0],
        4.0,
    ),
    "layers.Layer(autocast)": (lambda: layers.Dense(1, autocast=False).autocast, False),
    "layers.Layer(implementation)": (
        lambda: layers.LSTM(1, implementation=2)(X3).shape,
        (2, 1),
    ),
    "layers.Layer(dynamic)": (lambda: layers.Dense(1, dynamic=False).units, 1),
    "layers.Layer(fused)": (
        lambda: layers.BatchNormalization(momentum=0.5, fused=True).momentum,
        0.5,
    ),
    **{
        f"layers.Layer({name})": (
            lambda name=name: layers.BatchNormalization(**{name: None}).axis,
            -1,
        )
        for name in ("virtual_batch_size", "adjustment")
    },
    "layers.Layer(robust_masking)": (
        lambda: layers.Softmax(robust_masking=True)(np.zeros((1, 2))).numpy().tolist(),
        [[0.5, 0.5]],
    ),
    "layers.Layer(softmax_robust_masking)": (
        lambda: layers.MultiHeadAttention(1, 2, softmax_robust_masking=True).num_heads,
        1,
    ),
    **{
        f"layers.{name}(time_major)": (
            lambda make=make: make(time_major=False)(X3).shape,
            (2, 1),
        )
        for name, make in {
            "GRU": lambda **named: layers.GRU(1, **named),
            "LSTM": lambda **named: layers.LSTM(1, **named),
            "RNN": lambda **named: layers.RNN(layers.SimpleRNNCell(1), **named),
        }.items()
    },
    "layers.InputLayer(type_spec)": (
        lambda: layers.InputLayer(shape=(2,), type_spec=None).batch_shape,
        (None, 2),
    ),
    "layers.InputLayer(input_shape)": (
        lambda: layers.InputLayer(input_shape=(2,)).batch_shape,
        (None, 2),
    ),
    "layers.Embedding(sparse)": (
        lambda: layers.Embedding(2, 3, sparse=False).input_dim,
        2,
    ),
    "layers.Embedding(input_length)": (
        lambda: layers.Embedding(2, 3, input_length=4).output_dim,
        3,
    ),
    "layers.Embedding(activity_regularizer)": (
        lambda: (
            layers.Embedding(2, 3, activity_regularizer="l2").activity_regularizer
            is not None
        ),
        True,
    ),
    "layers.EinsumDense(activity_regularizer)": (
        lambda: (
            layers.EinsumDense(
                "ab,bc->ac", 3, activity_regularizer="l2"
            ).activity_regularizer
            is not None
        ),
        True,
    ),
    "layers.LeakyReLU(alpha)": (
        lambda: layers.LeakyReLU(alpha=0.5).negative_slope,
        0.5,
    ),
    "layers.dot(normalize)": (
        lambda: float(layers.dot([X[:1] * 2, X[:1] * 3], 1, normalize=True)[0, 0]),
        pytest.approx(1.0),
    ),
    "layers.Layer.add_loss(losses)": (lambda: float(add_loss()), 8.0),
    **{
        f"layers.Layer.add_weight({name})": (
            lambda name=name, value=value: weights_of(
                Layer("own", shape=(1,), initializer="ones", **{name: value})
            )[0].tolist(),
            [1.0],
        )
        for name, value in {
            "use_resource": True,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "caching_device": "/cpu:0",
            "collections": ["a"],
            "getter": None,
            "partitioner": None,
            "experimental_autocast": False,
        }.items()
    },
    "metrics.Metric.add_weight(aggregation)": (
        lambda: (
            Count(
                "n", initializer="zeros", aggregation=tf.VariableAggregation.SUM
            ).own.name
        ),
        "n",
    ),
    "metrics.Metric.add_weight(synchronization)": (
        lambda: Count(
            "n", initializer="ones", synchronization=tf.VariableSynchronization.ON_READ
        ).result(),
        1.0,
    ),
    "layers.RNN.reset_states(states)": (set_states, [3.0, 4.0]),
    "layers.RNN.get_initial_state(inputs)": (
        lambda: len(
            layers.RNN(layers.LSTMCell(1)).get_initial_state(batch_size=2, inputs=None)
        ),
        2,
    ),
    "callbacks.LambdaCallback(on_batch_begin)": (lambda: lambdas()[0], "begin"),
    "callbacks.LambdaCallback(on_batch_end)": (lambda: lambdas()[1], "end"),
    "callbacks.ProgbarLogger(count_mode)": (
        lambda: type(keras.callbacks.ProgbarLogger(count_mode="steps")).__name__,
        "ProgbarLogger",
    ),
    "callbacks.ProgbarLogger(stateful_metrics)": (
        lambda: type(keras.callbacks.ProgbarLogger(stateful_metrics=["a"])).__name__,
        "ProgbarLogger",
    ),
    "callbacks.TensorBoard(batch_size)": (
        lambda: keras.callbacks.TensorBoard("logs", batch_size=32).log_dir,
        "logs",
    ),
    "callbacks.TensorBoard(write_grads)": (
        lambda: keras.callbacks.TensorBoard("logs", write_grads=False).log_dir,
        "logs",
    ),
    "callbacks.BackupAndRestore(save_before_preemption)": (
        lambda: (
            keras.callbacks.BackupAndRestore(
                "kept", save_before_preemption=False
            ).backup_dir
        ),
        "kept",
    ),
    "activations.relu(alpha)": (
        lambda: float(keras.activations.relu(tf.constant(-2.0), alpha=0.25)),
        -0.5,
    ),
    "activations.deserialize(name)": (
        lambda: keras.activations.deserialize(name="relu").__name__,
        "relu",
    ),
    "utils.to_categorical(y)": (
        lambda: keras.utils.to_categorical(y=[1], num_classes=2).tolist(),
        [[0.0, 1.0]],
    ),
    "utils.to_categorical(dtype)": (
        lambda: keras.utils.to_categorical([0], 2, dtype="float32").tolist(),
        [[1.0, 0.0]],
    ),
    "optimizers.Optimizer.build(var_list)": (
        lambda: keras.optimizers.SGD(0.5).build(var_list=[keras.Variable(1.0)]),
        None,
    ),
    "optimizers.Optimizer.add_variable_from_reference(model_variable)": (
        lambda: (
            keras.optimizers.SGD(0.5)
            .add_variable_from_reference(
                model_variable=keras.Variable([1.0, 2.0]), variable_name="m"
            )
            .shape
        ),
        (2,),
    ),
    "optimizers.Optimizer.add_variable_from_reference(variable_name)": (
        lambda: reference(variable_name="m").name.endswith("m"),
        True,
    ),
    "optimizers.Optimizer.add_variable_from_reference(shape)": (
        lambda: reference(name="m", shape=None).shape,
        (2,),
    ),
    "optimizers.Optimizer.add_variable_from_reference(initial_value)": (
        lambda: reference(name="m", initial_value="ones").numpy().tolist(),
        [1.0, 1.0],
    ),
    "optimizers.Optimizer(jit_compile)": (
        lambda: step_of(linear_model(keras.optimizers.SGD(0.5, jit_compile=True))),
        0.5,
    ),
    **{
        f"optimizers.Optimizer({name})": (
            lambda name=name, value=value: getattr(
                keras.optimizers.SGD(0.5, **{"use_ema": True, name: value}), name
            ),
            value,
        )
        for name, value in {
            "name": "mine",
            "weight_decay": 0.5,
            "clipnorm": 1.0,
            "clipvalue": 2.0,
            "global_clipnorm": 3.0,
            "use_ema": True,
            "ema_momentum": 0.5,
            "ema_overwrite_frequency": 2,
        }.items()
    },
    "layers.Normalization.adapt(batch_size)": (lambda: adapted(batch_size=2), 2.0),
    "layers.Normalization.adapt(steps)": (lambda: adapted(steps=None), 2.0),
    "utils.get_source_inputs(layer)": (lambda: sources(layer=None), 1),
    "utils.get_source_inputs(node_index)": (lambda: sources(node_index=None), 1),
    "utils.load_img(grayscale)": (lambda: picture(grayscale=False), "RGB"),
    "Sequential(layers)": (
        lambda: len(keras.Sequential(layers=[layers.Dense(1)]).layers),
        1,
    ),
    "Sequential(name)": (lambda: keras.Sequential(name="mine").name, "mine"),
}
