"""UnevenData with losses that have a mask, and are means over what it leaves."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import run_ranks

import tfdist

SLOW = pytest.mark.slow
WORDS, CLASSES, TIME = 7, 3, 5
STEPS = [2, 1]  # batches of each rank
UNEVEN = [[5, 4, 4], [1, 2]]  # words in each sample of each rank; padding fills it up
EVEN = [[5, 5], [3, 1]]
ALL_MASKED = [[5, 2, 4], [0, 0]]


def batch_of(rank, lengths):
    """Words, numbers, classes and weights, each (samples, TIME) or (..., 1)."""
    rng = np.random.default_rng(rank)
    has_word = np.arange(TIME) < np.array(lengths[rank])[:, None]
    words = np.where(has_word, rng.integers(1, WORDS, has_word.shape), 0)
    numbers = rng.normal(size=(*words.shape, 1))
    classes = rng.integers(0, CLASSES, words.shape)
    return [words, numbers, classes, rng.uniform(0.5, 2.0, words.shape)]


def dataset(batches, kind):
    def of_kind(words, numbers, classes, weights):
        if kind == "ignore_class":
            return words, classes, weights
        if kind == "crossentropy":
            return words, classes
        if kind == "two_outputs":
            return words, {"each": numbers, "all": numbers[:, 0]}
        return (words, numbers, weights) if kind == "weights" else (words, numbers)

    made = [tf.data.Dataset.from_tensors(of_kind(*batch)) for batch in batches]
    return made[0] if len(made) == 1 else made[0].concatenate(made[1])


def mean_of_each(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Square(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return mean_of_each(y_true, y_pred)


def mean_over_all(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def loss_of(kind):
    """What is given to compile; objects take on the precision of now."""
    if kind == "two_outputs":
        return {"each": Square(), "all": "mse"}
    if kind == "ignore_class":
        return keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    others = {"object": Square(), "scalar": mean_over_all, "function": mean_of_each}
    return others.get(kind, "crossentropy" if kind == "crossentropy" else "mse")


def make_model(kind, optimizer):
    keras.utils.set_random_seed(3)
    words = keras.Input((TIME,), dtype="int32")
    has_mask = kind != "ignore_class"
    each = keras.layers.Embedding(WORDS, 4, mask_zero=has_mask)(words)
    if kind in ("crossentropy", "ignore_class"):
        outputs = keras.layers.Dense(CLASSES, activation="softmax")(each)
    else:
        outputs = keras.layers.Dense(1, activity_regularizer="l2")(each)
    if kind == "two_outputs":
        free = keras.layers.Embedding(WORDS, 4)(words)
        pooled = keras.layers.GlobalAveragePooling1D()(free)
        outputs = {"each": outputs, "all": keras.layers.Dense(1)(pooled)}
    model = keras.Model(words, outputs)
    weights = {"each": 0.5, "all": 2.0} if kind == "two_outputs" else None
    model.compile(
        optimizer, loss_of(kind), loss_weights=weights, run_eagerly=kind == "eager"
    )
    return model


@in_float64
def fit(kind, lengths):
    """Weights after two calls of `fit`, in the first of which the loss is built."""
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model = make_model(kind, optimizer)
    rank = tfdist.rank()
    batches = [batch_of(rank, lengths)] * STEPS[rank]
    for _ in range(2):
        callbacks = [tfdist.callbacks.UnevenData()]
        model.fit(dataset(batches, kind), verbose=0, callbacks=callbacks)
    return state_of(model)


@in_float64
def fit_alone(kind, lengths):
    model = make_model(kind, keras.optimizers.SGD(0.5))
    own = [batch_of(rank, lengths) for rank in range(2)]
    both = [np.concatenate(part) for part in zip(*own, strict=True)]
    for _ in range(2):
        model.fit(dataset([both, own[0]], kind), verbose=0)
    return state_of(model)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        pytest.param("weights", UNEVEN, marks=SLOW),
        pytest.param("crossentropy", EVEN, marks=SLOW),
        ("ignore_class", UNEVEN),
        ("two_outputs", ALL_MASKED),
        pytest.param("scalar", UNEVEN, marks=SLOW),
        pytest.param("object", UNEVEN, marks=SLOW),
        pytest.param("function", UNEVEN, marks=SLOW),
        pytest.param("eager", ALL_MASKED, marks=SLOW),
    ],
)
def test_a_loss_with_a_mask_is_the_mean_over_what_the_masks_of_all_leave(kind, lengths):
    alone = fit_alone(kind, lengths)
    assert_like_one_process(run_ranks(fit, 2, kind, lengths), alone, kind)
