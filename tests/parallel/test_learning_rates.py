"""Learning rates that callbacks change: resumed warm-ups, and what is refused."""

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks
from helpers.two_parts import TwoParts

import tfdist
from tfdist.callbacks import (
    BroadcastInitialState,
    LearningRateScale,
    LearningRateWarmup,
)
from tfdist.callbacks.learning_rate_warmup import target_of
from tfdist.optimizers import warmup_factor

EPOCHS, STEPS, BATCH = 4, 3, 4


def constant(rate):
    return keras.optimizers.schedules.PiecewiseConstantDecay([10**6], [rate, 0.0])


def compiled(optimizer, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, name="a"),
            keras.layers.Dense(1, name="b"),
        ]
    )
    options = {"jit_compile": False, **options}
    model.compile(tfdist.DistributedOptimizer(optimizer), "mse", **options)
    return model


def fit(model, *callbacks, **options):
    """Trains; returns the rate of the last step of each execution."""
    x = np.arange(36, dtype="float32").reshape(12, 3) / 36 + tfdist.rank()
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(model.optimizer.learning_rate))

    listed = [BroadcastInitialState(), *callbacks, Watch()]
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, **options}
    model.fit(x, x.sum(1, keepdims=True), verbose=0, callbacks=listed, **options)
    return rates


def state(model):
    return [v.numpy() for v in model.weights + model.optimizer.variables]


# ---- a warm-up that is resumed

RESUMED = {
    "within": {"at": 1},
    "within, other digits": {"at": 1, "rate": 0.0037},
    "within, to any number": {"at": 2, "rate": 0.01234567, "warmup_epochs": 3.5},
    "right after": {"at": 2},
    "right after, between two steps": {"at": 2, "warmup_epochs": 1.8},
    "long after": {"at": 3},
    "executions of three": {"at": 1, "steps_per_execution": 3},
    "right after, executions of three": {
        "at": 2,
        "warmup_epochs": 5 / 3,
        "steps_per_execution": 3,
    },
    "not corrected": {"at": 2, "momentum_correction": False},
    "the target said later": {"at": 1, "later": 0.02},
    "schedule within": {"at": 1, "schedule": True},
    "schedule right after": {"at": 2, "schedule": True},
    "schedule long after": {"at": 3, "schedule": True},
    "in one process": {"at": 1, "keeps": True},
    "schedule in one process": {"at": 1, "schedule": True, "keeps": True},
}


# The others are slow.
USUAL = ["right after"]


def resumed(names):
    """By name: whether a training ends with the same bits, and its rates."""
    return {name: resume(**RESUMED[name]) for name in names}


def resume(
    at,
    rate=0.01,
    warmup_epochs=2,
    schedule=False,
    later=None,
    keeps=False,
    steps_per_execution=1,
    **options,
):
    def new():
        sgd = keras.optimizers.SGD(constant(rate) if schedule else rate, momentum=0.9)
        return compiled(sgd, steps_per_execution=steps_per_execution)

    def both(**more):
        return [
            LearningRateScale(),
            LearningRateWarmup(warmup_epochs, **options, **more),
        ]

    whole = new()
    rates = fit(whole, *both())
    first = new()
    seen = fit(first, *both(), epochs=at)
    second = first
    if not keeps:
        second = new()
        second.optimizer.build(second.trainable_variables)
        for variable, value in zip(
            second.weights + second.optimizer.variables, state(first), strict=True
        ):
            variable.assign(value)
    seen += fit(second, *both(target=later), initial_epoch=at)
    pairs = zip(state(whole), state(second), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    return [same, seen == rates, seen]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param(sorted(RESUMED), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_warm_up_ends_with_the_bits_of_one_that_was_not_interrupted(names):
    results = run_ranks(resumed, 2, names, timeout_s=100.0)
    for name, (same, same_rates, rates) in results[0].items():
        assert same_rates, (name, rates)
        assert same, name
        np.testing.assert_allclose(
            rates[-1], 2 * RESUMED[name].get("rate", 0.01), rtol=1e-6, err_msg=name
        )
    assert results[0] == results[1]


def test_the_target_is_found_where_only_one_is_possible_or_was_written_by_hand():
    rng = np.random.default_rng(5)
    unsure = 0
    for trial in range(4000):
        size, total = rng.integers(2, 65), rng.integers(2, 2000)
        factor = warmup_factor(int(rng.integers(0, total)), int(total), 1 / int(size))
        written = trial % 2
        target = np.float32(
            int(rng.integers(1, 1000)) / 10 ** int(rng.integers(1, 6))
            if written
            else rng.uniform(1e-4, 10)
        )
        found, is_exact = target_of(np.float32(float(target) * factor), factor)
        assert np.float32(found * factor) == np.float32(float(target) * factor)
        if is_exact or written:
            assert found == float(target)
        unsure += not is_exact
    assert 0 < unsure < 2400


def set_by_a_scheduler():
    """Keras's callback sets the rate of each epoch: that is the target."""
    seen = []
    for at in (0, 1):
        model = compiled(keras.optimizers.SGD(0.5))
        model.optimizer.iterations.assign(at * STEPS)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)
        seen.append(fit(model, schedule, LearningRateWarmup(2), initial_epoch=at))
    return seen


def test_a_rate_that_a_scheduler_sets_is_the_target_also_when_resumed():
    for whole, later in run_ranks(set_by_a_scheduler, 2):
        assert whole[STEPS:] == later
        assert later[-1] == 0.25


# ---- rates that callbacks would leave wrong on all ranks, or different


def two_rates(second=None, **options):
    """A model with two optimizers; `options` are of the second one."""
    model = TwoParts()
    model.both = [
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.125)),
        tfdist.DistributedOptimizer(second or keras.optimizers.SGD(0.25), **options),
    ]
    model.build((None, 3))
    return model


def gan(*callbacks, own=None, default=False, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = two_rates(**options)
    if default:
        model.compile(jit_compile=False)
    else:
        model.compile(own, jit_compile=False)
    x = np.ones((8, 3), "float32") + tfdist.rank()
    listed = [BroadcastInitialState(), *callbacks]
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=listed)
    return [float(one.learning_rate) for one in model.both]


def multi():
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.125), {"a/.*": keras.optimizers.SGD(0.25)}
        )
    )


def fit_multi(*callbacks):
    model = compiled(multi())
    x = np.ones((8, 3), "float32") + tfdist.rank()
    listed = [BroadcastInitialState(), *callbacks]
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=listed)


class SetsOne(keras.callbacks.Callback):
    """Sets one of several rates, in the second epoch, to another value on each rank."""

    def on_epoch_begin(self, epoch, logs=None):
        own = self.model.optimizer
        listed = self.model.both if own is None else own.optimizers
        if epoch == 1:
            listed[1].learning_rate = 0.25 * (1 + tfdist.rank())


def sgd(rate):
    return compiled(keras.optimizers.SGD(rate))


def wrapped():
    return tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5))


CASES = {
    "target and schedule": lambda: fit(
        sgd(constant(0.1)), LearningRateWarmup(1, target=0.1)
    ),
    "multipliers": lambda: fit(
        sgd(constant(0.1)), LearningRateScale(1.0 + tfdist.rank())
    ),
    "rates of a GAN": lambda: gan(SetsOne()),
    "rates of a MultiOptimizer": lambda: fit_multi(SetsOne()),
    "scale, none": lambda: gan(LearningRateScale()),
    "scale, default": lambda: gan(LearningRateScale(), default=True),
    "scale, one more": lambda: gan(LearningRateScale(), own=wrapped()),
    "scale, MultiOptimizer": lambda: fit_multi(LearningRateScale()),
    "warm-up, none": lambda: gan(LearningRateWarmup()),
    "warm-up, default": lambda: gan(LearningRateWarmup(), default=True),
    "warm-up, MultiOptimizer": lambda: fit_multi(LearningRateWarmup()),
}


def refusals():
    found = {}
    for name, case in CASES.items():
        found[name] = ["", ""]
        try:
            case()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        tfdist.barrier()  # the ranks are still connected
    return found


def test_rates_that_would_be_wrong_are_refused_on_all_ranks():
    found, other = run_ranks(refusals, 2)
    assert found == other
    kinds = {name: kind for name, (kind, _) in found.items()}
    differing = {"multipliers", "rates of a GAN", "rates of a MultiOptimizer"}
    assert kinds == {
        name: "MismatchError" if name in differing else "ValueError" for name in CASES
    }
    text = {name: message for name, (_, message) in found.items()}
    assert "Omit target" in text["target and schedule"]
    assert "LearningRateScale(multiplier=2.0)] on rank 1" in text["multipliers"]
    gan_rates = text["rates of a GAN"]
    assert "rank 0: epoch 2, learning rates 0.125, 0.25;" in gan_rates
    assert "rank 1: epoch 2, learning rates 0.125, 0.5)" in gan_rates
    assert "0.5" in text["rates of a MultiOptimizer"]
    for name, message in text.items():
        if name.startswith(("scale", "warm-up")):
            assert "tfdist.optimizers.Warmup(rate, warmup_steps)" in message
            assert message.count("SGD 'sgd") == 2  # names them
    assert "optimizer=None" in text["scale, none"]
    assert "other optimizers, whose rates" in text["warm-up, default"]


def own_rates():
    """What is each rank's own has a rate of its own, and is not scaled."""

    class SetsIt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.both[1].learning_rate = 0.25 * (1 + tfdist.rank())

    keras.utils.clear_session()
    local = {"local_variables": lambda variable: True}
    rates = gan(SetsIt(), **local)
    model = two_rates(**local)
    model.compile(model.both[0], jit_compile=False)
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :1], verbose=0, callbacks=[LearningRateScale()])
    return rates + [float(one.learning_rate) for one in model.both]


def test_an_optimizer_of_local_variables_has_a_rate_of_its_own():
    assert run_ranks(own_rates, 2) == [
        [0.125, 0.25 * (1 + rank), 0.25, 0.25] for rank in range(2)
    ]
