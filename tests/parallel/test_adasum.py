"""Adasum: collective, tape and optimizer, against NumPy in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import in_float64
from helpers.ranks import run_ranks

import tfdist
from tfdist import ReduceOp
from tfdist.collectives.tf_ops import emit

SHAPES = [(), (1,), (0, 3), (5, 3), (700,), (40, 33)]
STEPS = 50


def pair(a, b):
    """The rule of Horovod's description, for two arrays."""
    dot = np.vdot(a, b)
    ratios = [dot / (2 * np.vdot(x, x)) if np.vdot(x, x) else 0.0 for x in (a, b)]
    return (1 - ratios[0]) * a + (1 - ratios[1]) * b


def tree(values):
    """Neighbours are combined, until one array is left."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [pair(a, b) for a, b in pairs]
    return values[0]


def drawn(rank, dtype="float64"):
    rng = np.random.default_rng([4, rank])
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]


def reduced(dtype, process_set=None):
    own = [tf.constant(value) for value in drawn(tfdist.rank())]
    own = [tf.cast(value, dtype) for value in own]
    options = {"op": ReduceOp.ADASUM, "process_set": process_set}
    together = tfdist.grouped_allreduce(own, **options)
    alone = [tfdist.allreduce(x, **options) for x in own]
    compiled = tf.function(lambda: tfdist.grouped_allreduce(own, **options))()
    scaled = tfdist.allreduce(own[-1], prescale=0.5, postscale=4.0, **options)
    found = [[tf.cast(x, tf.float64).numpy() for x in g] for g in (together, alone)]
    found.append([tf.cast(x, tf.float64).numpy() for x in compiled])
    return [*found, tf.cast(scaled, tf.float64).numpy()]


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"),
    [
        (4, "float32", 1e-6),
        (2, "bfloat16", 8e-3),
        pytest.param(2, "float32", 1e-6, marks=pytest.mark.slow),
        pytest.param(8, "float64", 1e-14, marks=pytest.mark.slow),
        pytest.param(4, "float16", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_each_tensor_is_combined_by_the_tree(size, dtype, tolerance):
    ranks = run_ranks(reduced, size, dtype, timeout_s=60)
    rounded = [
        [tf.cast(tf.cast(x, dtype), tf.float64).numpy() for x in drawn(rank)]
        for rank in range(size)
    ]
    wanted = [tree([own[i] for own in rounded]) for i in range(len(SHAPES))]
    for together, alone, compiled, scaled in ranks:
        for found in (together, alone, compiled):
            for one, known, first in zip(found, wanted, ranks[0][0], strict=True):
                assert one.tobytes() == first.tobytes()
                scale = np.max(np.abs(known), initial=1e-30)
                np.testing.assert_allclose(one, known, rtol=0, atol=tolerance * scale)
        np.testing.assert_allclose(scaled, 2 * together[-1], rtol=2 * tolerance)


def of_a_process_set():
    process_set = tfdist.add_process_set([0, 2])
    if tfdist.rank() == 1:
        with pytest.raises(ValueError, match="needs 1, 2, 4, 8, ... ranks"):
            tfdist.allreduce(tf.constant([1.0]), op=ReduceOp.ADASUM)
        return None
    vector = tf.constant([1.0, 0.0] if tfdist.rank() == 0 else [0.0, 2.0])
    return tfdist.allreduce(vector, op=ReduceOp.ADASUM, process_set=process_set).numpy()


def test_a_process_set_of_two_ranks_of_three():
    found = run_ranks(of_a_process_set, 3, timeout_s=60)
    assert found[0].tolist() == found[2].tolist() == [1.0, 2.0]


def refusals():
    with pytest.raises(ValueError, match=r"power of two\), got 3"):
        tfdist.allreduce(tf.constant([1.0]), op=ReduceOp.ADASUM)
    with pytest.raises(ValueError, match=r"power of two\), got 3"):
        tfdist.DistributedGradientTape(op=ReduceOp.ADASUM)
    with pytest.raises(ValueError, match=r"power of two\), got 3"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), op=ReduceOp.ADASUM)
    # A step that was traced with another number of ranks:
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs 1, 2, 4, 8"):
        emit.allreduce([tf.constant([1.0])], "x", ReduceOp.ADASUM, "1.0", "1.0", None)
    return tfdist.allreduce(tf.constant(1.0)).numpy()  # the job goes on


def test_numbers_of_ranks_that_are_no_power_of_two_are_refused():
    assert run_ranks(refusals, 3, timeout_s=60) == [1.0] * 3


def losses_of(rank):
    """A linear regression; each rank has its own samples, by step."""
    rng = np.random.default_rng([7, rank])
    x = rng.standard_normal((STEPS, 6, 5))
    return x, np.sin(x.sum(axis=-1, keepdims=True)) + 0.1 * rng.standard_normal(
        (STEPS, 6, 2)
    )


def gradients_of(w, b, x, y):
    """Of the mean over samples and outputs of the squared error."""
    error = 2 * (x @ w + b - y) / y.size
    return [x.T @ error, error.sum(axis=0)]


@in_float64
def trained(size, way):
    """Weights after 50 steps, by the tape or by the optimizer."""
    keras.utils.clear_session()
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")]
    )
    optimizer = keras.optimizers.SGD(0.125, momentum=0.875)  # exact in float32
    if way == "optimizer":
        optimizer = tfdist.DistributedOptimizer(optimizer, op=ReduceOp.ADASUM)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        tape_of = (
            (lambda: tfdist.DistributedGradientTape(op=ReduceOp.ADASUM))
            if way == "tape"
            else tf.GradientTape
        )
        with tape_of() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)

    for x, y in zip(*losses_of(tfdist.rank()), strict=True):
        step(tf.constant(x), tf.constant(y))
    return [v.numpy() for v in model.trainable_variables]


def reference(size, way):
    weights = [np.ones((5, 2)), np.zeros(2)]
    data = [losses_of(rank) for rank in range(size)]
    shared = [np.zeros((5, 2)), np.zeros(2)]
    momenta = [[np.zeros((5, 2)), np.zeros(2)] for _ in range(size)]
    for i in range(STEPS):
        grads = [gradients_of(*weights, x[i], y[i]) for x, y in data]
        if way == "tape":
            combined = [tree([own[k] for own in grads]) for k in range(2)]
            shared = [
                0.875 * m - 0.125 * g for m, g in zip(shared, combined, strict=True)
            ]
            weights = [w + m for w, m in zip(weights, shared, strict=True)]
            continue
        momenta = [
            [0.875 * m - 0.125 * g for m, g in zip(*own, strict=True)]
            for own in zip(momenta, grads, strict=True)
        ]
        weights = [w + tree([m[k] for m in momenta]) for k, w in enumerate(weights)]
    return weights


@pytest.mark.parametrize("way", ["tape", "optimizer"])
@pytest.mark.parametrize(
    "size",
    [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))],
)
def test_fifty_steps_are_those_of_numpy(size, way):
    ranks = run_ranks(trained, size, size, way, timeout_s=100)
    for found in ranks:
        for one, first, known in zip(
            found, ranks[0], reference(size, way), strict=True
        ):
            assert one.tobytes() == first.tobytes()
            np.testing.assert_allclose(one, known, rtol=1e-6)


def fitted():
    keras.utils.set_random_seed(tfdist.rank())
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    )
    adam = keras.optimizers.Adam(0.01)
    model.compile(
        tfdist.DistributedOptimizer(adam, op=ReduceOp.ADASUM), "mse", jit_compile=False
    )
    rng = np.random.default_rng(tfdist.rank())
    x = rng.standard_normal((64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ]
    options = {"batch_size": 8, "verbose": 0, "callbacks": callbacks}
    history = model.fit(x, y, epochs=8, **options)
    losses = history.history["loss"]
    slots = [np.array(v) for v in adam.variables if "momentum" in v.path]
    model.fit(x, y, epochs=0, **options)  # a later fit does not broadcast them
    same = [np.array(v) for v in adam.variables if "momentum" in v.path]
    assert all((a == b).all() for a, b in zip(slots, same, strict=True))
    return [v.numpy() for v in model.weights], losses, slots


def test_fit_trains_the_same_weights_with_slots_of_each_rank(monkeypatch):
    monkeypatch.setenv("TFDIST_WEIGHT_CHECK", "every_step")
    (weights, losses, slots), (others, _, other_slots) = run_ranks(
        fitted, 2, timeout_s=100
    )
    assert losses[-1] < losses[0] / 2
    for one, other in zip(weights, others, strict=True):
        assert one.tobytes() == other.tobytes()
    assert any((a != b).any() for a, b in zip(slots, other_slots, strict=True))


def with_a_scale():
    """One rank overflows once: both skip the step, and halve the scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = tfdist.DistributedOptimizer(
            keras.optimizers.SGD(0.5), op=ReduceOp.ADASUM
        )
        v = keras.Variable([1.0, 1.0], name="v")
        optimizer.build([v])
        optimizer.scale_loss(tf.constant(1.0))
        scale = float(optimizer.dynamic_scale.numpy())
        bad = np.inf if tfdist.rank() == 1 else 1.0
        optimizer.apply([tf.constant([bad, 0.0])], [v])
        skipped = v.numpy().tolist(), float(optimizer.dynamic_scale.numpy()) / scale
        own = [scale / 2, 0.0] if tfdist.rank() == 0 else [0.0, scale / 2]
        optimizer.apply([tf.constant(own)], [v])
        return [*skipped, v.numpy().tolist()]
    finally:
        keras.config.set_dtype_policy("float32")


def test_all_ranks_skip_a_step_that_one_cannot_take():
    for found in run_ranks(with_a_scale, 2, timeout_s=60):
        assert found == [[1.0, 1.0], 0.5, [0.5, 0.5]]


def with_missing_gradients():
    """An embedding with rows that occur twice; rank 1 has no gradient of the vector."""
    table = keras.Variable(np.ones((3, 2), "float32"), name="table")
    vector = tf.Variable([1.0, 1.0], name="vector")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=ReduceOp.ADASUM
    )
    optimizer.build([table, vector])
    is_first = tfdist.rank() == 0
    row = tf.IndexedSlices([[0.25, 0.0], [0.25, 0.0]], [1, 1], [3, 2])
    optimizer.apply(
        [row, tf.constant([0.5, 0.0])] if is_first else [None, None], [table, vector]
    )
    return table.numpy().tolist(), vector.numpy().tolist()


def test_a_rank_without_gradients_gets_the_changes_of_the_others():
    for table, vector in run_ranks(with_missing_gradients, 2, timeout_s=60):
        assert table == [[1, 1], [0.5, 1], [1, 1]]
        assert vector == [0.5, 1]


def with_local_variables():
    own = keras.Variable([1.0], name="own")
    shared = keras.Variable([1.0, 1.0], name="shared")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=ReduceOp.ADASUM, local_variables=[own]
    )
    grads = [[1.0, 0.0], [0.0, 1.0]][tfdist.rank()]
    optimizer.apply([tf.constant([1e-9]), tf.constant(grads)], [own, shared])
    own.assign([1e-9])
    optimizer.apply([tf.constant([-1.0]), tf.constant([0.0, 0.0])], [own, shared])
    return own.numpy().tolist(), shared.numpy().tolist()


def test_local_variables_keep_the_step_of_their_rank():
    for own, shared in run_ranks(with_local_variables, 2, timeout_s=60):
        assert own == [1.0]
        assert shared == [0.0, 0.0]
