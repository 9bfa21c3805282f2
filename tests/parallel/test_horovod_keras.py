"""Horovod's Keras interface on two ranks, compared with one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64
from helpers.horovod_calls import on_ranks, recorded
from helpers.outcome import outcome

import tfdist
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.core import native

SIZE, BATCH, WIDTH = 2, 4, 3


def data_of(rank, batches):
    """Inputs and targets of one rank, one batch after the other."""
    rng = np.random.default_rng([7, rank])
    x = rng.normal(size=(batches * BATCH, WIDTH))
    return x, rng.normal(size=(batches * BATCH, 1))


def global_gradient(w, batch, batches):
    """Of the mean squared error over the batch of all ranks; in NumPy."""
    rows = slice(batch * BATCH, (batch + 1) * BATCH)
    parts = [data_of(rank, batches) for rank in range(SIZE)]
    x = np.concatenate([p[0][rows] for p in parts])
    y = np.concatenate([p[1][rows] for p in parts])
    return 2 / len(x) * x.T @ (x @ w - y)


def linear_model(start):
    model = keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False)]
    )
    model.layers[-1].kernel.assign(np.full((WIDTH, 1), start))
    return model


# ---- fit with all callbacks


EPOCHS, STEPS, RATE, MOMENTUM = 4, 4, 0.125, 0.5


@recorded
@in_float64
def fit_with_callbacks():
    rank = tfdist.rank()
    model = linear_model(1.0 + rank)  # rank 0's shall count
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, MOMENTUM))
    model.compile(optimizer, "mse", metrics=["mae"])
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    c = hvd.callbacks
    history = model.fit(
        *data_of(rank, STEPS),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            c.BroadcastGlobalVariablesCallback(0),
            c.MetricAverageCallback(),
            c.LearningRateWarmupCallback(RATE, warmup_epochs=2, verbose=1),
            c.LearningRateScheduleCallback(RATE, lambda epoch: 0.5**epoch, 3),
            Rates(),
            keras.callbacks.EarlyStopping("loss", patience=EPOCHS),  # is accepted
        ],
    )
    return [w.numpy() for w in model.weights], rates, history.history


def rates_by_the_formula():
    """Two epochs of warm-up from RATE/2, one without a change, one at RATE/8."""
    warm = [
        RATE / 2 * ((SIZE - 1) * (epoch + (batch + 1) / STEPS) / 2 + 1)
        for epoch in range(2)
        for batch in range(STEPS)
    ]
    return warm + [RATE] * STEPS + [RATE * 0.125] * STEPS


def test_fit_with_all_callbacks_is_the_run_of_one_process_with_horovods_formulas():
    results = on_ranks(fit_with_callbacks, SIZE)
    rates = rates_by_the_formula()
    w, velocity, before, losses = np.full((WIDTH, 1), 1.0), 0.0, RATE, []
    parts = [data_of(rank, STEPS) for rank in range(SIZE)]
    for number, rate in enumerate(rates):
        batch = number % STEPS
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        losses.append(np.mean([(x[rows] @ w - y[rows]) ** 2 for x, y in parts]))
        # Momentum correction as Horovod has it: another momentum for one step.
        corrected = MOMENTUM * rate / before
        velocity = corrected * velocity - rate * global_gradient(w, batch, STEPS)
        w, before = w + velocity, rate
    assert_like_one_process([r[0] for r in results], [w], "fit")
    for _, measured, history in results:
        np.testing.assert_allclose(measured, rates, rtol=1e-7)
        means = np.reshape(losses, (EPOCHS, STEPS)).mean(axis=1)
        np.testing.assert_allclose(history["loss"], means, rtol=1e-10)
        np.testing.assert_allclose(history["lr"], rates[STEPS - 1 :: STEPS], rtol=1e-7)
        assert history == results[0][2]


# ---- backward_passes_per_step


PASSES, UPDATES = 3, 3


@recorded
@in_float64
def accumulate(kind, average, how):
    rank = tfdist.rank()
    w = keras.Variable(np.full((WIDTH, 1), 1.0), name="w")
    made = getattr(keras.optimizers, kind)(0.125)
    if how == "scaled":
        made = keras.optimizers.LossScaleOptimizer(made, initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(
        made, backward_passes_per_step=PASSES, average_aggregated_gradients=average
    )
    optimizer.build([w])
    xs, ys = data_of(rank, PASSES * UPDATES)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((x @ w.value - y) ** 2))
        optimizer.apply_gradients(zip(tape.gradient(loss, [w.value]), [w], strict=True))

    if how != "eager":
        step = tf.function(step)
    native.take_records()
    for number in range(PASSES * UPDATES):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        step(tf.constant(xs[rows]), tf.constant(ys[rows]))
    reductions = [
        r for r in native.take_records() if r["name"].startswith("gradients.")
    ]
    return [w.numpy()], len(reductions), int(optimizer.iterations)


@in_float64
def accumulated_alone(kind, average):
    w = keras.Variable(np.full((WIDTH, 1), 1.0), name="w")
    optimizer = getattr(keras.optimizers, kind)(0.125)
    optimizer.build([w])
    for update in range(UPDATES):
        batches = range(update * PASSES, (update + 1) * PASSES)
        total = sum(global_gradient(w.numpy(), b, PASSES * UPDATES) for b in batches)
        # Adam's correction follows from the count, which is one of batches.
        optimizer._iterations.assign((update + 1) * PASSES - 1)
        optimizer.apply([tf.constant(total / (PASSES if average else 1))], [w])
    return [w.numpy()]


@pytest.mark.parametrize(
    ("kind", "average", "how"),
    [
        ("Adam", False, "graph"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("SGD", False, "graph"),
                ("SGD", True, "graph"),
                ("SGD", False, "eager"),
                ("Adam", True, "eager"),
                ("Adam", False, "scaled"),
                ("SGD", True, "scaled"),
            ]
        ),
    ],
)
def test_backward_passes_are_added_up_and_reduced_once(kind, average, how):
    results = on_ranks(accumulate, SIZE, kind, average, how)
    alone = accumulated_alone(kind, average)
    assert_like_one_process([r[0] for r in results], alone, f"{kind} {average} {how}")
    for _, reductions, counted in results:
        assert (reductions, counted) == (UPDATES, PASSES * UPDATES)


PARTS = [np.float32(11 * (n + 1) / 10) for n in range(7)]


@recorded
def sums_exactly():
    """A sum that its mean times 7 is not."""
    w = keras.Variable([0.0], name="w")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=7, op=hvd.Sum
    )
    for part in PARTS:
        optimizer.apply_gradients([(tf.constant([part]), w)])
    return w.numpy()


def test_the_sum_of_backward_passes_has_the_bits_of_adding_up():
    own = np.float32(0)
    for part in PARTS:
        own = part + own
    assert own / np.float32(7) * np.float32(7) != own
    for found in on_ranks(sums_exactly, SIZE):
        np.testing.assert_array_equal(found, [-(own + own)])


@recorded
def broadcast_between_passes(scaled):
    made = keras.optimizers.SGD(1.0)
    if scaled:
        made = keras.optimizers.LossScaleOptimizer(made, initial_scale=1.0)
    optimizer = hvd.DistributedOptimizer(made, backward_passes_per_step=2)
    w = tf.Variable([0.0])
    optimizer.apply_gradients([(tf.constant([1.0 + 2 * hvd.rank()]), w)])
    hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    optimizer.apply_gradients([(tf.constant([10.0]), w)])
    return w.numpy().tolist()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_broadcast_between_passes_leaves_each_rank_its_gradients(scaled):
    # The mean of 1 + 10 and 3 + 10.
    assert on_ranks(broadcast_between_passes, SIZE, scaled) == [[-12.0]] * SIZE


# ---- metrics, errors, checkpoints


class Largest(keras.metrics.Metric):
    """Says nothing about how its state is combined."""

    def __init__(self):
        super().__init__(name="largest")
        self.state = self.add_weight(name="state", initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.state.assign(tf.maximum(self.state, tf.reduce_max(y)))

    def result(self):
        return self.state + 0.0


@recorded
def own_metric():
    rank = hvd.rank()
    model = linear_model(1.0)
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=[Largest()]
    )
    x = np.zeros((4, WIDTH), "float32")
    y = np.full((4, 1), 1.0 + 2 * rank, "float32")
    options = {"verbose": 0, "callbacks": [hvd.callbacks.MetricAverageCallback()]}

    def add(epoch, logs):
        logs["f1"] = np.float32(rank)
        logs["mixed"] = "text" if rank else 1.0
        logs["steps"] = 7

    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(on_epoch_end=add))
    history = model.fit(x, y, validation_data=(x, y + 4), **options)
    mixed = history.history.pop("mixed")[0]
    assert mixed == "text" if rank else np.isnan(mixed)
    assert isinstance(history.history.pop("steps")[0], int)
    return history.history, model.evaluate(x, y, return_dict=True, **options)


def test_a_metric_of_the_users_own_is_the_mean_of_the_ranks_numbers():
    expected = {"largest": [2.0], "loss": [5.0], "f1": [0.5]}
    expected |= {"val_largest": [6.0], "val_loss": [(25 + 49) / 2]}
    # Of evaluate, as under Horovod, each rank gets its own ones.
    first, second = on_ranks(own_metric, SIZE)
    assert first == [expected, {"largest": 1.0, "loss": 1.0}]
    assert second == [expected, {"largest": 3.0, "loss": 9.0}]


@recorded
def trained_alone_before(wraps):
    """A fit without a reduction; then one that has it, or would not."""
    model = linear_model(1.0)
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse")
    x = np.full((4, WIDTH), 1.0 + hvd.rank(), "float32")
    model.fit(x, x[:, :1], verbose=0)  # the graph of the step is made
    if wraps:
        hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_variables(model.variables, root_rank=0)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    found = outcome(lambda: model.fit(x, x[:, :1], verbose=0, callbacks=callbacks))
    return found, model.get_weights()[0]


def test_a_model_whose_gradients_are_not_reduced_is_an_error():
    for found, _ in on_ranks(trained_alone_before, SIZE, False):
        assert found["class"] == "ValueError"
        assert "does not reduce gradients" in found["message"]


def test_an_optimizer_that_is_wrapped_after_a_fit_reduces_in_the_next():
    (found, first), (_, second) = on_ranks(trained_alone_before, SIZE, True)
    assert found["class"] == "none"
    np.testing.assert_array_equal(first, second)


@recorded
def resumed(path):
    """As Horovod's ImageNet script resumes: rank 0 loads, the others make a model.

    A Sequential from a .keras file has other paths of variables than a new one, so of
    such a file every rank loads its model.
    """
    rank = hvd.rank()
    x, y = data_of(rank, STEPS)

    def made():
        keras.utils.clear_session()
        model = linear_model(1.0 + rank)
        optimizer = keras.optimizers.Adam(RATE * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, compression="bf16")
        model.compile(optimizer, "mse", metrics=["accuracy"])
        return model

    def fit(model, first, last):
        c = hvd.callbacks
        callbacks = [c.BroadcastGlobalVariablesCallback(0), c.MetricAverageCallback()]
        if rank == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(path))
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(
            *(x, y),
            callbacks=callbacks,
            epochs=last,
            initial_epoch=first,
            **options,
        )
        return [v.numpy() for v in model.weights + model.optimizer.variables]

    straight = fit(made(), 0, 4)
    fit(made(), 0, 2)
    loads = rank == 0 or path.endswith(".keras")
    hvd.allreduce(0)  # rank 0 has written the file
    model = hvd.load_model(path, compression="bf16") if loads else made()
    return straight, fit(model, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("end", [".keras", ".h5"])
def test_a_training_is_resumed_bit_by_bit_from_the_checkpoint_of_rank_0(tmp_path, end):
    results = on_ranks(resumed, SIZE, str(tmp_path / f"checkpoint{end}"))
    straight, _ = results[0]
    for own, again in results:
        for a, b, c in zip(straight, own, again, strict=True):
            assert a.tobytes() == b.tobytes() == c.tobytes()


@recorded
def elastic_fit():
    model = linear_model(1.0 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)), "mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    seen = []
    commit = state.commit
    state.commit = lambda: (seen.append((state.epoch, state.batch)), commit())

    @hvd.elastic.run
    def train(state):
        e = hvd.elastic
        x, y = data_of(hvd.rank(), 4)
        callbacks = [
            e.UpdateEpochStateCallback(state),
            e.UpdateBatchStateCallback(state),
            e.CommitStateCallback(state, batches_per_commit=3),
        ]
        model.fit(x, y, BATCH, epochs=2 - state.epoch, verbose=0, callbacks=callbacks)
        return state.epoch

    done = train(state)
    kept = model.get_weights()
    model.layers[-1].kernel.assign(np.zeros((WIDTH, 1)))
    state.restore()
    restored = all(map(np.array_equal, kept, model.get_weights()))
    return done, restored, seen, kept


def test_an_elastic_state_is_synchronised_committed_and_restored():
    results = on_ranks(elastic_fit, SIZE)
    for done, restored, seen, kept in results:
        assert (done, restored) == (2, True)
        assert seen == [[0, 2], [1, 0], [1, 2], [2, 0]]
        np.testing.assert_array_equal(kept[0], results[0][3][0])


@recorded
def accumulated_in_elastic_jobs(is_newest):
    """Weights after an update with `sync` in the middle; and what `restore` does."""
    rank = hvd.rank()
    model = linear_model(0.0)
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
    model.compile(optimizer)
    state = hvd.elastic.KerasState(model)
    kernel = model.layers[-1].kernel
    [sums] = optimizer._accumulated_gradients

    def step(gradient):
        optimizer.apply([tf.fill([WIDTH, 1], float(gradient))], [kernel])

    step(1 + 2 * rank)
    state.save()
    sums.assign(np.ones((WIDTH, 1)))
    state.restore()
    kept = float(sums[0, 0])
    # As the loop does after the ranks have changed.
    state._newest_rank, state._is_newest = 0, is_newest or rank == 0
    state.sync()
    assert int(optimizer.iterations) == 1
    step(8 + 2 * rank)
    return kept, kernel.numpy()[:, 0].tolist()


@pytest.mark.parametrize("is_newest", [True, False])
def test_an_elastic_state_keeps_the_gradients_that_each_rank_has_added(is_newest):
    first, second = on_ranks(accumulated_in_elastic_jobs, SIZE, is_newest)
    # Rank 1 starts with zeros if it has got a newer state: its 3 is missing.
    mean = (1 + 8 + 3 * is_newest + 10) / 2
    assert first == [1.0, [-mean] * WIDTH] and second == [3.0, [-mean] * WIDTH]
