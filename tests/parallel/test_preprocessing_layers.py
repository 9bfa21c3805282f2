"""Preprocessing layers compute with more than variables: the same on all ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist

X = np.random.default_rng(3).normal(5.0, 3.0, size=(12, 2)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def normalizing(adapts):
    keras.utils.clear_session()
    layer = keras.layers.Normalization()
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), layer, dense])
    if adapts:
        layer.adapt(X)
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        "mse",
        jit_compile=False,
    )
    return model


def fit(model, *callbacks):
    start = tfdist.callbacks.BroadcastInitialState()
    model.fit(X, Y, batch_size=6, verbose=0, callbacks=[start, *callbacks])


class Adapts(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.layers[0].adapt(X)


def outputs_of(way, path):
    """After rank 0 alone has adapted the layer."""
    is_first = tfdist.rank() == 0
    model = normalizing(adapts=is_first and way == "fit")
    if way == "fit":
        fit(model)
    elif way == "callback":
        fit(model, tfdist.callbacks.RankZeroOnly(Adapts()))
    else:
        if is_first:
            normalizing(adapts=True).save(path)
        tfdist.restore(model, path)
    return np.asarray(model(X))


@pytest.mark.parametrize("way", ["fit", "callback", "restore"])
def test_what_one_rank_has_adapted_normalizes_on_all(way, tmp_path):
    ranks = run_ranks(outputs_of, 2, way, str(tmp_path / "model.keras"))
    expected = ((X - X.mean(axis=0)) / X.std(axis=0)).sum(axis=1, keepdims=True)
    for outputs in ranks:
        np.testing.assert_allclose(outputs, expected, atol=1e-5)
        np.testing.assert_array_equal(outputs, ranks[0])


def evaluated_after_a_broadcast(finalizes):
    model = normalizing(adapts=tfdist.rank() == 0)
    tfdist.broadcast_variables(model.weights)
    if finalizes:
        model.layers[0].finalize_state()
    return outcome(lambda: tfdist.evaluate(model, X, Y, verbose=0))


def test_evaluate_refuses_a_normalization_that_has_not_followed_its_variables():
    for result in run_ranks(evaluated_after_a_broadcast, 2, False):
        assert result["class"] == "MismatchError"
        assert (
            "Normalization layer 'normalization' has a different" in result["message"]
        )
        assert "layer.finalize_state()" in result["message"]
    for result in run_ranks(evaluated_after_a_broadcast, 2, True):
        assert result["class"] == "none"


WORDS, NUMBERS = [["a"], ["b"]], [[1], [2]]
# Layer, what it is adapted to on each rank, a batch.
KINDS = {
    "StringLookup": (
        keras.layers.StringLookup,
        (["a", "b", "b"], ["b", "c", "c"]),
        tf.constant(WORDS),
    ),
    "IntegerLookup": (
        keras.layers.IntegerLookup,
        ([1, 2, 2], [2, 3, 3]),
        tf.constant(NUMBERS, tf.int64),
    ),
    "Discretization": (
        lambda: keras.layers.Discretization(num_bins=3),
        ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]),
        tf.constant(NUMBERS, tf.float32),
    ),
    "TextVectorization": (
        lambda: keras.layers.TextVectorization(output_sequence_length=1),
        (["a b", "b"], ["b c", "c"]),
        tf.constant(WORDS),
    ),
}


def take_that_of_rank_0(layer):
    if isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = tfdist.broadcast_object(list(layer.bin_boundaries))
        return
    to_plain = int if isinstance(layer, keras.layers.IntegerLookup) else str
    words = tfdist.broadcast_object([to_plain(w) for w in layer.get_vocabulary()])
    layer.set_vocabulary(words)


def lookups(kind, path):
    """What becomes of a fit, an evaluation and a restore."""
    make, data, batch = KINDS[kind]
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if tfdist.rank() == 0:
        make()  # so that the names of the layers differ
    layer = make()
    layer.adapt(data[tfdist.rank()])
    model = keras.Sequential(
        [
            keras.Input((1,), dtype=batch.dtype.name),
            layer,
            keras.layers.Embedding(9, 1),
            keras.layers.Flatten(),
        ]
    )
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.125)),
        "mse",
        jit_compile=False,
    )
    rows = tf.data.Dataset.from_tensor_slices((batch, tf.ones((2, 1)))).batch(1)
    start = tfdist.callbacks.BroadcastInitialState()
    if tfdist.rank() == 0:
        model.save(path)
    ways = [
        lambda: tfdist.evaluate(model, rows, verbose=0),
        lambda: model.fit(rows, verbose=0, shuffle=False, callbacks=[start]),
        lambda: tfdist.restore(model, path),
    ]
    before = [outcome(way) for way in ways]
    take_that_of_rank_0(layer)
    return before + [outcome(way) for way in ways]


@pytest.mark.parametrize(
    "kind",
    [
        *("StringLookup", "Discretization"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("IntegerLookup", "TextVectorization")
        ),
    ],
)
def test_other_words_or_bins_on_another_rank_are_an_error_on_all(kind, tmp_path):
    named = "StringLookup" if kind == "TextVectorization" else kind
    for results in run_ranks(lookups, 2, kind, str(tmp_path / "model.keras")):
        for result in results[:3]:
            assert result["class"] == "MismatchError", result
            assert f"on rank 1 the {named} layer" in result["message"]
        for result in results[3:]:
            assert result["class"] == "none", result
