"""What `horovod.keras` wraps, saves, loads and refuses, in one process."""

import copy
import logging

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.training.optimizer import is_distributed

X = np.ones((4, 2), "float32")
Y = np.zeros((4, 1), "float32")


@pytest.fixture(autouse=True)
def world():
    keras.utils.clear_session()
    hvd.init()
    yield
    tfdist.shutdown()


def trained(optimizer, loss="mse", epochs=1, **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss, **options)
    model.fit(X, Y, epochs=epochs, verbose=0)
    return model


def test_both_packages_have_the_same_names():
    assert hvd.__all__ == hvd_keras.__all__
    for module in (hvd, hvd_keras):
        assert all(hasattr(module, name) for name in module.__all__)
    assert hvd_keras.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd_keras.callbacks.__all__ == hvd.callbacks.__all__
    assert hvd_keras.elastic.KerasState is hvd.elastic.KerasState


# ---- the optimizer


def test_a_wrapped_optimizer_is_still_the_one_of_keras():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5, beta_1=0.25))
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert isinstance(optimizer, keras.optimizers.Adam) and is_distributed(optimizer)
    cls = type(optimizer)
    assert (cls.__name__, optimizer.__class__.__qualname__) == ("Adam", "Adam")
    assert keras.optimizers.get(optimizer) is optimizer
    config = optimizer.get_config()
    assert config == {**keras.optimizers.Adam(0.5, beta_1=0.25).get_config(), **config}
    copied = cls.from_config(config)
    assert is_distributed(copied) and copied.beta_1 == 0.25
    plain = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(plain) is keras.optimizers.Adam


def test_variables_may_be_read_and_called():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    optimizer.build([tf.Variable(1.0), tf.Variable([2.0])])
    assert isinstance(optimizer.variables, list)
    assert optimizer.variables() == optimizer.variables
    assert type(optimizer.variables()) is list and len(optimizer.variables()) == 6


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("Adam", ".keras"),
        ("Adam", ".h5"),
        pytest.param("SGD", ".keras", marks=pytest.mark.slow),
        pytest.param("SGD", ".h5", marks=pytest.mark.slow),
    ],
)
def test_a_saved_model_loads_as_a_plain_one_and_as_a_wrapped_one(tmp_path, kind, end):
    path = str(tmp_path / f"model{end}")
    loss = "mean_squared_error" if end == ".h5" else "mse"
    made = getattr(keras.optimizers, kind)(0.125)
    model = trained(hvd.DistributedOptimizer(made), loss, epochs=3)
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is getattr(keras.optimizers, kind)
    loaded = hvd.load_model(path)
    assert is_distributed(loaded.optimizer)
    half = hvd.load_model(path, compression=hvd.Compression.fp16)
    assert half.optimizer.tfdist_options.compression == "fp16"
    # Of an .h5 file Keras alone restores neither slots nor the right to take a step.
    right = (plain, loaded) if end == ".keras" else (loaded,)
    for other in right:
        values = [v.numpy() for v in [*other.weights, *other.optimizer.variables]]
        own = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
        for a, b in zip(values, own, strict=True):
            np.testing.assert_array_equal(a, b)
    for other in (model, *right):
        other.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], loaded.get_weights()[0])


@keras.saving.register_keras_serializable("horovod_test")
class Registered(keras.optimizers.SGD):
    """An optimizer of the user's own that Keras knows."""


class Own(keras.optimizers.SGD):
    """One that it does not know."""


@pytest.mark.slow
def test_optimizers_of_the_users_own_are_loaded(tmp_path):
    for cls, given in ((Registered, None), (Own, [Own])):
        path = str(tmp_path / f"{cls.__name__}.keras")
        trained(hvd.DistributedOptimizer(cls(0.125))).save(path)
        loaded = hvd.load_model(path, custom_optimizers=given)
        assert is_distributed(loaded.optimizer) and isinstance(loaded.optimizer, cls)
        plain = keras.models.load_model(path, custom_objects={"Own": Own})
        assert type(plain.optimizer) is cls


@pytest.mark.slow
def test_short_names_of_losses_in_hdf5_are_found(tmp_path):
    path = str(tmp_path / "model.h5")
    trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mae").save(path)
    assert is_distributed(hvd_keras.load_model(path).optimizer)


@pytest.mark.slow
def test_an_hdf5_file_without_the_rate_as_of_keras_2_is_loaded(tmp_path):
    path = str(tmp_path / "model.h5")
    trained(keras.optimizers.Adam(0.5), epochs=3).save(path)
    with h5py.File(path, "a") as file:
        names = file["optimizer_weights"].attrs["weight_names"]
        kept = [n for n in names if not str(n).endswith("learning_rate")]
        assert len(kept) == len(names) - 1
        file["optimizer_weights"].attrs["weight_names"] = kept
    optimizer = hvd.load_model(path).optimizer
    assert int(optimizer.iterations) == 3 and float(optimizer.learning_rate) == 0.5


@pytest.mark.parametrize("units", [2, 3])
def test_slots_of_a_legacy_optimizer_of_keras_2_are_loaded(tmp_path, units):
    path = str(tmp_path / "model.h5")
    layers = [keras.layers.Dense(u, use_bias=False) for u in (units, 2)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(keras.optimizers.Adam(0.5), "mean_squared_error")
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    values, expected = {"Adam/iter:0": np.int64(7)}, {}
    # As Keras 2 saves them: all first moments, then all second moments.
    for slot, name in (("m", "momentum"), ("v", "velocity")):
        for layer in layers:
            value = np.full(layer.kernel.shape, len(values), "float32")
            values[f"Adam/{layer.name}/kernel/{slot}:0"] = value
            expected[f"adam/{layer.kernel.path.replace('/', '_')}_{name}"] = value
    with h5py.File(path, "a") as file:
        del file["optimizer_weights"]
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [name.encode() for name in values]
        for name, value in values.items():
            group[name] = value
    optimizer = hvd.load_model(path, legacy_opts=True).optimizer
    assert int(optimizer.iterations) == 7 and float(optimizer.learning_rate) == 0.5
    found = {v.path: v.numpy() for v in optimizer.variables[2:]}
    assert found.keys() == expected.keys()
    for slot, value in expected.items():
        np.testing.assert_array_equal(found[slot], value)


@pytest.mark.slow
def test_state_that_does_not_fit_is_told(tmp_path, caplog):
    path = str(tmp_path / "model.h5")
    trained(keras.optimizers.Adam(0.5)).save(path)
    with h5py.File(path, "a") as file:
        group = file["optimizer_weights"]
        group.attrs["weight_names"] = list(group.attrs["weight_names"])[:-2]
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert int(hvd.load_model(path).optimizer.iterations) == 0
    assert "starts with a new state" in caplog.text


def test_a_model_that_was_saved_without_an_optimizer_has_none(tmp_path):
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(
        path := str(tmp_path / "model.keras")
    )
    assert getattr(hvd.load_model(path), "optimizer", None) is None


@pytest.mark.slow
def test_accumulation_of_a_loaded_optimizer_has_to_be_said(tmp_path):
    path = str(tmp_path / "model.keras")
    made = keras.optimizers.SGD(0.125)
    trained(hvd.DistributedOptimizer(made, backward_passes_per_step=2)).save(path)
    with pytest.raises(ValueError, match="sum or their mean"):
        hvd.load_model(path)
    model = keras.models.load_model(path)
    model.optimizer = hvd.DistributedOptimizer(
        model.optimizer, backward_passes_per_step=2
    )
    before = model.get_weights()[0]
    model.fit(X, Y, verbose=0)  # the second pass of the first update
    assert (model.get_weights()[0] != before).all()


LEGACY = {"learning_rate": 0.25, "decay": 0.0, "momentum": 0.5, "nesterov": False}


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_optimizers_that_keras_2_called_legacy_are_loaded(tmp_path, monkeypatch, decay):
    path = str(tmp_path / "model.keras")
    model = trained(keras.optimizers.SGD(0.25, momentum=0.5))

    def as_in_keras_2(self):
        return {**LEGACY, "decay": decay, "is_legacy_optimizer": True, "name": "SGD"}

    with monkeypatch.context() as patch:
        patch.setattr(keras.optimizers.SGD, "get_config", as_in_keras_2)
        model.save(path)
    with pytest.raises((TypeError, ValueError)):
        hvd.load_model(path)
    if decay:
        with pytest.raises(ValueError, match="InverseTimeDecay"):
            hvd.load_model(path, legacy_opts=True)
        return
    optimizer = hvd.load_model(path, legacy_opts=True).optimizer
    assert is_distributed(optimizer) and optimizer.momentum == 0.5
    assert int(optimizer.iterations) == 1


def test_optimizers_that_cannot_accumulate_are_refused():
    built = keras.optimizers.SGD(0.5)
    built.build([tf.Variable(1.0)])
    with pytest.raises(ValueError, match="already built, without accumulators"):
        hvd.DistributedOptimizer(built, backward_passes_per_step=2)
    other = keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)

    class Own(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients(grads_and_vars)

    with pytest.raises(ValueError, match="overrides apply_gradients"):
        hvd.DistributedOptimizer(Own(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="Expected backward_passes_per_step=3"):
        hvd.DistributedOptimizer(other, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="already wrapped"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(other))


@pytest.mark.parametrize("average", [False, True])
def test_a_weight_is_for_means_alone(average):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    w = tf.Variable([0.0])

    def steps():
        for weight, gradient in ((1.0, 2.0), (3.0, 6.0)):
            optimizer.apply([tf.constant([gradient])], [w], weight=weight)

    if average:
        steps()
        assert w.numpy() == [-5.0]
    else:
        with pytest.raises(ValueError, match="average_aggregated_gradients=True"):
            steps()


def test_local_layers_may_get_their_weights_later():
    layer, shared = keras.layers.Dense(1), tf.Variable([1.0])
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.5), local_layers=layer
    )
    layer.build((None, 1))
    local = optimizer.tfdist_options.local_variables
    assert local.places([shared, layer.kernel, layer.bias]) == [1, 2]


def test_copies_keep_local_variables_or_ask_for_them():
    own, shared, later = (tf.Variable([1.0]) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    before = type(optimizer).from_config(optimizer.get_config())
    optimizer.register_local_var(own)
    kept = copy.deepcopy(optimizer)
    kept.register_local_var(later)
    places = kept.tfdist_options.local_variables.places
    assert places([shared, own, later]) == [1, 2]
    assert optimizer.tfdist_options.local_variables.places([own, later]) == [0]
    before.apply([tf.constant([1.0])], [shared])  # it never had any
    for again in (type(optimizer).from_config(kept.get_config()) for _ in range(2)):
        for step in (again.apply, lambda g, v, o=again: o.apply_gradients([(*g, *v)])):
            with pytest.raises(RuntimeError, match="which a configuration does not"):
                step([tf.constant([1.0])], [shared])
        again.register_local_var(own)
        again.apply([tf.constant([1.0])], [shared])
    assert shared.numpy() == [-0.5]


def from_config(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


@pytest.mark.parametrize("copied_by", [copy.deepcopy, from_config])
def test_a_copy_of_what_scales_the_loss_adds_batches_up_likewise(copied_by):
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=1.0
    )
    optimizer = hvd.DistributedOptimizer(scaled, backward_passes_per_step=2)
    copied, v = copied_by(optimizer), tf.Variable([0.0])
    assert copied.inner_optimizer is not optimizer.inner_optimizer
    for gradient in (2.0, 6.0):
        copied.apply([tf.constant([gradient])], [v])
    assert v.numpy() == [-8.0] and int(copied.inner_optimizer.iterations) == 2


def test_local_variables_are_checked():
    optimizer = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.5))
    assert optimizer.tfdist_options.local_variables is None
    with pytest.raises(TypeError, match="variables and layers"):
        optimizer.register_local_var(3)
    clips = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, global_clipnorm=1.0))
    with pytest.raises(ValueError, match="global_clipnorm"):
        clips.register_local_var(tf.Variable(1.0))
    with pytest.raises(ValueError, match="must be variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])
