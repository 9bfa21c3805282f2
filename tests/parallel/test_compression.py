"""Gradients that are sent as fp16 or bf16: half the bytes, one rounding each way."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native
from tfdist.gradients import reduction
from tfdist.gradients.options import ReduceOptions

NUMPY = {"fp16": np.float16, "bf16": tf.bfloat16.as_numpy_dtype}
SHAPES = [(33, 65), (1,), (1000,), (4, 4, 4)]


def gradients_of(rank, dtype="float32"):
    rng = np.random.default_rng(rank)
    return [rng.normal(size=shape).astype(dtype) for shape in SHAPES]


def sent_bytes():
    """Data bytes that this rank has sent. A rank that leaves takes its link along."""
    sent = sum(link["data_bytes_sent"] for link in native.counters()["links"])
    tfdist.barrier()
    return sent


def reduced(compression, dtype, in_graph):
    """What comes back, its types, and the data bytes that this rank has sent."""
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]
    own = [tf.constant(g) for g in gradients_of(tfdist.rank(), dtype)]
    options = ReduceOptions(compression=compression)

    def step(*grads):
        return reduction.reduce_gradients(grads, variables, options)

    before = sent_bytes()
    found = (tf.function(step) if in_graph else step)(*own)
    return [g.numpy() for g in found], sent_bytes() - before


def sizes_and_modes():
    """Both types with all numbers of ranks, each eagerly or in a graph; or slow."""
    for size in (2, 3):
        for compression in NUMPY:
            for in_graph in (False, True):
                usual = in_graph == ((size == 3) == (compression == "fp16"))
                marks = [] if usual else [pytest.mark.slow]
                yield pytest.param(size, compression, in_graph, marks=marks)


@pytest.mark.parametrize(("size", "compression", "in_graph"), list(sizes_and_modes()))
def test_ranks_are_rounded_added_in_float32_and_rounded_once(
    size, compression, in_graph
):
    short = NUMPY[compression]
    ranks = [gradients_of(rank) for rank in range(size)]
    for found, _ in run_ranks(reduced, size, compression, "float32", in_graph):
        for i, gradient in enumerate(found):
            total = ranks[0][i].astype(short).astype(np.float32)
            for rank in range(1, size):
                total = total + ranks[rank][i].astype(short).astype(np.float32)
            expected = (total / np.float32(size)).astype(short).astype(np.float32)
            assert gradient.dtype == np.float32
            np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize(
    ("compression", "dtype", "share"),
    [
        ("bf16", "float32", 2),
        pytest.param("fp16", "float32", 2, marks=pytest.mark.slow),
        ("fp16", "float64", 4),
        pytest.param("bf16", "float64", 4, marks=pytest.mark.slow),
    ],
)
def test_the_bytes_are_exactly_those_of_the_shorter_type(compression, dtype, share):
    whole = run_ranks(reduced, 2, None, dtype, True)
    for (_, sent), (found, short) in zip(
        whole, run_ranks(reduced, 2, compression, dtype, True), strict=True
    ):
        assert sent == share * short > 0
        assert {g.dtype.name for g in found} == {dtype}


def mixed():
    """Of what the wire type would not shorten nothing changes."""
    options = ReduceOptions(compression="bf16")
    wide = tf.Variable([1.0, 2.0])
    half = tf.Variable(tf.constant([1.0, 2.0], tf.float16))
    found = reduction.reduce_gradients(
        [tf.constant([1 / 3, 1.0]), tf.constant([1e-3, 2.0], tf.float16)],
        [wide, half],
        options,
    )
    assert reduction.reduce_gradients([None], [wide], options) == [None]
    return [[g.dtype.name, g.numpy().astype(np.float64).tolist()] for g in found]


def test_shorter_gradients_are_sent_as_they_are():
    third = float(tf.cast(tf.constant(1 / 3), tf.bfloat16))
    thousandth = float(np.float16(1e-3))
    for found in run_ranks(mixed, 2):
        assert found == [
            ["float32", [third, 1.0]],
            ["float16", [thousandth, 2.0]],
        ]


def disagreeing():
    compression = "bf16" if tfdist.rank() == 1 else None
    v = tf.Variable([1.0])
    with tfdist.DistributedGradientTape(compression=compression) as tape:
        loss = v * v
    try:
        tape.gradient(loss, v)
    except tfdist.MismatchError as error:
        return str(error)
    return None


def test_ranks_that_differ_in_compression_are_told_at_once():
    for message in run_ranks(disagreeing, 2):
        assert "compression=none" in message
        assert "compression=bf16" in message


def fitted(compression, gate):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)]
    )
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.Adam(0.02), compression=compression
    )
    copied = type(optimizer).from_config(optimizer.get_config())
    model.compile(copied, "mse", jit_compile=False, run_eagerly=gate)
    x = np.random.default_rng(tfdist.rank()).normal(size=(256, 8)).astype("float32")
    before = sent_bytes()
    history = model.fit(x, x.sum(axis=1), batch_size=32, epochs=3, verbose=0)
    losses = history.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    return [w.numpy() for w in model.weights], sent_bytes() - before


@pytest.mark.parametrize("gate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fit_learns_with_half_the_bytes_and_equal_ranks(gate):
    env = {
        "TFDIST_ATOMIC_STEPS": str(int(gate)),
        "TFDIST_FUSION_BYTES": "64",
        "TFDIST_WEIGHT_CHECK": "off",  # its messages are not compressed
    }
    whole = run_ranks(fitted, 2, None, gate, env=env)
    short = run_ranks(fitted, 2, "bf16", gate, env=env)
    assert [sent for _, sent in whole] == [2 * sent for _, sent in short]
    for one, other in zip(short[0][0], short[1][0], strict=True):
        np.testing.assert_array_equal(one, other)


def overflowing():
    """A gradient beyond fp16 on one rank under a dynamic loss scale."""
    v = keras.Variable([1.0, 1.0])
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=1.0
        ),
        compression="fp16",
    )
    optimizer.build([v])
    large = 1e6 if tfdist.rank() == 1 else 1.0
    optimizer.apply([tf.constant([large, 1.0])], [v])
    return v.numpy().tolist(), float(optimizer.dynamic_scale)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    for weights, scale in run_ranks(overflowing, 2):
        assert weights == [1.0, 1.0]
        assert scale == 0.5
