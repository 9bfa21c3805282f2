"""Horovod's gradient_predivide_factor: what no longer overflows, which bits change."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.reduction import reduce_gradients


def averaged(value, dtype, compression, factors, weighted=False):
    """The average of `value` times 1 and 1.5, for each factor."""
    rank = tfdist.rank()
    v = tf.Variable([0.0], dtype=dtype)
    found = []
    for factor in factors:
        options = ReduceOptions(
            compression=compression, gradient_predivide_factor=factor
        )
        local = tf.constant([value * (1 + rank / 2)], dtype)
        [grad] = reduce_gradients([local], [v], options, weight=1 if weighted else None)
        found.append(float(grad[0]))
    return found


@pytest.mark.parametrize(
    ("value", "dtype", "compression", "factors", "expected"),
    [
        # 98,304 and half as much more are beyond fp16, but not beyond 4 times fp16.
        (98304.0, "float32", "fp16", [1, 4, 64.0], [np.inf, 122880.0, 122880.0]),
        (98304.0, "float64", "fp16", [1, 4], [np.inf, 122880.0]),
        # 2**-26 and half as much more are below the smallest number of fp16.
        (2.0**-26, "float32", "fp16", [1, 2.0**-16], [0.0, 1.25 * 2.0**-26]),
        # The sum of two float32 is beyond float32, their average is not.
        (2e38, "float32", None, [1, 2], [np.inf, float(np.float32(2.5e38))]),
        # Half types are added in float32: 65,504 at most before and after.
        (40000.0, "float16", None, [1, 4], [49984.0, 49984.0]),
        (40000.0, "float32", "fp16", [1], [49984.0]),
    ],
)
def test_the_range_is_that_many_times_as_wide(
    value, dtype, compression, factors, expected
):
    for found in run_ranks(averaged, 2, value, dtype, compression, factors):
        assert found == expected


@pytest.mark.slow
def test_with_a_weight_too():
    for found in run_ranks(averaged, 2, 196608.0, "float32", "fp16", [1, 4], True):
        assert found == [np.inf, 245760.0]


def bits(factor, compression, sparse):
    """Of averages of random gradients on three ranks."""
    rng = np.random.default_rng(tfdist.rank())
    v = tf.Variable(tf.zeros((50, 4)))
    values = tf.constant(rng.normal(size=(50, 4)), tf.float32)
    options = ReduceOptions(
        compression=compression,
        gradient_predivide_factor=factor,
        sparse_as_dense=not sparse,
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(v, tf.range(50)) * values)
    [grad] = reduce_gradients([tape.gradient(loss, v)], [v], options)
    return tf.convert_to_tensor(grad).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "sparse"),
    [
        ("bf16", False),
        (None, False),
        (None, True),
    ],
)
def test_a_power_of_two_changes_no_bit_another_factor_rounds(compression, sparse):
    [plain, *_] = run_ranks(bits, 3, 1, compression, sparse)
    for factor in (0.25, 1024):
        for found in run_ranks(bits, 3, factor, compression, sparse):
            assert found.tobytes() == plain.tobytes()
    tolerance = 2**-7 if compression else 2**-22  # two roundings more, one of them sent
    results = run_ranks(bits, 3, 3.0, compression, sparse)
    for found in results:
        assert found.tobytes() == results[0].tobytes()
        np.testing.assert_allclose(found, plain, rtol=0, atol=4 * tolerance)
    assert results[0].tobytes() != plain.tobytes()


def trained(factor):
    """Three steps of Adam in a graph, whose gradients fp16 cannot carry."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.5), compression="fp16", gradient_predivide_factor=factor
    )
    v = tf.Variable([1.0, 2.0])
    optimizer.build([v])

    @tf.function
    def step():
        optimizer.apply([v * 1e6 * (tfdist.rank() + 1.0)], [v])

    for _ in range(3):
        step()
    return v.numpy().tolist()


@pytest.mark.slow
def test_an_optimizer_trains_where_it_could_not():
    for plain, divided in zip(
        run_ranks(trained, 2, 1.0), run_ranks(trained, 2, 1024.0), strict=True
    ):
        assert np.isnan(plain).all()
        np.testing.assert_allclose(divided, [-0.4, 0.5], atol=0.1)


def disagreeing():
    v = tf.Variable([1.0])
    factor = 2.0 if tfdist.rank() else 1.0
    try:
        options = ReduceOptions(gradient_predivide_factor=factor)
        reduce_gradients([tf.constant([2.0])], [v], options)
    except tfdist.MismatchError as error:
        return str(error)
    return None


def test_ranks_with_another_factor_are_told_at_once():
    for message in run_ranks(disagreeing, 2):
        assert "gradient_predivide_factor=2.0" in message


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), True, "2"])
def test_what_is_no_finite_number_above_0_is_refused(factor):
    with pytest.raises(ValueError, match="finite number > 0"):
        ReduceOptions(gradient_predivide_factor=factor)


def test_it_is_refused_for_sums():
    with pytest.raises(ValueError, match="AVERAGE with gradient_predivide_factor"):
        ReduceOptions(tfdist.ReduceOp.SUM, gradient_predivide_factor=2.0)
