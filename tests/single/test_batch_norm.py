"""Synchronised batch normalisation at size 1: what is converted, kept and refused."""

import copy
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks._base import check_model
from tfdist.core import runtime
from tfdist.layers import (
    SyncBatchNormalization,
    combine_moving_statistics,
    is_synchronized,
    synchronize_batch_normalization,
)
from tfdist.layers._moments import combine_rows
from tfdist.layers.statistics import total_moments

X = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")
PLAIN = keras.layers.BatchNormalization


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


def small_model(norm=PLAIN):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    inside = keras.Sequential([keras.Input((3,)), norm(), keras.layers.Dense(2)])
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), norm(momentum=0.8), inside]
    )


def fitted(model):
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(X, X[:, :2], batch_size=8, shuffle=False, verbose=0)
    return [w.numpy() for w in model.weights]


def norms(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, PLAIN)]


def test_one_rank_trains_as_the_plain_layer_does():
    plain = fitted(small_model())
    made = fitted(small_model(SyncBatchNormalization))
    converted = small_model()
    synchronize_batch_normalization(converted)
    for a, b, c in zip(plain, made, fitted(converted), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_a_trained_model_keeps_its_layers_and_weights():
    model = small_model()
    weights, layers = fitted(model), norms(model)
    function = model.train_function
    assert synchronize_batch_normalization(model) is model
    assert norms(model) == layers
    assert all(map(is_synchronized, layers))
    for a, b in zip(weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    model.fit(X, X[:, :2], batch_size=8, verbose=0)
    assert model.train_function is not function, "it holds the plain layers"


def test_converting_again_changes_nothing():
    model = small_model()
    assert synchronize_batch_normalization(model) is model
    classes = [type(layer) for layer in norms(model)]
    assert synchronize_batch_normalization(model) is model
    assert [type(layer) for layer in norms(model)] == classes
    assert len(set(classes)) == 1


def test_the_class_goes_by_the_name_of_kerass():
    layer = SyncBatchNormalization(axis=1, epsilon=0.01, center=False)
    assert isinstance(layer, PLAIN)
    assert type(layer).__name__ == "BatchNormalization"
    assert type(layer).__module__ == "keras.layers"
    plain = PLAIN(axis=1, epsilon=0.01, center=False, name=layer.name)
    assert layer.get_config() == plain.get_config()


def test_copies_are_synchronised_too():
    layer = SyncBatchNormalization(momentum=0.5)
    for other in (copy.deepcopy(layer), type(layer).from_config(layer.get_config())):
        assert is_synchronized(other)
        assert other.momentum == 0.5


def test_a_model_of_which_a_part_is_synchronised_is_told_of(caplog, monkeypatch):
    """As Keras's clone_model makes it, which copies nested models by their names."""
    model = keras.models.clone_model(small_model(SyncBatchNormalization))
    assert [is_synchronized(layer) for layer in norms(model)] == [True, False]
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=False)
    monkeypatch.setattr(runtime, "size", lambda: 2)
    check_model(model)
    [record] = caplog.records
    assert "1 of 2 batch normalization layers" in record.message
    synchronize_batch_normalization(model)
    check_model(model)
    assert len(caplog.records) == 1


def test_a_saved_model_loads_without_tfdist(tmp_path, monkeypatch):
    model = small_model()
    synchronize_batch_normalization(model)
    fitted(model)
    ones = np.ones((2, 4), "float32")
    expected = model.predict(ones, verbose=0)
    saved = tmp_path / "model.keras"
    model.save(saved)
    # Nothing is named by which Keras could find a class of ours.
    assert b"tfdist" not in zipfile.ZipFile(saved).read("config.json")
    assert b"Sync" not in zipfile.ZipFile(saved).read("config.json")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfdist"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    loaded = keras.models.load_model(saved)
    kinds = [type(layer) for layer in loaded._flatten_layers()]
    assert kinds.count(keras.layers.BatchNormalization) == 2
    assert not any(kind.__module__.startswith("tfdist") for kind in kinds)
    np.testing.assert_array_equal(loaded.predict(ones, verbose=0), expected)


@pytest.mark.slow
def test_an_exported_model_holds_no_operation_of_ours(tmp_path):
    model = small_model(SyncBatchNormalization)
    fitted(model)
    model.export(str(tmp_path), verbose=False)
    assert b"Tfdist" not in (tmp_path / "saved_model.pb").read_bytes()


def test_xla_is_left_off_where_keras_may_choose():
    assert not SyncBatchNormalization().supports_jit
    model = small_model()
    synchronize_batch_normalization(model)
    with pytest.warns(UserWarning, match="jit_compile=False"):
        model.compile(jit_compile=True)
    assert not model.jit_compile


class OwnCall(PLAIN):
    def call(self, inputs, training=None, mask=None):
        return inputs


class OwnMoments(PLAIN):
    def _moments(self, inputs, mask):
        return super()._moments(inputs, mask)


class OwnName(PLAIN):
    """Changes nothing that matters here."""


@pytest.mark.parametrize("own", [OwnCall, OwnMoments])
def test_a_layer_with_statistics_of_its_own_is_refused(own):
    model = keras.Sequential([PLAIN(), own(name="special")])
    with pytest.raises(TypeError, match=f"'special'.*{own.__name__}, which overrides"):
        synchronize_batch_normalization(model)
    assert not any(map(is_synchronized, norms(model))), "all or nothing"


def test_a_subclass_keeps_its_name():
    model = keras.Sequential([OwnName()])
    synchronize_batch_normalization(model)
    assert is_synchronized(model.layers[0])
    assert type(model.layers[0]).__name__ == "OwnName"
    assert type(model.layers[0]).__module__ == OwnName.__module__


@pytest.mark.parametrize(
    "function", [synchronize_batch_normalization, combine_moving_statistics]
)
def test_what_is_no_layer_is_refused(function):
    with pytest.raises(TypeError, match="Expected a Keras model or layer, got list"):
        function([PLAIN()])


def test_a_model_without_batch_normalisation_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)], name="bare")
    with pytest.raises(ValueError, match="'bare' has no BatchNormalization"):
        synchronize_batch_normalization(model)
    assert combine_moving_statistics(model) == 0


def test_kerass_argument_is_refused():
    with pytest.raises(TypeError, match="not accept 'synchronized'"):
        SyncBatchNormalization(synchronized=True)
    with pytest.raises(TypeError, match="process_set"):
        SyncBatchNormalization(process_set=[0])


def test_layers_that_are_not_built_have_no_statistics():
    assert combine_moving_statistics(keras.Sequential([PLAIN()])) == 0


def test_layers_of_a_keras_without_renorm_are_supported():
    layer = PLAIN()
    model = keras.Sequential([keras.Input((4,)), layer])
    vars(layer).pop("renorm", None)
    assert combine_moving_statistics(model) == 1


@pytest.mark.parametrize("per_channel", [False, True])
def test_rows_of_several_groups_are_those_of_their_union(per_channel):
    rng = np.random.default_rng(2)
    groups = [100.0 + rng.normal(size=(n, 3)) for n in (4, 0, 1, 9)]
    rows = []
    for group in groups:
        count = [len(group)] * (3 if per_channel else 1)
        some = group if len(group) else np.zeros((1, 3))
        rows.append(np.concatenate([count, some.mean(axis=0), some.var(axis=0)]))
    count, mean, variance = combine_rows(tf.constant(np.stack(rows)), 3)
    union = np.concatenate(groups)
    np.testing.assert_array_equal(count, [14] * len(count))
    np.testing.assert_allclose(mean, union.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(variance, union.var(axis=0), rtol=1e-12)


def test_total_moments_are_those_of_all_data():
    data = np.random.default_rng(3).normal(size=(2, 6, 3)) + [[[5.0]], [[-5.0]]]
    means, variances = data.mean(axis=1), data.var(axis=1)
    # The other rank is played by the function that adds up.
    others = iter([0.5 * means[1], None])

    def add(own):
        other = next(others)
        if other is None:
            other = 0.5 * (variances[1] + (means[1] - means.mean(axis=0)) ** 2)
        return own + other

    mean, variance = total_moments(0.5, means[0], variances[0], add)
    np.testing.assert_allclose(mean, data.mean(axis=(0, 1)), rtol=1e-13)
    np.testing.assert_allclose(variance, data.var(axis=(0, 1)), rtol=1e-13)
