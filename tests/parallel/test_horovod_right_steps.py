"""Scripts that are right and hard to tell from wrong ones, on two ranks and on three.

Beside test_horovod_unreduced.py. Each case is a training of a few steps; what it is
compared with is a wrong one that looks alike, where there is one.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.guarded import guarded
from helpers.ranks import run_ranks

import tfdist
import tfdist.horovod.tensorflow as hvd
import tfdist.horovod.tensorflow.keras as hvd_keras

wrapped = hvd.DistributedGradientTape
TAKEN = "taken"
# Eagerly, or while a step is traced; and when a traced one runs.
REFUSED = ("RuntimeError", "FailedPreconditionError", "MismatchError")
CASES, EXPECTED = {}, {}


def case(expected):
    def add(function):
        CASES[function.__name__] = function
        EXPECTED[function.__name__] = expected
        return function

    return add


def variable(*shape):
    return keras.Variable(np.ones(shape, "float32"))


def gradients(loss, variables, wrap=None, persistent=False):
    with tf.GradientTape(persistent=persistent) as tape:
        value = loss()
    return (wrap(tape) if wrap else tape).gradient(value, variables)


def product(*factors):
    return (1.0 + hvd.rank()) * sum(tf.reduce_sum(f * f) for f in factors)


def apply(optimizer, grads, variables):
    optimizer.apply_gradients(zip(grads, variables, strict=True))


def sgd():
    return keras.optimizers.SGD(0.01)


# ---- the first step ----


def mnist_elastic(later):
    """Horovod's elastic example: a plain step makes the variables that are sent."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.001 * hvd.size())
    x = tf.random.normal([8, 4])

    @tf.function
    def training_step(allreduce=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        if allreduce:
            tape = wrapped(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        apply(optimizer, grads, model.trainable_variables)
        return loss

    training_step(allreduce=False)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(3):
            training_step(allreduce=later)
            state.commit()

    train(state)
    same = hvd_keras.allreduce(model.get_weights()[0])
    np.testing.assert_allclose(same, model.get_weights()[0])


@case(TAKEN)
def first_step_of_the_elastic_example():
    mnist_elastic(True)


@case(REFUSED)
def first_step_of_the_elastic_example_and_all_others():
    mnist_elastic(False)


def of_zeros(steps):
    weight, optimizer = variable(5), keras.optimizers.Adam(0.1)
    for _ in range(steps):
        apply(optimizer, [tf.zeros_like(weight)], [weight])


@case(TAKEN)
def zeros_make_the_variables():
    of_zeros(1)


@case(TAKEN)
def zeros_again_change_nothing():
    of_zeros(2)


@case(REFUSED)
def fit_without_a_wrapper():
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(), "mse")
    model.fit(np.ones((16, 4)), np.ones((16, 2)), batch_size=8, verbose=0)


@case(REFUSED)
def micro_batches_without_a_wrapper():
    weight = variable(5)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=8)
    for _ in range(2):
        apply(optimizer, gradients(lambda: product(weight), [weight]), [weight])


# ---- reduced numbers ----


def divided_in_a_function(wrap, by):
    weight, optimizer = variable(5), sgd()

    @tf.function
    def step():
        grads = gradients(lambda: product(weight), [weight], wrap)
        apply(optimizer, by(grads), [weight])

    for _ in range(2):
        step()


def by_a_count(grads):
    count = hvd.allreduce(tf.constant(8.0), op=hvd.Sum)
    return [g / count for g in grads]


def by_a_norm(grads):
    norm = tf.sqrt(hvd.allreduce(tf.reduce_sum(grads[0] ** 2)))
    return [g / tf.maximum(norm, 1.0) for g in grads]


def where_finite(grads):
    finite = hvd.allreduce(tf.cast(tf.math.is_finite(grads[0][0]), tf.float32)) == 1.0
    return [tf.where(finite, g, tf.zeros_like(g)) for g in grads]


for by in (by_a_count, by_a_norm, where_finite):
    for wrap, expected in ((None, REFUSED), (wrapped, TAKEN)):
        name = f"{by.__name__}_{'plain' if wrap is None else 'wrapped'}"
        CASES[name] = lambda wrap=wrap, by=by: divided_in_a_function(wrap, by)
        EXPECTED[name] = expected


def partly(own):
    def wrap(tape):
        tape = wrapped(tape)
        tape.register_local_source(own)
        return tape

    return wrap


@case(TAKEN)
def clipped_together_with_local_ones():
    both, optimizer = [variable(5), variable(7)], sgd()

    @tf.function
    def step():
        grads = gradients(lambda: product(*both), both, partly(both[1]))
        apply(optimizer, tf.clip_by_global_norm(grads, 1.0)[0], both)

    optimizer.build(both)
    step()  # once: the norm lets the ranks differ, as the comparison of weights finds


@case(TAKEN)
def reduced_by_hand_beside_local_ones():
    both, optimizer = [variable(5), variable(7)], sgd()

    @tf.function
    def step():
        grads = gradients(lambda: product(*both), both)
        apply(optimizer, [hvd.allreduce(grads[0]), grads[1]], both)

    for _ in range(2):
        step()


# ---- gradients that are right without a reduction ----


@case(TAKEN)
def local_and_shared_ones_to_two_optimizers():
    both, optimizers = [variable(5), variable(7)], [sgd(), sgd()]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = product(*both)
        tape = partly(both[1])(tape)
        local, shared = tape.get_local_and_global_gradients(loss, both)
        for optimizer, pairs in zip(optimizers, (shared, local), strict=True):
            optimizer.apply_gradients([(g, v) for v, g in pairs])

    for _ in range(2):
        step()


def in_a_function(wrap, variables):
    """They come out of a function, and are applied eagerly."""
    optimizer = sgd()
    found = tf.function(lambda: gradients(lambda: product(*variables), variables, wrap))
    for _ in range(3):
        apply(optimizer, found(), variables)


@case(TAKEN)
def all_local_in_a_function():
    weight = variable(5)
    in_a_function(partly(weight), [weight])


@case(TAKEN)
def outside_of_the_set_in_a_function():
    last = hvd.add_process_set([1])
    weight = variable(5)
    in_a_function(lambda tape: wrapped(tape, process_set=last), [weight])


class Halved(hvd.Compression.none):
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor):
        return tensor / 2.0, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * 2.0


def own_compressor(own):
    def wrap(tape):
        tape = wrapped(tape, compression=Halved)
        tape.register_local_source(own)
        return tape

    return wrap


@case(TAKEN)
def local_ones_with_a_compressor():
    both, optimizer = [variable(5), variable(7)], sgd()
    for _ in range(3):
        grads = gradients(lambda: product(*both), both, own_compressor(both[1]))
        apply(optimizer, grads, both)


@case(TAKEN)
def local_ones_with_a_compressor_in_a_function():
    both = [variable(5), variable(7)]
    in_a_function(own_compressor(both[1]), both)


# ---- several sets of gradients, then several steps ----


def two_losses(changed, take, again=False):
    encoder, heads = variable(50), [variable(5), variable(7)]
    optimizer = sgd()
    optimizer.build([encoder, *heads])
    for _ in range(3):
        with tf.GradientTape(persistent=True) as tape:
            losses = [product(encoder, head) for head in heads]
        tape = wrapped(tape)
        ready = [
            (changed(tape.gradient(loss, [encoder, head])), [encoder, head])
            for loss, head in zip(losses, heads, strict=True)
        ]
        for grads, variables in ready:
            take(optimizer, grads, variables)
            hvd.allreduce(tf.ones([3]))  # a metric
        if again:
            take(optimizer, *ready[0])


def scaled(grads):
    return [0.5 * g for g in grads]


def in_functions():
    functions = {}

    def take(optimizer, grads, variables):
        key = tuple(map(id, variables))
        if key not in functions:
            functions[key] = tf.function(lambda g: apply(optimizer, g, variables))
        functions[key](grads)

    return take


@case(TAKEN)
def two_losses_of_one_tape():
    two_losses(list, apply)


@case(TAKEN)
def two_losses_of_one_tape_one_used_twice():
    two_losses(list, apply, again=True)


@case(TAKEN)
def two_losses_of_one_tape_scaled():
    two_losses(scaled, apply)


@case(TAKEN)
def two_losses_of_one_tape_in_functions():
    two_losses(list, in_functions())


@case(TAKEN)
def two_sets_for_one_function():
    weight, optimizer = variable(50), sgd()
    take = tf.function(lambda g: apply(optimizer, g, [weight]))
    for _ in range(3):
        ready = [gradients(lambda: product(weight), [weight], wrapped) for _ in "ab"]
        for grads in ready:
            take(grads)


@case(TAKEN)
def two_sets_for_one_function_one_used_twice():
    weight, optimizer = variable(50), sgd()
    take = tf.function(lambda g: apply(optimizer, g, [weight]))
    for _ in range(3):
        ready = [gradients(lambda: product(weight), [weight], wrapped) for _ in "ab"]
        for grads in [*ready, ready[0]]:
            take(grads)


SOME = (  # of each group above
    "first_step_of_the_elastic_example",
    "first_step_of_the_elastic_example_and_all_others",
    "zeros_make_the_variables",
    "micro_batches_without_a_wrapper",
    "by_a_norm_plain",
    "by_a_norm_wrapped",
    "reduced_by_hand_beside_local_ones",
    "outside_of_the_set_in_a_function",
    "local_ones_with_a_compressor",
    "two_losses_of_one_tape_scaled",
    "two_sets_for_one_function_one_used_twice",
)


def outcomes(names):
    found = {}
    with guarded():
        for name in names:
            tf.random.set_seed(hvd.rank())
            try:
                CASES[name]()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = TAKEN
    return found


@pytest.fixture(scope="module")
def of_some():
    return run_ranks(outcomes, 2, SOME, timeout_s=150)


@pytest.fixture(scope="module")
def of_all():
    return run_ranks(outcomes, 2, list(CASES), timeout_s=150)


@pytest.mark.parametrize("name", SOME)
def test_a_right_step_is_taken_and_its_wrong_neighbour_refused(name, of_some):
    check(name, of_some)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_right_step_is_taken_and_its_wrong_neighbour_refused(name, of_all):
    check(name, of_all)


def check(name, ranks):
    for found in ranks:
        if EXPECTED[name] is TAKEN:
            assert found[name] == TAKEN
        else:
            assert found[name].startswith(REFUSED), found[name]
            assert "were not reduced over the 2 ranks" in found[name]
            assert "optimizer.build(variables)" in found[name]


def in_worlds(in_graph):
    """Trains in one world, and goes on in others with the same optimizer."""
    weight, optimizer = variable(40), sgd()

    def take(grads):
        apply(optimizer, grads, [weight])

    take = tf.function(take) if in_graph else take
    with guarded():
        for steps in (1, 2, 1):
            if not tfdist.is_initialized():
                hvd.init()
            for _ in range(steps):
                take(scaled(gradients(lambda: product(weight), [weight], wrapped)))
            hvd.shutdown()
        hvd.init()
        try:
            for _ in range(4):  # a function that was traced before has taken four
                take(gradients(lambda: product(weight), [weight]))
        except (RuntimeError, tf.errors.FailedPreconditionError):
            return "refused"
    return "taken"


@pytest.mark.parametrize("in_graph", [False, True])
def test_local_gradients_are_refused_in_a_later_world(in_graph):
    assert run_ranks(in_worlds, 2, in_graph) == ["refused", "refused"]


def fit_outside_of_a_set():
    pair = hvd.add_process_set([0, 2])
    keras.utils.set_random_seed(1)
    scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0)
    optimizer = hvd_keras.DistributedOptimizer(scaled, process_set=pair)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with guarded():
        model.compile(optimizer, "mse")
        model.fit(np.ones((24, 4)), np.ones((24, 2)), batch_size=8, verbose=0)
    return int(optimizer.iterations)


@pytest.mark.slow
def test_a_loss_scale_outside_of_the_set_takes_its_own_steps():
    assert run_ranks(fit_outside_of_a_set, 3, timeout_s=100) == [3, 3, 3]
