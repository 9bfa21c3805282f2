"""Synchronised batch normalisation where models are trained: fit, half types, sets."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS, GLOBAL_BATCH = 4, 12


def images():
    rng = np.random.default_rng(13)
    x = 2.0 + rng.normal(size=(STEPS * GLOBAL_BATCH, 6, 6, 2))
    return x, np.stack([x.mean(axis=(1, 2, 3)), x[:, 0, 0, 0] * x[:, 1, 1, 1]], axis=1)


class Block(keras.layers.Layer):
    """Makes its layers when it is built."""

    def build(self, input_shape):
        self.parts = [
            keras.layers.Conv2D(3, 3),
            keras.layers.BatchNormalization(momentum=0.7),
        ]
        for part in self.parts:
            part.build(input_shape)
            input_shape = part.compute_output_shape(input_shape)

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x, training=training)
        return keras.ops.softplus(x)


class Network(keras.Model):
    """Subclassed, with a nested model and a layer that makes layers of its own."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential(
            [
                keras.layers.Conv2D(3, 2, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.8),
                keras.layers.Activation("tanh"),
            ]
        )
        self.block = Block()
        self.last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]

    def call(self, x, training=False):
        x = self.block(self.first(x, training=training), training=training)
        for layer in self.last:
            x = layer(x)
        return x


def network():
    keras.utils.set_random_seed(17)
    model = Network()
    model(np.zeros((1, 6, 6, 2)))
    return model


def with_policy(policy, function):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.utils.clear_session()  # it forgets the policy, so it comes first
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    try:
        return function()
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def weights_of(model):
    return [w.numpy() for w in model.weights]


def fitted(policy, options):
    def run():
        model = tfdist.layers.synchronize_batch_normalization(network())
        assert sum(map(tfdist.layers.is_synchronized, model._flatten_layers())) == 2
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05, 0.9))
        model.compile(optimizer, "mse", jit_compile=False, **options)
        share = tfdist.data.shard(images(), batch_size=GLOBAL_BATCH // tfdist.size())
        start = [tfdist.callbacks.BroadcastInitialState()]
        model.fit(share, epochs=2, verbose=0, shuffle=False, callbacks=start)
        layer = model.first.layers[1]
        types = [layer.compute_dtype, tf.as_dtype(layer.moving_variance.dtype).name]
        return weights_of(model), types

    return with_policy(policy, run)


def fitted_alone(policy):
    def run():
        model = network()
        model.compile(keras.optimizers.SGD(0.05, 0.9), "mse", jit_compile=False)
        x, y = images()
        batch = {"batch_size": GLOBAL_BATCH, "shuffle": False}
        model.fit(x, y, epochs=2, verbose=0, **batch)
        return weights_of(model)

    return with_policy(policy, run)


MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 4},
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(x, marks=[pytest.mark.slow] * (x != "graph")) for x in MODES],
)
def test_fit_of_a_converted_model_is_that_of_one_process(mode):
    expected = fitted_alone("float64")
    ranks = run_ranks(fitted, 2, "float64", MODES[mode], timeout_s=100)
    for weights, _ in ranks:
        for a, b, c in zip(weights, expected, ranks[0][0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
            assert a.tobytes() == c.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_types_have_float32_statistics(policy):
    expected = fitted_alone(policy)
    (weights, types), (others, _) = run_ranks(fitted, 2, policy, {})
    assert types == [policy.removeprefix("mixed_"), "float32"]
    for a, b, c in zip(weights, others, expected, strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a, c, atol=0.02)


@pytest.mark.slow
def test_it_trains_with_the_commit_gate():
    env = {"TFDIST_ATOMIC_STEPS": "1", "TFDIST_FUSION_BYTES": "64"}
    plain = run_ranks(fitted, 2, "float32", {})
    gated = run_ranks(fitted, 2, "float32", {}, env=env)
    for a, b in zip(plain[0][0], gated[1][0], strict=True):
        np.testing.assert_array_equal(a, b)


def overflowing():
    """An infinite value on one rank makes all of them skip the step."""

    def run():
        norm = tfdist.layers.SyncBatchNormalization()
        layers = [keras.layers.Dense(2), norm, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", jit_compile=False)
        x = np.ones((4, 2), "float32")
        y = x[:, :1] * (np.inf if tfdist.rank() == 1 else 1.0)
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        before = [w.numpy() for w in model.trainable_weights]
        model.fit(x, y, verbose=0)
        after = [w.numpy() for w in model.trainable_weights]
        same = all(map(np.array_equal, before, after))
        return same, float(optimizer.dynamic_scale), int(optimizer.iterations.numpy())

    return with_policy("mixed_float16", run)


@pytest.mark.slow  # of other layers: test_compression.py
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(overflowing, 2) == [[True, 2.0**14, 0]] * 2


def moments_of(x, **options):
    """A layer whose moving statistics are those of its last batch."""
    layer = tfdist.layers.SyncBatchNormalization(momentum=0.0, dtype=x.dtype, **options)
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(y**3)
    found = [layer.moving_mean.numpy(), layer.moving_variance.numpy(), y.numpy()]
    return [*found, tape.gradient(loss, x).numpy()]


def rows(rank, counts):
    return np.random.default_rng(rank).normal(size=(counts[rank], 3)) + rank


def with_counts(counts):
    return moments_of(rows(tfdist.rank(), counts))


@pytest.mark.parametrize("counts", [(0, 5, 1), (1, 1, 1), (0, 0, 7)])
def test_ranks_with_one_value_or_none_count_as_such(counts):
    data = np.concatenate([rows(rank, counts) for rank in range(3)])
    results = run_ranks(with_counts, 3, list(counts))
    for rank, (mean, variance, y, dx) in enumerate(results):
        np.testing.assert_allclose(mean, data.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(variance, data.var(axis=0), rtol=1e-12)
        assert y.shape == dx.shape == (counts[rank], 3)
        assert np.isfinite(y).all()
        assert np.isfinite(dx).all()


def half_values(policy):
    layer = tfdist.layers.SyncBatchNormalization(momentum=0.0, dtype=policy)
    y = layer(half_rows(tfdist.rank(), policy), training=True)
    found = [layer.moving_mean, layer.moving_variance, tf.cast(y, "float32")]
    return [y.dtype.name, *(value.numpy() for value in found)]


def half_rows(rank, policy):
    return tf.cast(rows(rank, (400, 500)), policy.removeprefix("mixed_"))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_statistics_of_half_values_have_float32_digits(policy):
    parts = [tf.cast(half_rows(rank, policy), "float64").numpy() for rank in range(2)]
    data = np.concatenate(parts)
    mean, variance = data.mean(axis=0), data.var(axis=0)
    for rank, found in enumerate(run_ranks(half_values, 2, policy)):
        assert found[0] == policy.removeprefix("mixed_")
        np.testing.assert_allclose(found[1], mean, rtol=1e-5)
        np.testing.assert_allclose(found[2], variance, rtol=1e-5)
        expected = (parts[rank] - mean) / np.sqrt(variance + 1e-3)
        np.testing.assert_allclose(found[3], expected, atol=0.02)


def nothing_at_all():
    return moments_of(np.zeros((0, 3), "float32"))[:2]


def test_no_value_on_any_rank_gives_zeros():
    for mean, variance in run_ranks(nothing_at_all, 2):
        np.testing.assert_array_equal(mean, np.zeros(3))
        np.testing.assert_array_equal(variance, np.zeros(3))


def far_from_zero():
    x = np.random.default_rng(tfdist.rank()).normal(size=(1000, 2)) + 4096.0
    return moments_of(x.astype("float32"))[1]


def test_a_mean_far_above_the_deviation_costs_no_digits():
    ranks = [np.random.default_rng(r).normal(size=(1000, 2)) + 4096.0 for r in (0, 1)]
    expected = np.concatenate(ranks).astype("float32").astype("float64").var(axis=0)
    for variance in run_ranks(far_from_zero, 2):
        # By sums of squares, 4096^2 has steps of 1 in float32: no digit would be right.
        np.testing.assert_allclose(variance, expected, rtol=1e-5)


def in_sets():
    """Ranks 0 and 2 normalise together; rank 1 alone."""
    sets = [tfdist.add_process_set([0, 2]), tfdist.add_process_set([1])]
    [own] = [s for s in sets if s.included()]
    [other] = [s for s in sets if not s.included()]
    try:
        tfdist.layers.SyncBatchNormalization(process_set=other)
    except ValueError as error:
        message = str(error)
    found = moments_of(rows(tfdist.rank(), (4, 5, 6)), process_set=own)
    keras.utils.clear_session()
    norm = keras.layers.BatchNormalization(momentum=0.0, dtype="float64")
    tfdist.layers.synchronize_batch_normalization(norm)
    tfdist.layers.synchronize_batch_normalization(norm, process_set=own)
    norm(rows(tfdist.rank(), (4, 5, 6)), training=True)
    return found[1], norm.moving_variance.numpy(), message


def test_process_sets_normalise_apart():
    data = [rows(rank, (4, 5, 6)) for rank in range(3)]
    both = np.concatenate([data[0], data[2]]).var(axis=0)
    expected = [both, data[1].var(axis=0), both]
    for rank, (made, converted, message) in enumerate(run_ranks(in_sets, 3)):
        np.testing.assert_allclose(made, expected[rank], rtol=1e-12)
        np.testing.assert_array_equal(made, converted)
        assert f"got rank {rank}" in message


class Whole(keras.layers.BatchNormalization):
    """With the mean as a part of the variance; tf.nn.moments stops gradients there.

    That is right for the first gradient, in which this part is 0, but not for those of
    functions of it.
    """

    def _moments(self, inputs, mask):
        mean = tf.reduce_mean(inputs, axis=0)
        return mean, tf.reduce_mean((inputs - mean) ** 2, axis=0)


def second_order(in_graph):
    """The gradient of a penalty on the gradient, as some GANs have it."""
    layer = tfdist.layers.SyncBatchNormalization(dtype="float64")
    return penalty(layer, [rows(tfdist.rank(), (4, 5))], in_graph)


def penalty(layer, parts, in_graph=False):
    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 3)
            total = tf.reduce_sum(inner.gradient(loss, x) ** 4)
        return outer.gradient(total, x)

    layer.build((None, 3))
    x = tf.constant(np.concatenate(parts))
    return (tf.function(run) if in_graph else run)(x).numpy()


@pytest.mark.parametrize(
    "in_graph", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_gradients_of_gradients_are_those_of_one_process(in_graph):
    layer = Whole(dtype="float64")
    expected = penalty(layer, [rows(rank, (4, 5)) for rank in range(2)])
    found = np.concatenate(run_ranks(second_order, 2, in_graph))
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-12)


def counted():
    """What one call of the layer costs, forward and backward."""
    layer = tfdist.layers.SyncBatchNormalization()
    layer.build((None, 10))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, x)

    x = tf.ones((4, 10))
    step(x)
    tfdist.barrier()
    native.take_records()
    step(x)
    tfdist.barrier()
    kinds = {native.ALLGATHER: "allgather", native.ALLREDUCE: "allreduce"}
    records = native.take_records()
    return [[kinds[r["kind"]], r["name"]] for r in records if r["kind"] in kinds]


def test_a_call_costs_one_operation_forward_and_one_backward():
    expected = [
        ["allgather", "step/batch_norm.0"],
        ["allreduce", "step/batch_norm.0.gradient"],
    ]
    assert run_ranks(counted, 2) == [expected] * 2


def weighted_too_late(options):
    """Gradients are added up over the ranks before they could be weighted."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(**options)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), layer])
    tfdist.layers.synchronize_batch_normalization(model)
    kernel = model.trainable_variables[:1]  # is before the layer
    with tf.GradientTape() as tape:
        y = model(tf.ones((3, 2)), training=True)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    try:
        optimizer.apply(tape.gradient(y, kernel), kernel, weight=3)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options", [{}, {"center": False, "scale": False}])
def test_a_weight_is_refused_after_the_backward_pass(options):
    for message in run_ranks(weighted_too_late, 2, options):
        assert "DistributedGradientTape.gradient()" in message
        assert "dense/kernel" in message


def frozen_later():
    """What is not trained any more takes the statistics that it has."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            tfdist.layers.SyncBatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for trainable in (True, False):
        model.layers[0].trainable = trainable
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((3, 2)), training=True))
        variables = model.layers[1].trainable_variables
        gradients = tape.gradient(loss, variables)
        if trainable:
            with pytest.raises(ValueError, match="weight cannot be used"):
                optimizer.apply(gradients, variables, weight=3)
        else:
            optimizer.apply(gradients, variables, weight=3)


def test_a_weight_is_taken_where_the_layer_is_frozen():
    run_ranks(frozen_later, 1)


def layer_alone():
    """A layer that is called by itself, in a loop of the user's own."""
    layer = tfdist.layers.SyncBatchNormalization(center=False)
    layer.build((None, 2))
    with tf.GradientTape() as tape:
        y = layer(tf.ones((3, 2)), training=True)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    variables = layer.trainable_variables
    with pytest.raises(ValueError, match="batch_normalization.*/gamma"):
        optimizer.apply(tape.gradient(y, variables), variables, weight=3)


def test_so_is_one_for_a_layer_that_is_no_part_of_a_model():
    run_ranks(layer_alone, 1)


def weighted_gradients(sizes):
    """Of the mean loss of this rank's batch, weighted by its size; of one: of all."""
    before = keras.config.dtype_policy()
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float64")
    try:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy(before)
    x = np.random.default_rng(2).normal(size=(sum(sizes), 4))
    variables = model.trainable_variables
    if len(sizes) == 1:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True)[:, 0] ** 3)
        return [g.numpy() for g in tape.gradient(loss, variables)]
    tfdist.layers.synchronize_batch_normalization(model)
    begin = sum(sizes[: tfdist.rank()])
    x = x[begin : begin + sizes[tfdist.rank()]]
    with tfdist.DistributedGradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True)[:, 0] ** 3)
    return [g.numpy() for g in tape.gradient(loss, variables, weight=len(x))]


@pytest.mark.parametrize(
    "sizes", [(8, 24), pytest.param((5, 11, 16), marks=pytest.mark.slow)]
)
def test_a_weight_for_the_tape_is_that_of_one_process(sizes):
    expected = weighted_gradients([sum(sizes)])
    for found in run_ranks(weighted_gradients, len(sizes), list(sizes)):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-13)


def skipping():
    """A layer that is frozen takes part in nothing, and nor does inference."""
    layer = tfdist.layers.SyncBatchNormalization()
    layer.build((None, 2))
    if tfdist.rank() == 0:
        layer(tf.ones((3, 2)), training=False)
        layer.trainable = False
        layer(tf.ones((3, 2)), training=True)
    return layer.moving_mean.numpy().tolist()


def test_inference_and_frozen_layers_need_no_other_rank():
    assert run_ranks(skipping, 2) == [[0.0, 0.0]] * 2


def looped(layer, x):
    """The gradient through three calls in a loop of the graph."""

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = tf.tanh(layer(y, training=True)) + x
            loss = tf.reduce_sum(y**3)
        return tape.gradient(loss, x)

    layer.build((None, 3))
    return run(tf.constant(x)).numpy(), layer.moving_variance.numpy()


def looped_on_ranks():
    layer = tfdist.layers.SyncBatchNormalization(dtype="float64")
    return looped(layer, rows(tfdist.rank(), (4, 5)))


def test_a_loop_in_the_graph_calls_it_again():
    whole = np.concatenate([rows(rank, (4, 5)) for rank in range(2)])
    dx, variance = looped(keras.layers.BatchNormalization(dtype="float64"), whole)
    results = run_ranks(looped_on_ranks, 2)
    np.testing.assert_allclose(np.concatenate([r[0] for r in results]), dx, rtol=1e-9)
    for _, found in results:
        np.testing.assert_allclose(found, variance, rtol=1e-12)
