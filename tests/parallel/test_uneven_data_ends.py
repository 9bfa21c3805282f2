"""UnevenData where data end in other ways: within a step, before the first one."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import run_ranks

import tfdist

FEATURES, SIZE = 3, 4


def batches_of(rank, count):
    rng = np.random.default_rng([rank, count])
    x = rng.normal(size=(count, SIZE, FEATURES))
    return list(zip(x, x.sum(axis=2, keepdims=True), strict=True))


def data_of(batches, kind):
    """Arrays, or a dataset of batches that are known to have one size."""
    if kind == "arrays":
        x = np.concatenate([x for x, _ in batches] or [np.zeros((0, FEATURES))])
        y = np.concatenate([y for _, y in batches] or [np.zeros((0, 1))])
        return {"x": x, "y": y, "batch_size": SIZE}
    spec = [tf.TensorSpec([SIZE, n], "float64") for n in (FEATURES, 1)]
    made = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tuple(spec)
    )
    if kind == "counted":
        made = made.apply(tf.data.experimental.assert_cardinality(len(batches)))
    return {"x": made}


def make_model(wrap):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(wrap(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return model


@in_float64
def fit(steps, kind):
    model = make_model(tfdist.DistributedOptimizer)
    rank = tfdist.rank()
    history = model.fit(
        **data_of(batches_of(rank, steps[rank]), kind),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[tfdist.callbacks.UnevenData(), tfdist.callbacks.MetricAverage()],
    ).history
    return [state_of(model, model.optimizer), list(map(float, history["loss"]))]


@in_float64
def fit_alone(steps):
    model = make_model(lambda optimizer: optimizer)
    own = [batches_of(rank, count) for rank, count in enumerate(steps)]
    together = []
    for step in range(max(steps)):
        x, y = zip(*[b[step] for b in own if step < len(b)], strict=True)
        together.append((np.concatenate(x), np.concatenate(y)))
    spec = [tf.TensorSpec([None, n], "float64") for n in (FEATURES, 1)]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(together), output_signature=tuple(spec)
    ).apply(tf.data.experimental.assert_cardinality(len(together)))
    history = model.fit(dataset, epochs=2, verbose=0).history
    return [state_of(model, model.optimizer), history["loss"]]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("unknown", [3, 1]),
        pytest.param("counted", [0, 2], marks=pytest.mark.slow),
        ("arrays", [2, 0]),
    ],
)
def test_a_size_of_batches_that_is_known_counts_nothing_without_a_batch(kind, steps):
    alone, losses = fit_alone(steps)
    ranks = run_ranks(fit, len(steps), steps, kind)
    # The first states are weights; Keras counts the step that finds the end as well.
    count = 2 if kind == "unknown" else len(alone)
    assert_like_one_process([s[:count] for s, _ in ranks], alone[:count], kind)
    assert_like_one_process([s for s, _ in ranks], ranks[0][0], kind)
    for _, found in ranks:
        assert found == ranks[0][1]
        if kind != "unknown":
            np.testing.assert_allclose(found, losses, rtol=1e-10)


class Two(keras.Model):
    """Two parts with an optimizer each, which the first step builds."""

    def __init__(self):
        super().__init__()
        self.parts = [
            keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(n)])
            for n in (1, 2)
        ]

    def compile(self, first, second):
        super().compile(first, loss="mse", run_eagerly=True)
        self.second = second

    def train_step(self, data):
        x, y = data
        optimizers = [self.optimizer, self.second]
        for part, optimizer in zip(self.parts, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, part(x))
            grads = tape.gradient(loss, part.trainable_variables)
            optimizer.apply(grads, part.trainable_variables)
        return {"loss": loss}


@in_float64
def fit_two(steps):
    keras.utils.set_random_seed(2)
    model = Two()
    model.compile(
        *[tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1)) for _ in range(2)]
    )
    rank = tfdist.rank()
    model.fit(
        **data_of(batches_of(rank, steps[rank]), "counted"),
        verbose=0,
        callbacks=[tfdist.callbacks.UnevenData()],
    )
    return state_of(model, model.optimizer, model.second)


def test_optimizers_that_a_rank_without_a_batch_has_not_built():
    first, second = run_ranks(fit_two, 2, [0, 2])
    assert [v.shape for v in first] == [v.shape for v in second]
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        bits = [v.numpy().tobytes() for v in optimizer.variables]
        self.seen[str(int(optimizer.iterations))] = [
            float(optimizer.learning_rate),
            *bits,
        ]


class SetRate(keras.callbacks.Callback):
    """Sets the rate when an epoch begins."""

    def __init__(self, epoch, rate):
        super().__init__()
        self.epoch, self.rate = epoch, rate

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.model.optimizer.learning_rate = self.rate


def warm_up(steps, has_schedule, ends, epochs, set_rate):
    """Returns the rate and the optimizer's variables after each step of this rank.

    Args:
        steps: the number of batches of each rank.
        has_schedule: whether the rate is a schedule.
        ends: the epochs at which a call of `fit` ends; each has callbacks of its own.
        epochs: epochs of the warm-up.
        set_rate: arguments of a `SetRate`, or None.
    """
    rate = 0.2
    if has_schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.9)
    model = make_model(lambda optimizer: optimizer)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(tfdist.DistributedOptimizer(optimizer), loss="mse")
    rates = Rates()
    rank = tfdist.rank()
    for begin, end in itertools.pairwise([0, *ends]):
        model.fit(
            **data_of(batches_of(rank, steps[rank]), "counted"),
            initial_epoch=begin,
            epochs=end,
            verbose=0,
            callbacks=[
                tfdist.callbacks.UnevenData(),
                tfdist.callbacks.LearningRateWarmup(epochs),
                *([SetRate(*set_rate)] if set_rate else []),
                rates,
            ],
        )
    return rates.seen


@pytest.mark.parametrize(
    ("has_schedule", "ends"),
    [
        pytest.param(False, [3], marks=pytest.mark.slow),
        (True, [3]),
        (True, [1, 3]),
        pytest.param(False, [1, 3], marks=pytest.mark.slow),
    ],
)
def test_warm_up_goes_by_the_steps_of_the_rank_that_has_most(has_schedule, ends):
    longer, shorter = run_ranks(warm_up, 2, [4, 3], has_schedule, ends, 2, None)
    assert len(longer) == 12
    assert shorter == {step: longer[step] for step in shorter}
    assert len(shorter) == 9


def test_a_warm_up_that_ends_on_the_rank_with_most_steps_is_over_on_all():
    arguments = [2, 1], False, [3], 1.5, [2, 0.01]  # it ends in the fourth step
    longer, shorter = run_ranks(warm_up, 2, *arguments)
    assert [round(rate, 3) for rate, *_ in longer.values()][-3:] == [0.2, 0.01, 0.01]
    assert shorter == {step: longer[step] for step in ("1", "3", "5")}


class Passes(keras.callbacks.Callback):
    """Counts the passes over the data."""

    now = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch


@in_float64
def fit_passes(counts):
    """Trains on a different number of batches in each epoch, unknown to Keras."""
    model = make_model(tfdist.DistributedOptimizer)
    own = counts[tfdist.rank()]
    passes = Passes()
    spec = [tf.TensorSpec([SIZE, n], "float64") for n in (FEATURES, 1)]
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches_of(tfdist.rank(), own[passes.now])),
        output_signature=tuple(spec),
    )
    model.fit(
        data,
        epochs=2,
        verbose=0,
        callbacks=[tfdist.callbacks.UnevenData(), passes],
    )
    return state_of(model, model.optimizer)


def test_a_rank_whose_first_batch_comes_in_a_later_epoch():
    first, second = run_ranks(fit_passes, 2, [[2, 3], [0, 2]])
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]


def warm_up_of_unknown_steps():
    model = make_model(tfdist.DistributedOptimizer)
    kind = "unknown" if tfdist.rank() == 1 else "counted"
    try:
        model.fit(
            **data_of(batches_of(0, 1), kind),
            verbose=0,
            callbacks=[tfdist.callbacks.LearningRateWarmup(1)],
        )
    except ValueError as error:
        return str(error)
    return ""


def test_warm_up_on_a_rank_that_does_not_know_its_steps_is_an_error_on_all():
    for text in run_ranks(warm_up_of_unknown_steps, 2):
        assert "LearningRateWarmup(steps_per_epoch=...)" in text


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ZeroDivisionError


def again(next_one):
    """What is left on a model after a fit that failed, and after another one."""
    model = make_model(tfdist.DistributedOptimizer)
    model.compute_loss = own = model.compute_loss
    model.optimizer.learning_rate = 0.0
    found = []
    for made in [["UnevenData", Fails()], [next_one]]:
        listed = [getattr(tfdist.callbacks, made[0])(), *made[1:]]
        batches = batches_of(tfdist.rank(), 1)
        with contextlib.suppress(ZeroDivisionError):
            model.fit(**data_of(batches, "counted"), verbose=0, callbacks=listed)
        found.append(model.compute_loss is own)
    return found


@pytest.mark.parametrize(
    "next_one", [pytest.param("UnevenData", marks=pytest.mark.slow), "MetricAverage"]
)
def test_a_fit_after_one_that_failed_weights_once_or_not_at_all(next_one):
    assert run_ranks(again, 2, next_one) == [[False, True]] * 2


def not_a_mean(reduction):
    model = make_model(tfdist.DistributedOptimizer)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(model.optimizer, loss=loss)
    with pytest.raises(ValueError, match=f"loss with reduction={reduction!r}"):
        model.fit(
            **data_of(batches_of(0, 1), "counted"),
            verbose=0,
            callbacks=[tfdist.callbacks.UnevenData()],
        )
    return int(model.optimizer.iterations)


@pytest.mark.parametrize(
    "reduction",
    [
        *("sum", None),
        pytest.param("none", marks=pytest.mark.slow),
        "mean_with_sample_weight",
    ],
)
def test_losses_that_are_no_means_over_samples_are_not_weighted(reduction):
    assert run_ranks(not_a_mean, 2, reduction) == [0, 0]


@pytest.mark.parametrize(
    "options", [{"weighted": "no"}, {"timeout_s": -1}, {"timeout_s": "1"}]
)
def test_arguments_are_looked_at_at_once(options):
    with pytest.raises(ValueError, match=f"Expected {next(iter(options))}"):
        tfdist.callbacks.UnevenData(**options)


@in_float64
def fit_with_statistics(is_alone, ranks_with_data=1):
    """The moving statistics of the ranks that have seen data, combined."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1)
    listed = []
    if not is_alone:
        optimizer = tfdist.DistributedOptimizer(optimizer)
        listed = [
            tfdist.callbacks.UnevenData(),
            tfdist.callbacks.CombineMovingStatistics(),
        ]
    model.compile(optimizer, loss="mse")
    rank = 0 if is_alone else tfdist.rank()
    batches = batches_of(rank, 3 if rank < ranks_with_data else 0)
    model.fit(**data_of(batches, "counted"), verbose=0, callbacks=listed)
    layer = model.layers[0]
    return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]


def test_a_rank_without_a_batch_adds_nothing_to_moving_statistics():
    alone = fit_with_statistics(True)
    for statistics in run_ranks(fit_with_statistics, 2, False):
        np.testing.assert_allclose(statistics, alone, rtol=1e-12)


def test_a_rank_without_a_batch_does_not_change_the_weights_of_the_others():
    of_two = run_ranks(fit_with_statistics, 2, False, 2)[0]
    for statistics in run_ranks(fit_with_statistics, 3, False, 2):
        np.testing.assert_allclose(statistics, of_two, rtol=1e-12)
