"""Gradients are reduced while the backward pass still runs.

Eight equal layers of 2 MiB, default settings. The gradient of the first layer, which is
the last one of a step, is computed only when half of the bytes of the step have been
reduced. A reduction that waited for the end of the backward pass would never begin.
"""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS = 8
BATCH = 32
LAYERS = 8
LAYER_BYTES = 2 << 20
STEP_BYTES = LAYERS * LAYER_BYTES
BUCKET_NAME = re.compile(r".+\.\d+(#\d+)?")
TIMEOUT_S = 30


class HalfReduced(keras.layers.Layer):
    """Passes its input on; its gradient waits until half of the step is reduced.

    Attributes:
        steps: the steps whose gradients came by.
        late: those of them that waited for TIMEOUT_S in vain.
    """

    def __init__(self):
        super().__init__()
        self.steps = self.late = 0
        self._reduced_bytes = 0

    def call(self, inputs):
        @tf.custom_gradient
        def identity(x):
            def gradient(upstream):
                waited = tf.numpy_function(self._wait, [upstream], upstream.dtype)
                return tf.ensure_shape(waited, upstream.shape)

            return tf.identity(x), gradient

        return identity(inputs)

    def _wait(self, upstream):
        wanted = self.steps * STEP_BYTES + STEP_BYTES // 2
        deadline = time.monotonic() + TIMEOUT_S
        while self._reduced() < wanted:
            if self.late or time.monotonic() > deadline:
                self.late += 1
                break
            time.sleep(0.001)
        self.steps += 1
        return upstream

    def _reduced(self):
        """Bytes of the buckets that have been reduced so far."""
        for record in native.take_records():
            if record["bytes"] >= LAYER_BYTES and BUCKET_NAME.fullmatch(record["name"]):
                self._reduced_bytes += record["bytes"]
        return self._reduced_bytes


def build_model():
    """Eight layers of 512 x 1024 or 1024 x 512 float32 weights: 2 MiB each."""
    layers = [
        keras.layers.Dense(1024 if i % 2 == 0 else 512, use_bias=False)
        for i in range(LAYERS)
    ]
    layers.insert(1, HalfReduced())
    return keras.Sequential([keras.Input((512,)), *layers])


def train(mode):
    """Steps that came by and those in which half was not reduced in time."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(tfdist.rank()).normal(size=(BATCH, 512))
    x = x.astype("float32")
    model = build_model()
    native.take_records()
    if mode == "function":
        optimizer = keras.optimizers.SGD(1e-4)

        @tf.function
        def step(batch):
            with tfdist.DistributedGradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(batch)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)

        batch = tf.constant(x)
        for _ in range(STEPS):
            step(batch)
    else:
        per_call = 4 if mode == "steps_per_execution" else 1
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-4)),
            "mse",
            steps_per_execution=per_call,
            jit_compile=False,
        )
        data = tf.data.Dataset.from_tensors((x, x)).repeat(STEPS)
        model.fit(data, verbose=0)
    return [model.layers[1].steps, model.layers[1].late]


@pytest.mark.parametrize(
    "mode",
    [
        "fit",
        pytest.param("function", marks=pytest.mark.slow),
        pytest.param("steps_per_execution", marks=pytest.mark.slow),
    ],
)
def test_half_of_the_bytes_are_reduced_before_the_last_gradient(mode):
    assert run_ranks(train, 2, mode, timeout_s=120) == [[STEPS, 0], [STEPS, 0]]
