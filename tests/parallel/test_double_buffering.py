"""Double buffering: steps use the reduced gradients of the step before, bit for bit."""

import contextlib
import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native

STEPS = 6
BATCH = 4


def data(rank):
    rng = np.random.default_rng([3, rank])
    x = rng.standard_normal((STEPS * BATCH, 8)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")


def build(kind):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(300, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    if kind == "adam":
        return model, keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)
    return model, keras.optimizers.SGD(0.05, momentum=0.9)


def reference(kind, compression=None, is_eager=False):
    """Synchronous gradients, applied by hand one step later; the weights of each step.

    The first step makes no update, and the last gradients are not used.
    """
    function = (lambda own: own) if is_eager else tf.function
    model, optimizer = build(kind)
    variables = model.trainable_variables
    optimizer.build(variables)

    @function
    def apply(grads):
        optimizer.apply(grads, variables)

    @function
    def gradients(x, y):
        with tfdist.DistributedGradientTape(compression=compression) as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, variables)

    waiting, weights = None, []
    for x, y in batches():
        now = gradients(x, y)
        if waiting is not None:
            apply(waiting)
        waiting = now
        weights.append(np.concatenate([v.numpy().ravel() for v in variables]))
    return weights


def batches():
    x, y = data(tfdist.rank())
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def by_loop(kind, way, compression=None):
    model, optimizer = build(kind)
    variables = model.trainable_variables
    options = {"double_buffering": True, "compression": compression}
    if way != "tape":
        optimizer = tfdist.DistributedOptimizer(optimizer, **options)
    optimizer.build(variables)
    is_first = tf.Variable(True)

    def step(x, y):
        made = (
            tfdist.DistributedGradientTape(**options)
            if way == "tape"
            else tf.GradientTape()
        )
        with made as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, variables)
        if way == "tape" and kind == "adam":  # zeros would decay the weights
            if not is_first:
                optimizer.apply(grads, variables)
        else:
            optimizer.apply(grads, variables)
        is_first.assign(False)

    run = step if way == "eager" else tf.function(step)
    weights = []
    for x, y in batches():
        run(x, y)
        weights.append(np.concatenate([v.numpy().ravel() for v in variables]))
    return weights


def by_fit(kind, compression=None, **options):
    model, optimizer = build(kind)
    model.compile(
        tfdist.DistributedOptimizer(
            optimizer, double_buffering=True, compression=compression
        ),
        "mse",
        **{"jit_compile": False, **options},
    )
    weights = []

    class Weights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(
                np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
            )

    callbacks = [tfdist.callbacks.BroadcastInitialState(), Weights()]
    model.fit(batches(), verbose=0, callbacks=callbacks)
    return weights


def both(way, kind, compression=None, options=None):
    is_eager = way == "eager" or bool(options and options.get("run_eagerly"))
    wanted = reference(kind, compression, is_eager)
    if way == "fit":
        found = by_fit(kind, compression, **(options or {}))
    else:
        found = by_loop(kind, way, compression)
    return np.array(wanted), np.array(found)


@pytest.mark.parametrize(
    ("size", "way", "kind", "compression"),
    [
        (2, "tape", "sgd", None),
        (2, "optimizer", "adam", "fp16"),
        (2, "fit", "adam", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (4, "tape", "adam", "fp16"),
                (4, "optimizer", "sgd", None),
                (4, "fit", "sgd", "bf16"),
                (2, "eager", "sgd", None),
                (2, "eager", "adam", None),
            ]
        ),
    ],
)
def test_the_weights_are_those_of_a_delay_of_one_step(size, way, kind, compression):
    ranks = run_ranks(both, size, way, kind, compression, timeout_s=100)
    for wanted, found in ranks:
        assert found.tobytes() == wanted.tobytes() == ranks[0][0].tobytes()
        assert (wanted[0] == found[0]).all()
        assert (wanted[1] != wanted[0]).any()


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 3},
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
)
def test_fit_delays_by_one_step_in_every_way_of_running(options):
    for wanted, found in run_ranks(both, 2, "fit", "sgd", None, options, timeout_s=100):
        if "jit_compile" in options:  # XLA rounds differently
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        else:
            every = options.get("steps_per_execution", 1)
            assert found.tobytes() == wanted[every - 1 :: every].tobytes()


LAYERS, LAYER_BYTES = 4, 1 << 20
TIMEOUT_S = 30


class PreviousReduced(keras.layers.Layer):
    """Passes its input on when the gradients of the previous step are reduced."""

    def __init__(self):
        super().__init__()
        self.steps = self.late = self._reduced_bytes = 0

    def call(self, inputs):
        return tf.ensure_shape(
            tf.numpy_function(self._wait, [inputs], inputs.dtype), inputs.shape
        )

    def _wait(self, inputs):
        self.steps += 1
        deadline = time.monotonic() + TIMEOUT_S
        while self._reduced() < self.steps * LAYERS * LAYER_BYTES and not self.late:
            self.late += time.monotonic() > deadline
            time.sleep(0.001)
        return inputs

    def _reduced(self):
        for record in native.take_records():
            if record["bytes"] >= LAYER_BYTES:
                self._reduced_bytes += record["bytes"]
        return self._reduced_bytes


def hidden(way):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(512, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((512,)), PreviousReduced(), *layers])
    x = np.ones((8, 512), "float32")
    native.take_records()
    if way == "fit":
        sgd = keras.optimizers.SGD(1e-4)
        model.compile(
            tfdist.DistributedOptimizer(sgd, double_buffering=True),
            "mse",
            jit_compile=False,
        )
        data = tf.data.Dataset.from_tensors((x, x)).repeat(STEPS)
        model.fit(data, verbose=0)
    else:
        optimizer = keras.optimizers.SGD(1e-4)

        @tf.function
        def step():
            with tfdist.DistributedGradientTape(double_buffering=True) as tape:
                loss = tf.reduce_mean(model(tf.constant(x)) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)

        for _ in range(STEPS):
            step()
    return [model.layers[0].steps, model.layers[0].late]


@pytest.mark.parametrize(
    "way", ["fit", pytest.param("function", marks=pytest.mark.slow)]
)
def test_the_previous_gradients_are_reduced_before_the_forward_pass_ends(way):
    for steps, late in run_ranks(hidden, 2, way, timeout_s=100):
        assert (steps, late) == (STEPS, 0)


def weighted():
    """Three samples on rank 0 and one on rank 1, then other numbers."""
    w = tf.Variable([1.0], name="w")
    found = []

    @tf.function
    def gradient(x, count):
        with tfdist.DistributedGradientTape(double_buffering=True) as tape:
            loss = tf.reduce_sum(w * x)
        return tape.gradient(loss, w, weight=count)

    for x, counts in ((8.0, (3, 1)), (4.0, (1, 1)), (0.0, (5, 2))):
        own = tf.constant([x * (1 + tfdist.rank())])
        count = tf.constant(counts[tfdist.rank()], tf.float64)
        found.append(float(gradient(own, count)[0]))
    return found


def test_weights_belong_to_the_step_of_their_gradients():
    for found in run_ranks(weighted, 2, timeout_s=60):
        assert found == [0.0, (3 * 8.0 + 16.0) / 4, (4.0 + 8.0) / 2]


def named_tapes():
    """Two tapes over one variable, each with its own stored gradients."""
    w = tf.Variable([1.0], name="w")
    found = []

    @tf.function
    def step(a, b):
        grads = []
        for factor, name in ((a, "first"), (b, "second")):
            with tfdist.DistributedGradientTape(
                double_buffering=True, name=name
            ) as tape:
                loss = tf.reduce_sum(w * factor)
            grads.append(tape.gradient(loss, w))
        return grads

    for a, b in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        found.append([float(g[0]) for g in step(tf.constant(a), tf.constant(b))])
    return found


def test_tapes_with_names_keep_their_gradients_apart():
    assert run_ranks(named_tapes, 2, timeout_s=60) == [[[0, 0], [1, 2], [3, 4]]] * 2


def with_missing_gradients():
    """Rank 1 has no gradient of the vector; rows that occur twice are added."""
    table = keras.Variable(np.ones((3, 2), "float32"), name="table")
    vector = keras.Variable([1.0, 1.0], name="vector")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(1.0), double_buffering=True
    )
    row = tf.IndexedSlices([[0.25, 0.0], [0.25, 0.0]], [1, 1], [3, 2])
    grads = [row, tf.constant([0.5, 0.0])] if tfdist.rank() == 0 else [None, None]
    found = []
    for _ in range(2):
        optimizer.apply(grads, [table, vector])
        found.append([table.numpy().tolist(), vector.numpy().tolist()])
    return found


def test_a_gradient_that_one_rank_lacks_is_zero_there():
    for first, second in run_ranks(with_missing_gradients, 2, timeout_s=60):
        assert first == [[[1, 1]] * 3, [1, 1]]
        assert second == [[[1, 1], [0.75, 1], [1, 1]], [0.75, 1]]


def policies():
    """A gradient that is not finite is skipped when it is used, a step later."""
    v = keras.Variable([1.0], name="v")
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.5), double_buffering=True, nan_policy="skip_step"
    )
    bad = np.nan if tfdist.rank() == 1 else 1.0
    found = []
    for value in (1.0, bad, 1.0, 1.0):
        optimizer.apply([tf.constant([value])], [v])
        found.append(float(v.numpy()[0]))
    return [*found, int(optimizer.iterations)]


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks():
    assert run_ranks(policies, 2, timeout_s=60) == [[1.0, 0.5, 0.5, 0.0, 2]] * 2


def given_by_one_rank():
    options = {"double_buffering": True} if tfdist.rank() == 1 else {}
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(), **options)
    v = keras.Variable([1.0], name="v")
    with pytest.raises(tfdist.MismatchError, match="double_buffering=True"):
        optimizer.apply([tf.constant([1.0])], [v])
    return float(v.numpy()[0])


def test_double_buffering_on_some_ranks_is_an_error_on_all():
    assert run_ranks(given_by_one_rank, 2, timeout_s=60) == [1.0, 1.0]


def of_unknown_length(way):
    """Two epochs that end with the data; the reference takes them as one list."""
    unknown = batches().filter(lambda x, y: True)
    model, optimizer = build("adam")
    variables = model.trainable_variables
    optimizer = tfdist.DistributedOptimizer(optimizer, double_buffering=True)
    if way == "fit":
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(unknown, epochs=2, verbose=0)
    else:
        optimizer.build(variables)

        @tf.function
        def step(iterator):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, variables), variables)

        for _ in range(2):
            iterator = iter(unknown)
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    step(iterator)
    found = [v.numpy() for v in variables]
    keras.utils.clear_session()
    model, other = build("adam")
    model.compile(
        tfdist.DistributedOptimizer(other, double_buffering=True),
        "mse",
        jit_compile=False,
    )
    model.fit(batches().repeat(2), verbose=0)
    same = [v.numpy() for v in model.trainable_variables]
    return all((a == b).all() for a, b in zip(found, same, strict=True)), int(
        optimizer.iterations
    )


@pytest.mark.parametrize("way", ["fit", pytest.param("loop", marks=pytest.mark.slow)])
def test_the_end_of_the_data_starts_no_step(way):
    for is_same, updates in run_ranks(of_unknown_length, 2, way, timeout_s=100):
        assert is_same
        assert updates == 2 * STEPS - 1


def restored(folder):
    """Rank 0 reads a checkpoint; all ranks begin anew with a first step."""
    model, optimizer = build("sgd")
    optimizer = tfdist.DistributedOptimizer(optimizer, double_buffering=True)
    model.compile(optimizer, "mse", jit_compile=False)
    options = {"verbose": 0, "callbacks": [tfdist.callbacks.BroadcastInitialState()]}
    model.fit(batches(), **options)
    path = f"{folder}/model.keras"
    if tfdist.rank() == 0:
        model.save(path)
    tfdist.barrier()
    step = functools.partial(
        optimizer.apply,
        [tf.ones(v.shape) for v in model.trainable_variables],
        model.trainable_variables,
    )
    counts = []
    tfdist.restore(model, path)
    step()
    counts.append(int(optimizer.iterations))
    step()
    counts.append(int(optimizer.iterations))
    if tfdist.rank() == 0:  # loaded on one rank, and sent to the others
        model.load_weights(path)
    model.fit(batches(), **options)
    counts.append(int(optimizer.iterations))
    weights = [v.numpy() for v in model.trainable_variables]
    return counts, weights


def test_all_ranks_begin_anew_after_a_load(tmp_path):
    ranks = run_ranks(restored, 2, str(tmp_path), timeout_s=100)
    for counts, weights in ranks:
        assert counts == [STEPS - 1, STEPS, 2 * (STEPS - 1)]
        for one, other in zip(weights, ranks[0][1], strict=True):
            assert one.tobytes() == other.tobytes()


def loaded_on_one_rank(folder):
    """Rank 0 loads an earlier state in a custom loop, and sends it to the others."""
    model, optimizer = build("sgd")
    optimizer = tfdist.DistributedOptimizer(optimizer, double_buffering=True)
    model.compile(optimizer, "mse", jit_compile=False)
    variables = model.trainable_variables
    path = f"{folder}/model.keras"

    def step():
        grads = [tf.fill(v.shape, 1.0 + tfdist.rank()) for v in variables]
        optimizer.apply(grads, variables)

    for _ in range(3):
        step()
    if tfdist.rank() == 0:
        model.save(path)
        model.load_weights(path)
    tfdist.broadcast_variables(model.weights + optimizer.variables)
    step()
    return int(optimizer.iterations), [v.numpy() for v in variables]


def test_a_load_on_one_rank_and_a_broadcast_leave_the_ranks_equal(tmp_path):
    ranks = run_ranks(loaded_on_one_rank, 2, str(tmp_path), timeout_s=100)
    for count, weights in ranks:
        assert count == 2  # the first step after the broadcast makes no update
        for one, other in zip(weights, ranks[0][1], strict=True):
            assert one.tobytes() == other.tobytes()


def mixed_weights():
    w = tf.Variable([1.0], name="w")
    for count in (None, tfdist.rank() + 1):
        with tfdist.DistributedGradientTape(double_buffering=True) as tape:
            loss = tf.reduce_sum(8.0 * w)
        if count is None:
            tape.gradient(loss, w)
            continue
        with pytest.raises(ValueError, match="in all steps or in none"):
            tape.gradient(loss, w, weight=count)
    return True


def test_weights_in_some_steps_are_refused():
    assert run_ranks(mixed_weights, 2, timeout_s=60) == [True, True]
