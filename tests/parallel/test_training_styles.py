"""However a model is trained: several ranks end where one process with all data ends.

A style is a function that trains a model and returns its state. It runs twice: on
every rank with tfdist, each rank with weights and rows of its own, and in one process
with plain Keras, which has the rows of all ranks.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import run_ranks

import tfdist
from tfdist.training.model_optimizers import optimizers_of

STEPS, GLOBAL_BATCH = 6, 12


class World:
    """What a style does on a rank, or in the one process that stands for all ranks."""

    def __init__(self, size, ranked):
        self.size, self.ranked = size, ranked
        self.seed = 100 + (tfdist.rank() if ranked else 0)  # rank 0's weights win
        rng = np.random.default_rng(7)
        self.x = rng.normal(size=(STEPS * GLOBAL_BATCH, 6))
        self.y = np.stack(
            [np.sin(self.x).sum(axis=1), self.x[:, 0] * self.x[:, 1]], axis=1
        )

    def batches(self):
        size, rank = (self.size, tfdist.rank()) if self.ranked else (1, 0)
        return tfdist.data.shard(
            (self.x, self.y), batch_size=GLOBAL_BATCH // size, size=size, rank=rank
        )

    def optimizer(self, inner):
        return tfdist.DistributedOptimizer(inner) if self.ranked else inner

    def callbacks(self, *more):
        if not self.ranked:
            return list(more)
        return [tfdist.callbacks.BroadcastInitialState(), *more]

    def start(self, model, *optimizers):
        """Without fit: the same start for all."""
        for optimizer in optimizers:
            optimizer.build(model.trainable_variables)
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        if self.ranked:
            tfdist.broadcast_variables(model.weights + slots)

    def fit(self, model, *callbacks, **options):
        model.fit(
            self.batches(),
            verbose=0,
            shuffle=False,
            callbacks=self.callbacks(*callbacks),
            **options,
        )


def dense_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", name="first"),
            keras.layers.Dense(4, activation="softplus", name="second"),
            keras.layers.Dense(2, name="last"),
        ]
    )


def mean_square(y, out):
    return tf.reduce_mean(tf.reduce_mean((out - y) ** 2, axis=1))


class Lazy(keras.Model):
    """Made by its first batch, of parts that are made then, too."""

    def __init__(self, levels=2):
        super().__init__()
        self.first = keras.layers.Dense(5, activation="tanh")
        self.inner = Lazy(levels - 1) if levels else keras.layers.Dense(4)
        self.last = keras.layers.Dense(2)

    def call(self, x):
        return self.last(self.inner(self.first(x)))


class OwnStep(Lazy):
    """A train_step of its own: two losses, a metric, a counter of its own."""

    def __init__(self):
        super().__init__()
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="steps"
        )
        self.seen = keras.metrics.Mean("seen")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x)
            loss = mean_square(y, out) + 0.01 * tf.reduce_mean(out**2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        self.steps.assign_add(1.0)
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}


def nested(world):
    """A model in a model in a model, and a layer that is used twice."""
    deep = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(5, activation="tanh")]
    )
    inner = keras.Input((5,))
    middle = keras.Model(inner, keras.layers.Add()([deep(inner), deep(deep(inner))]))
    x = keras.Input((6,))
    out = keras.layers.Dense(2)(middle(keras.layers.Dense(5)(x)))
    model = keras.Model(x, out)
    optimizer = world.optimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    world.fit(model)
    return state_of(model, optimizer)


def own_train_step(world, run_eagerly=False):
    model, optimizer = OwnStep(), world.optimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, jit_compile=False, run_eagerly=run_eagerly)
    world.fit(model, epochs=2)
    return state_of(model, optimizer)


def run_eagerly(world):
    return own_train_step(world, run_eagerly=True)


class Adversaries(keras.Model):
    """Two models that are trained against each other, each with its optimizer."""

    def __init__(self, world):
        super().__init__()
        make = keras.layers.Dense
        self.maker = keras.Sequential([keras.Input((6,)), make(4), make(2)])
        self.judge = keras.Sequential(
            [keras.Input((2,)), make(5, activation="tanh"), make(1)]
        )
        self.of_maker = world.optimizer(keras.optimizers.Adam(0.01))
        self.of_judge = world.optimizer(keras.optimizers.RMSprop(0.02))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            made = self.maker(x)
            wrong = self.judge(made)
            maker_loss = tf.reduce_mean((wrong - 1.0) ** 2)
            judge_loss = tf.reduce_mean((self.judge(y) - 1.0) ** 2 + wrong**2)
        mine, its = self.maker.trainable_variables, self.judge.trainable_variables
        self.of_maker.apply(tape.gradient(maker_loss, mine), mine)
        self.of_judge.apply(other.gradient(judge_loss, its), its)
        return {"maker": maker_loss, "judge": judge_loss}


def two_optimizers(world):
    model = Adversaries(world)
    model.compile(optimizer=None, jit_compile=False)
    world.fit(model)
    return state_of(model, model.of_maker, model.of_judge)


def two_tapes_in_a_function(world):
    """Two equal lists of gradients in one function, one optimizer for each."""
    model = dense_model()
    pair = [keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)]
    world.start(model, *pair)
    make = tfdist.DistributedGradientTape if world.ranked else tf.GradientTape
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with make() as first, make() as second:
            out = model(x)
            losses = mean_square(y, out), tf.reduce_mean(out**4)
        grads = first.gradient(losses[0], variables)
        others = second.gradient(losses[1], variables)
        pair[0].apply(grads, variables)
        pair[1].apply(others, variables)

    for x, y in world.batches():
        step(x, y)
    return state_of(model, *pair)


def frozen_and_unfrozen(world):
    """A new list of gradients in the second fit, and what is new has begun equal."""
    model, found = dense_model(), []
    for trainable in (False, True):
        model.get_layer("second").trainable = trainable
        optimizer = world.optimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "mse", jit_compile=False)
        world.fit(model)
        found += state_of(model, optimizer)
    return found


def two_fits(world):
    """Lazily built; the optimizer goes on where it was, with other options."""
    model, optimizer = Lazy(), world.optimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    world.fit(model)
    world.fit(model, epochs=3, initial_epoch=1)
    return state_of(model, optimizer)


def a_changed_rate(world):
    """Set by a LambdaCallback, at the beginning of epochs and after a step."""
    model, optimizer = dense_model(), world.optimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", jit_compile=False)

    def at_epoch(epoch, logs=None):
        optimizer.learning_rate = 0.05 / (1 + epoch)

    def after_batch(batch, logs=None):
        if batch == 3:
            optimizer.learning_rate.assign(0.001)

    change = keras.callbacks.LambdaCallback(
        on_epoch_begin=at_epoch, on_train_batch_end=after_batch
    )
    world.fit(model, change, epochs=3)
    return [*state_of(model, optimizer), optimizer.learning_rate.numpy()]


def a_branch_of_one_rank(world):
    """The last layer of rank r is head r; of all heads but one a rank has no gradient.

    A head that no rank uses keeps its weights and gets no step.
    """
    body = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    heads = [
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        for _ in range(world.size + 1)
    ]
    x = keras.Input((6,))
    model = keras.Model(x, [head(body(x)) for head in heads])
    optimizer = world.optimizer(keras.optimizers.Adam(0.01))
    world.start(model, optimizer)
    variables = model.trainable_variables

    def loss_of(rank, x, y):
        return mean_square(y, heads[rank](body(x)))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            if world.ranked:  # every rank traces a graph of its own
                loss = loss_of(tfdist.rank(), x, y)
            else:  # row i is one of rank i mod size
                n = world.size
                loss = tf.add_n([loss_of(r, x[r::n], y[r::n]) for r in range(n)]) / n
        optimizer.apply(tape.gradient(loss, variables), variables)

    for x, y in world.batches():
        step(x, y)
    return state_of(model, optimizer)


def eager_loop(world):
    """Calls one by one; the ranks' batches differ in size from step to step."""
    model, optimizer = dense_model(), keras.optimizers.Adam(0.01)
    world.start(model, optimizer)
    rng = np.random.default_rng(5)
    for step in range(STEPS):
        rows = slice(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        x, y = world.x[rows], world.y[rows]
        cuts = np.sort(rng.choice(np.arange(1, GLOBAL_BATCH), world.size - 1, False))
        if world.ranked:
            x, y = (np.split(part, cuts)[tfdist.rank()] for part in (x, y))
            count = tfdist.allreduce(tf.constant(len(x)), op=tfdist.ReduceOp.SUM)
            tape = tfdist.DistributedGradientTape(op=tfdist.ReduceOp.SUM)
        else:
            count, tape = tf.constant(len(x)), tf.GradientTape()
        with tape:
            squares = tf.reduce_mean((model(x) - y) ** 2, axis=1)
            loss = tf.reduce_sum(squares) / tf.cast(count, squares.dtype)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return state_of(model, optimizer)


def train_on_batch(world):
    model, optimizer = dense_model(), world.optimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    world.start(model, optimizer)
    for x, y in world.batches():
        model.train_on_batch(x, y)
    return state_of(model, optimizer)


STYLES = (
    *(nested, own_train_step, run_eagerly, two_optimizers, two_tapes_in_a_function),
    *(frozen_and_unfrozen, two_fits, a_changed_rate, a_branch_of_one_rank),
    *(eager_loop, train_on_batch),
)


@in_float64
def train(name, size, ranked):
    world = World(size, ranked)
    keras.utils.clear_session()  # names of layers hold a count
    keras.utils.set_random_seed(world.seed)
    style = next(style for style in STYLES if style.__name__ == name)
    return style(world)


def train_ranked(name):
    return train(name, tfdist.size(), True)


# Of these the matrix or another test has a sample.
SLOW = (
    *(own_train_step, train_on_batch, run_eagerly, nested, two_fits, a_changed_rate),
    *(frozen_and_unfrozen, two_tapes_in_a_function, a_branch_of_one_rank),
)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize(
    "style",
    [
        pytest.param(style, marks=[pytest.mark.slow] if style in SLOW else [])
        for style in STYLES
    ],
    ids=lambda style: style.__name__,
)
def test_ranks_end_where_one_process_with_all_data_ends(style):
    name = style.__name__
    size = 3 if style in (a_branch_of_one_rank, eager_loop) else 2
    ranks = run_ranks(train_ranked, size, name, timeout_s=60)
    assert_like_one_process(ranks, train(name, size, False), name)


def begin_with_other_optimizers():
    """Both optimizers have trained before, and on each rank on data of its own."""
    keras.utils.clear_session()
    model = Adversaries(World(tfdist.size(), True))
    pairs = [(model.of_maker, model.maker), (model.of_judge, model.judge)]
    for optimizer, part in pairs:
        optimizer.build(part.trainable_variables)
        for number, slot in enumerate(optimizer.variables[2:]):
            slot.assign(tf.fill(slot.shape, 1.0 + number + tfdist.rank()))
    model.compile(optimizer=None, jit_compile=False)
    rows = np.ones((4, 6), "float32"), np.ones((4, 2), "float32")
    callback = tfdist.callbacks.BroadcastInitialState(root=1)
    model.fit(*rows, epochs=2, verbose=0, callbacks=[callback])
    return state_of(model, *[optimizer for optimizer, _ in pairs])


def test_all_optimizers_of_a_model_begin_with_the_state_of_one_rank():
    one, other = run_ranks(begin_with_other_optimizers, 2)
    for a, b in zip(one, other, strict=True):
        assert a.tobytes() == b.tobytes()


def test_optimizers_in_lists_and_dicts_of_a_model_are_found_once():
    own, *more = [keras.optimizers.SGD(rate) for rate in (0.1, 0.2, 0.3, 0.4)]
    model = dense_model()
    model.compile(own)
    model.several, model.named = more[:2], {"last": more[2], "again": more[0]}
    found = optimizers_of(model)
    assert [id(one) for one in found] == [id(one) for one in (own, *more)]


def a_head_used_later():
    """By rank 1, from the third step on; until then no rank has a gradient for it."""
    body, head = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([body, head])
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(body)
            if step >= 2 and tfdist.rank() == 1:
                loss = tf.reduce_sum(2.0 * head)
        grads = tape.gradient(
            loss, [body, head], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        optimizer.apply(grads, [body, head])
    return [body.numpy().tolist(), head.numpy().tolist()]


def test_a_head_may_come_into_use_later_where_its_gradient_was_zeros():
    # The body: two steps of 0.5, two of half of that. The head: two of 0.5.
    for found in run_ranks(a_head_used_later, 2):
        assert found == [[-0.5, 0.5], [2.0, 3.0]]
