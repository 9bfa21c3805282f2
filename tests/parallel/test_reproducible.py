"""A result depends on inputs and configuration, never on arrival or fusion."""

import hashlib
import itertools
import random
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

RANKS = 4
SIZES = [1, 3, 63, 64, 257, 1000, 4099, 20000, 70001, 150000]


def values(dtype, rank, index):
    rng = np.random.default_rng([rank, index])
    return tf.cast(rng.normal(size=SIZES[index]).astype("float32"), dtype)


def reduce_late(dtype, run):
    """Submits every tensor from its own thread, after a random delay of 0-20 ms."""
    dtype = tf.as_dtype(dtype)
    delays = random.Random(1000 * run + tfdist.rank())
    waits = [delays.uniform(0, 0.02) for _ in SIZES]
    inputs = [values(dtype, tfdist.rank(), i) for i in range(len(SIZES))]
    results = [None] * len(SIZES)

    def submit(index):
        time.sleep(waits[index])
        results[index] = tfdist.allreduce(inputs[index], name=f"late.{index}")

    threads = [threading.Thread(target=submit, args=[i]) for i in range(len(SIZES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    digest = hashlib.sha256()
    for result in results:
        digest.update(tf.bitcast(result, "uint8").numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def test_delays_and_the_fusion_threshold_do_not_change_a_bit(dtype):
    seen = set()
    for fusion_bytes in (0, 1 << 20, 64 << 20):
        for run in range(2):
            hashes = run_ranks(
                reduce_late,
                RANKS,
                dtype,
                run,
                env={"TFDIST_FUSION_BYTES": str(fusion_bytes)},
            )
            seen.update(hashes)
    assert len(seen) == 1


def half_sum(dtype):
    dtype = tf.as_dtype(dtype)
    own = values(dtype, tfdist.rank(), 7)
    reduced = tfdist.allreduce(own, op=tfdist.ReduceOp.SUM)
    exact = tf.cast(values(dtype, 0, 7), tf.float32)
    for rank in range(1, tfdist.size()):
        exact += tf.cast(values(dtype, rank, 7), tf.float32)
    expected = tf.cast(exact, dtype)
    return bool(
        tf.reduce_all(tf.bitcast(reduced, "uint16") == tf.bitcast(expected, "uint16"))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_the_float32_sum_rounded_once(dtype):
    assert all(run_ranks(half_sum, RANKS, dtype))


GROUP = [3, 1000, 64 * 1024, 300_001, 7, 500_000, 1, 262_144, 400_000]  # about 6 MB


def gradients_of_a_group(dtype, runs):
    """A group of gradients, each ready after a random delay; a hash for each run."""
    dtype = tf.as_dtype(dtype)
    rank = tfdist.rank()
    rng = np.random.default_rng([7, rank])
    factors = [tf.cast(rng.normal(size=n).astype("float32"), dtype) for n in GROUP]
    variables = [tf.Variable(tf.ones([n], dtype)) for n in GROUP]
    delays = random.Random(0)

    def wait(x):
        time.sleep(delays.uniform(0, 0.004))
        return x

    @tf.custom_gradient
    def late(x):
        def gradient(upstream):
            later = tf.numpy_function(wait, [upstream], upstream.dtype)
            return tf.ensure_shape(later, upstream.shape)

        return tf.identity(x), gradient

    @tf.function
    def step():
        with tfdist.DistributedGradientTape() as tape:
            pairs = zip(variables, factors, strict=True)
            losses = [tf.reduce_sum(late(v * 1) * f) for v, f in pairs]
            loss = tf.add_n(losses)
        return tape.gradient(loss, variables)

    hashes = []
    for run in range(runs):
        delays.seed(100 * run + rank)
        digest = hashlib.sha256()
        for gradient in step():
            digest.update(tf.bitcast(gradient, "uint8").numpy().tobytes())
        hashes.append(digest.hexdigest())
    return hashes


# Bytes that are fused, bytes of a bucket.
CUTS = list(itertools.product((0, 1 << 20, 64 << 20), (8 << 20, 1 << 20)))


@pytest.mark.parametrize(
    ("dtype", "cuts"),
    [
        pytest.param("float32", [(0, 8 << 20), (64 << 20, 1 << 20)], id="sample"),
        pytest.param("float32", CUTS, id="float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", CUTS, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_delays_and_the_cut_into_buckets_do_not_change_a_bit_of_a_group(dtype, cuts):
    seen = set()
    for fusion_bytes, bucket_bytes in cuts:
        results = run_ranks(
            gradients_of_a_group,
            RANKS,
            dtype,
            3,
            env={
                "TFDIST_FUSION_BYTES": str(fusion_bytes),
                "TFDIST_BUCKET_BYTES": str(bucket_bytes),
            },
        )
        for hashes in results:
            seen.update(hashes)
    assert len(seen) == 1
