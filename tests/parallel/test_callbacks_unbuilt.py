"""BroadcastInitialState and models of which Keras has built only a part.

Keras's default `build` sets `built` of a model whose layers have no variables yet.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist

X = np.arange(48, dtype="float32").reshape(16, 3) / 48
Y = X.sum(axis=1, keepdims=True)


def sgd():
    return tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


def with_input():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


class Lazy(keras.layers.Layer):
    """Builds something of its own: its weights, or a table without any."""

    def __init__(self, makes_weights):
        super().__init__()
        self.makes_weights = makes_weights

    def build(self, shape):
        if self.makes_weights:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="uniform")
        else:
            self.scale = tf.range(shape[-1], dtype=self.compute_dtype)

    def call(self, x):
        return x + self.scale


class Own(keras.Model):
    """No `call`, and a step of its own that calls `net`, on what `first` gives."""

    def __init__(self, net, first=None):
        super().__init__()
        self.net, self.first, self.is_later = net, first, True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            if self.first is not None and self.is_later:
                x = self.first(x)
            loss = tf.reduce_mean((self.net(x) - y) ** 2)
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class OwnOptimizer(Own):
    """Like a GAN: it is compiled without an optimizer, and has its own."""

    def __init__(self, net):
        super().__init__(net)
        self.own = sgd()

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(data[0]) - data[1]) ** 2)
        variables = self.net.trainable_variables
        self.own.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Called(keras.Model):
    """A `call`, a layer that it does not use, and Keras's own step."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x):
        return self.used(x)


class OtherBatch(Called):
    """Its step takes another part of the batch than its `call` could."""

    def call(self, x):
        return self.used(x["x"])

    def train_step(self, data):
        return super().train_step(({"x": data[0]}, data[1]))


class MoreThanCall(Called):
    """Its step trains a layer, too, that its `call` does not use."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            both = self(data[0]) + self.unused(data[0])
            loss = tf.reduce_mean((both - data[1]) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class LaterLayer(Own):
    """Calls `first` from the second step on."""

    def train_step(self, data):
        self.is_later = int(self.optimizer.iterations) > 0
        return super().train_step(data)


def unbuilt():
    return keras.Sequential([keras.layers.Dense(1)])


def noise():
    return keras.Sequential([keras.layers.GaussianNoise(0.1)])


MODELS = {
    "called": Called,
    "more than call": MoreThanCall,
    "other batch": OtherBatch,
    "submodel": lambda: Own(unbuilt()),
    "own optimizer": lambda: OwnOptimizer(unbuilt()),
    "layer": lambda: Own(with_input(), Lazy(True)),
    "later layer": lambda: LaterLayer(with_input(), Lazy(True)),
    "noise": lambda: Own(with_input(), noise()),
    "no weights": lambda: Own(with_input(), keras.Sequential([Lazy(False)])),
}


def trained(kind, built, run_eagerly=False, jit_compile=False):
    """The weights that a rank ends with, or its error."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(10 + tfdist.rank())
    model = MODELS[kind]()
    if built:
        model.build((None, 3))  # Keras's default: it builds nothing
    if kind == "other batch" and built:
        model.used.build((None, 3))
    optimizer = None if kind == "own optimizer" else sgd()
    model.compile(optimizer, "mse", run_eagerly=run_eagerly, jit_compile=jit_compile)
    share = slice(tfdist.rank(), None, tfdist.size())
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    try:
        for _ in range(2):
            model.fit(X[share], Y[share], batch_size=4, verbose=0, callbacks=callbacks)
    except RuntimeError as error:
        return str(error)
    slots = [] if optimizer is None else optimizer.variables
    return [v.numpy() for v in model.weights + slots]


SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*build")


@pytest.mark.parametrize(
    ("kind", "built"),
    [
        ("called", True),
        ("no weights", False),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                ("called", False),
                ("noise", False),
                ("noise", True),
                ("no weights", True),
            ]
        ),
    ],
)
def test_a_model_trains_whose_unbuilt_layers_are_not_used_or_have_no_weights(
    kind, built
):
    assert_same_start(run_ranks(trained, 2, kind, built))


@pytest.mark.slow
def test_a_call_that_does_not_fit_the_batches_is_no_hindrance():
    assert_same_start(run_ranks(trained, 2, "other batch", True))


@pytest.mark.parametrize(
    "kind",
    ["noise", *(pytest.param(k, marks=SLOW) for k in ("no weights", "called"))],
)
def test_xla_compiles_a_step_that_builds_a_layer_without_weights(kind):
    assert_same_start(run_ranks(trained, 2, kind, True, False, True))


@pytest.mark.parametrize(
    "kind",
    ["layer", *(pytest.param(k, marks=SLOW) for k in ("submodel", "own optimizer"))],
)
def test_a_single_rank_may_build_all_in_its_first_step(kind):
    [weights] = run_ranks(trained, 1, kind, True)
    assert_same_start([weights, weights])


def assert_same_start(ranks):
    assert len(ranks[0]) >= 2
    for a, b in zip(*ranks, strict=True):
        assert a.tobytes() == b.tobytes()


CREATING = [  # what is built with weights, its layer, what Keras has said before
    ("submodel", True, "sequential/dense", ""),
    ("submodel", False, "sequential/dense", ""),
    ("own optimizer", True, "sequential/dense", ""),
    ("layer", True, "lazy", ""),
    ("more than call", True, "dense_1", "ValueError: Unknown variable"),
    ("other batch", False, "other_batch/dense", "OtherBatch.call()"),
]
NOT_BUILT = ("submodel", False)
USUAL = [  # what is built with weights, whether eagerly
    ("submodel", False),
    ("own optimizer", True),
    ("more than call", False),
    ("other batch", True),
]


def creating():
    """All in a function and eagerly; what is not usual is slow."""
    for kind, built, *words in CREATING:
        for run_eagerly in (False, True):
            usual = (kind, run_eagerly) in USUAL and (kind, built) != NOT_BUILT
            marks = [] if usual else [SLOW]
            yield pytest.param(kind, built, *words, run_eagerly, marks=marks)


@pytest.mark.parametrize(
    ("kind", "built", "layer", "raised", "run_eagerly"), list(creating())
)
def test_layers_that_a_step_builds_with_weights_are_an_error_that_names_them(
    kind, built, layer, raised, run_eagerly
):
    for message in run_ranks(trained, 2, kind, built, run_eagerly):
        assert f"has created the weights of '{layer}' after Broadcast" in message
        assert "Build all layers on all ranks before fit" in message
        assert ("Raised before" in message) == bool(raised)
        assert raised in message


def test_so_are_those_that_a_later_step_builds():
    for message in run_ranks(trained, 2, "later layer", True, True):
        assert "has created the weights of 'lazy' after Broadcast" in message


def own_loop():
    """The callback in a loop of the user's, where Keras makes no train function."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(tfdist.rank())
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(sgd(), "mse", jit_compile=False)
    callbacks = keras.callbacks.CallbackList(
        [tfdist.callbacks.BroadcastInitialState()], model=model
    )
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    callbacks.on_train_batch_begin(0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X) - Y) ** 2)
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)
    try:
        callbacks.on_train_batch_end(0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_so_are_those_that_the_first_step_of_a_loop_builds():
    for message in run_ranks(own_loop, 2):
        assert "has created the weights of 'sequential/dense' after" in message
