"""Gradients are reduced while the backward pass still runs.

Eight equal layers of 2 MiB, default settings. The core's own clock tells when each
bucket of a step was handed over and when it was reduced: when the last gradient of a
step becomes ready, at least half of the step's bytes must have been reduced already.
"""

import collections
import re
import statistics

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS = 20
BATCH = 512  # a backward pass of some 60 ms, against 5 for the bytes
LAYERS = 8
LAYER_BYTES = 2 << 20
NAME = re.compile(r"(.+)\.(\d+)(#\d+)?")


def build_model():
    """Eight layers of 512 x 1024 or 1024 x 512 float32 weights: 2 MiB each."""
    layers = [
        keras.layers.Dense(1024 if i % 2 == 0 else 512, use_bias=False)
        for i in range(LAYERS)
    ]
    return keras.Sequential([keras.Input((512,)), *layers])


def reduced_before_last(records):
    """For each step, in order: the share of its bytes reduced before its last came.

    A name is "<group>.<bucket>", and "#<n>" for the n-th further step in one graph
    (steps_per_execution).
    """
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for record in records:
        if record["bytes"] >= LAYER_BYTES:
            group, bucket, repeat = NAME.fullmatch(record["name"]).groups()
            groups[group, repeat][bucket].append(record)
    shares = {}
    for buckets in groups.values():
        for step in zip(*buckets.values(), strict=True):
            last_us = max(r["submitted_us"] for r in step)
            done = sum(r["bytes"] for r in step if r["done_us"] <= last_us)
            shares[last_us] = done / sum(r["bytes"] for r in step)
    return [shares[last_us] for last_us in sorted(shares)]


def measure(mode):
    native.take_records()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(tfdist.rank()).normal(size=(BATCH, 512))
    x = x.astype("float32")
    model = build_model()
    if mode == "function":
        optimizer = keras.optimizers.SGD(1e-4)

        @tf.function
        def step(batch):
            with tfdist.DistributedGradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(batch)))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)

        batch = tf.constant(x)
        for _ in range(STEPS + 4):
            step(batch)
    else:
        per_call = 4 if mode == "steps_per_execution" else 1
        model.compile(
            tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-4)),
            "mse",
            steps_per_execution=per_call,
            jit_compile=False,
        )
        data = tf.data.Dataset.from_tensors((x, x)).repeat(STEPS + 4)
        model.fit(data, verbose=0)
    records = native.take_records()
    shares = reduced_before_last(records)[4:]
    assert len(shares) == STEPS
    return statistics.median(shares)


@pytest.mark.parametrize(
    "mode",
    [
        "fit",
        pytest.param("function", marks=pytest.mark.slow),
        pytest.param("steps_per_execution", marks=pytest.mark.slow),
    ],
)
def test_half_of_the_bytes_are_reduced_when_the_last_gradient_is_ready(mode):
    for share in run_ranks(measure, 2, mode, timeout_s=120):
        assert share >= 0.5
