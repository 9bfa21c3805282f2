"""Horovod's callbacks, states and loaded models on two ranks, by their parameters."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.horovod_calls import on_ranks, recorded
from helpers.outcome import outcome

import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.training.optimizer import is_distributed

STEPS, EPOCHS, MOMENTUM = 2, 3, 0.5
X = np.ones((2 * STEPS, 1), "float32")
Y = np.zeros((2 * STEPS, 1), "float32")
FIT = {"batch_size": 2, "shuffle": False, "verbose": 0}


class Keeps(keras.layers.Layer):
    """One more weight, which the outputs do not depend on."""

    def build(self, shape):
        self.kept = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        return x


def one_weight(optimizer, start=0.0):
    """A model whose loss is its output: every gradient is 1."""
    last = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), Keeps(), last])
    model.layers[-1].kernel.assign([[start]])
    model.compile(optimizer, loss=lambda y, p: tf.reduce_mean(p - 0.0 * y, axis=-1))
    return model


def sgd(rate=1.0, **options):
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate, **options))


class Rates(keras.callbacks.Callback):
    """Notes the rate of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


@recorded
def rates_and_momentum(correction):
    c, rates = hvd.callbacks, Rates()
    model = one_weight(sgd(1.0, momentum=MOMENTUM))
    callbacks = [
        c.MetricAverageCallback(device="/cpu:0"),
        c.LearningRateWarmupCallback(
            *(4.0, 1),
            momentum_correction=correction,
            steps_per_epoch=STEPS,
            verbose=1,
        ),
        c.LearningRateScheduleCallback(
            *(4.0, lambda epoch: 0.5**epoch),
            start_epoch=1,
            end_epoch=2,
            staircase=False,
            momentum_correction=correction,
            steps_per_epoch=STEPS,
        ),
        rates,
    ]
    model.fit(X, Y, epochs=EPOCHS, callbacks=callbacks, **FIT)
    return [rates.seen, float(model.layers[-1].kernel[0, 0])]


@pytest.mark.parametrize(
    "correction", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_rates_and_what_becomes_of_the_momentum(correction):
    # A warm-up of two ranks and two steps; half an epoch further each step; the rest.
    warm = [4.0 / 2 * ((step + 1) / 2 + 1) for step in range(2)]
    later = [4.0 * 0.5**epoch for epoch in (1.0, 1.5)]
    expected = [*warm, *later, later[-1], later[-1]]
    w = velocity = 0.0
    before = 1.0
    for rate in expected:
        scale = rate / before if correction else 1.0
        velocity, before = MOMENTUM * velocity * scale - rate, rate
        w += velocity
    for rates, weight in on_ranks(rates_and_momentum, 2, correction):
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
        np.testing.assert_allclose(weight, w, rtol=1e-6)


@recorded
def broadcast_and_best(folder):
    rank, c = hvd.rank(), hvd.callbacks
    model = one_weight(sgd(0.25), start=5.0 + rank)
    kept = model.layers[0].kept
    kept.assign(float(rank))
    start = c.BroadcastGlobalVariablesCallback(1, device="/cpu:0")
    start.register_local_var(kept)
    best = c.BestModelCheckpoint("loss", 1, True, "max", save_freq=STEPS)
    best.filepath = f"{folder}/{rank}.weights.h5"
    model.fit(X, Y, epochs=2, callbacks=[start, best], **FIT)
    end = float(model.layers[-1].kernel[0, 0])
    model.load_weights(best.filepath)  # of the end of the epoch of the largest loss
    return [end, float(kept), float(model.layers[-1].kernel[0, 0])]


def test_the_weights_of_rank_1_reach_all_and_the_best_are_kept(tmp_path):
    for rank, found in enumerate(on_ranks(broadcast_and_best, 2, str(tmp_path))):
        assert found == [6.0 - 4 * 0.25, rank, 6.0 - 2 * 0.25]


@recorded
def fit_outside_of_a_set():
    rank, c = hvd.rank(), hvd.callbacks
    pair = hvd.add_process_set([0, 2])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
    model = one_weight(optimizer, start=5.0 + rank)
    callbacks = [
        c.BroadcastGlobalVariablesCallback(0),
        c.MetricAverageCallback(),
        c.LearningRateWarmupCallback(3.0, warmup_epochs=1),
    ]
    x = X * (1.0, 10.0, 3.0)[rank]  # the gradient; the set has the average 2
    history = model.fit(x, Y, epochs=1, callbacks=callbacks, **FIT).history
    return [float(model.layers[-1].kernel[0, 0]), history["loss"], history["lr"]]


def test_fit_runs_on_a_rank_outside_of_the_optimizers_set():
    # A warm-up of three ranks and two steps: 2 and 3. All begin with 5.
    losses = []
    for gradient in (1.0, 10.0, 3.0):
        step = 2.0 * (10.0 if gradient == 10 else 2.0)
        losses += [5.0 * gradient, (5.0 - step) * gradient]
    for rank, (weight, loss, rate) in enumerate(on_ranks(fit_outside_of_a_set, 3)):
        assert weight == pytest.approx(5.0 - 5.0 * (10.0 if rank == 1 else 2.0))
        assert loss == pytest.approx([np.mean(losses)])
        assert rate == pytest.approx([3.0])


@recorded
def fits_of_own_sets():
    """Two fits of models that each rank trains alone, at a rate of its own."""
    rank, c = hvd.rank(), hvd.callbacks
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=own_set()
    )
    model, rates = one_weight(optimizer, start=5.0 + rank), Rates()
    options = {**FIT, "batch_size": 2 - rank}  # rank 1 has twice as many steps
    for _ in range(2):
        callbacks = [
            c.BroadcastGlobalVariablesCallback(0),
            c.MetricAverageCallback(),
            c.LearningRateWarmupCallback(4.0 * (rank + 1), warmup_epochs=1),
            rates,
        ]
        model.fit(X, Y, callbacks=callbacks, **options)
    end = float(model.layers[-1].kernel[0, 0])
    if rank == 0:  # one rank alone trains a new model
        model = one_weight(optimizer)
    start = [c.BroadcastGlobalVariablesCallback(0)]
    error = outcome(lambda: model.fit(X, Y, callbacks=start, **options))
    return [rates.seen, end, error["message"]]


def test_sets_may_train_models_of_their_own_at_rates_of_their_own():
    for rank, (rates, weight, error) in enumerate(on_ranks(fits_of_own_sets, 2)):
        assert "the models of ranks [1] alone were broadcast before" in error
        steps, rate = STEPS * (rank + 1), 4.0 * (rank + 1)
        fit = [rate / 2 * ((step + 1) / steps + 1) for step in range(steps)]
        assert rates == pytest.approx(2 * fit)
        # Both begin with 5; the second fit goes on with the rank's own weight.
        assert weight == pytest.approx(5.0 - 2 * sum(fit))


@recorded
def fit_of_a_set_alone():
    pair = hvd.add_process_set([0, 1])
    rates = []
    if pair.included():
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=pair
        )
        callbacks = [hvd.callbacks.LearningRateWarmupCallback(3.0, warmup_epochs=1)]
        history = one_weight(optimizer).fit(X, Y, callbacks=callbacks, **FIT).history
        rates = history["lr"]
    return [rates, float(hvd.allreduce(tf.constant(float(hvd.rank()))))]


def test_callbacks_for_the_rate_do_not_wait_for_ranks_outside_of_the_set():
    ends = on_ranks(fit_of_a_set_alone, 3)
    assert ends == [[[3.0], 1.0], [[3.0], 1.0], [[], 1.0]]


class Mine(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


class Own(keras.layers.Dense):
    """A layer that it does not know."""


@recorded
def loaded(folder):
    path = f"{folder}/{hvd.rank()}.keras"
    model = keras.Sequential([keras.Input((1,)), Own(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(Mine(0.125)), "mse")
    model.fit(X, Y, **FIT)
    model.save(path)
    other = hvd_keras.load_model(
        path,
        custom_optimizers=[Mine],
        custom_objects={"Own": Own},
        compression=hvd.Compression.fp16,
        legacy_opts=True,
    )
    other.fit(X, Y, **FIT)
    return [
        is_distributed(other.optimizer) and isinstance(other.optimizer, Mine),
        isinstance(other.layers[-1], Own),
        other.optimizer.tfdist_options.compression,
        int(other.optimizer.iterations),
        [w.tolist() for w in other.get_weights()],
    ]


def test_a_model_of_own_classes_is_loaded_and_trains_on(tmp_path):
    first, second = on_ranks(loaded, 2, str(tmp_path))
    assert first == second
    assert first[:4] == [True, True, "fp16", 2 * STEPS]


@recorded
def keras_state():
    optimizer = sgd(0.25)
    model = one_weight(optimizer, start=float(hvd.rank()))
    state = hvd.elastic.KerasState(model, optimizer=optimizer, epoch=hvd.rank())
    state.sync()
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=100)
    model.layers[-1].kernel.assign([[3.0]])
    commit.commit()
    model.layers[-1].kernel.assign([[4.0]])
    state.save()
    model.layers[-1].kernel.assign([[5.0]])
    state.restore()
    return [float(model.layers[-1].kernel[0, 0]), state.epoch]


def test_a_state_of_a_model_is_committed_and_saved():
    assert on_ranks(keras_state, 2) == [[4.0, 0]] * 2


# ---- optimizers with local layers


def own_set():
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    return sets[hvd.rank()]


OPTIONS = {
    "sum": ({"op": "Sum"}, 3.0, 4.0),
    "fp16": ({"compression": "fp16"}, 1.5, 2.0),
    "divided": ({"gradient_predivide_factor": 4.0}, 1.5, 2.0),
    "dense": ({"sparse_as_dense": True, "name": "mine"}, 1.5, 2.0),
    "groups": ({"groups": 1}, 1.5, 2.0),
    "number": ({"num_groups": 1}, 1.5, 2.0),
    "devices": ({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, 1.5, 2.0),
    "unscaled": ({"scale_local_gradients": False}, 1.5, 4.0),
    "passes": (
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        *(1.5, 2.0),
    ),
    "own set": ({"process_set": "own"}, None, 4.0),  # of one rank: rank + 1
}


@recorded
def with_options():
    alone, found = own_set(), {}
    named = {"Sum": hvd.Sum, "fp16": hvd.Compression.fp16, "own": alone}
    for case, (options, *_) in OPTIONS.items():
        given = {k: named.get(v, v) for k, v in options.items()}
        shared, layer = tf.Variable([0.0]), keras.layers.Dense(1, use_bias=False)
        layer.build((None, 1))
        layer.kernel.assign([[0.0]])
        made = [
            hvd_keras.PartialDistributedOptimizer(
                keras.optimizers.SGD(1.0), local_layers=[layer], **given
            ),
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **given),
        ]
        made[1].register_local_var(layer)
        ends = []
        for optimizer in made:
            shared.assign([0.0])
            layer.kernel.assign([[0.0]])
            grads = [tf.constant([hvd.rank() + 1.0]), tf.constant([[4.0]])]
            for _ in range(options.get("backward_passes_per_step", 1)):
                optimizer.apply(grads, [shared, layer.kernel])
            ends.append([-float(shared[0]), -float(layer.kernel[0, 0])])
        found[case] = ends
    return found


@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
def test_options_go_with_local_layers():
    for rank, found in enumerate(on_ranks(with_options, 2)):
        for case, (_, shared, own) in OPTIONS.items():
            expected = [rank + 1.0 if shared is None else shared, own]
            assert (case, found[case]) == (case, [expected] * 2)
