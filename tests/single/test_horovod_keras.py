"""What `horovod.keras` wraps, saves, loads and refuses, in one process."""

import inspect
import logging

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.horovod._keras.callbacks import slots_of
from tfdist.horovod._keras.options import note_device
from tfdist.horovod._keras.rates import _warned, warmup_multiplier
from tfdist.local_variables import identity
from tfdist.optimizer import is_distributed

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


# ---- names, signatures, defaults


DISTRIBUTED_OPTIMIZER = {
    "optimizer": inspect.Parameter.empty,
    "name": None,
    "device_dense": "",
    "device_sparse": "",
    "compression": hvd.Compression.none,
    "sparse_as_dense": False,
    "gradient_predivide_factor": 1.0,
    "op": hvd.Average,
    "backward_passes_per_step": 1,
    "average_aggregated_gradients": False,
    "num_groups": 0,
    "groups": None,
    "process_set": hvd.global_process_set,
    "scale_local_gradients": True,
}
WARMUP = {"warmup_epochs": 5, "momentum_correction": True, "steps_per_epoch": None}
BEST = {"verbose": 0, "save_weights_only": False, "mode": "auto", "save_freq": "epoch"}
NEEDED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DistributedOptimizer", DISTRIBUTED_OPTIMIZER),
        (
            "load_model",
            {
                **{"filepath": NEEDED, "custom_optimizers": None},
                **{"custom_objects": None, "compression": hvd.Compression.none},
                "legacy_opts": False,
            },
        ),
        (
            "allreduce",
            {
                **{"value": NEEDED, "name": None, "average": None},
                **{"prescale_factor": 1.0, "postscale_factor": 1.0, "op": None},
                "compression": hvd.Compression.none,
            },
        ),
        ("allgather", {"value": NEEDED, "name": None}),
        ("broadcast", {"value": NEEDED, "root_rank": NEEDED, "name": None}),
        ("reducescatter", {"value": NEEDED, "name": None, "op": hvd.Average}),
        (
            "callbacks.BroadcastGlobalVariablesCallback",
            {"root_rank": NEEDED, "device": "", "local_variables": None},
        ),
        ("callbacks.MetricAverageCallback", {"device": ""}),
        (
            "callbacks.LearningRateScheduleCallback",
            {
                **{"initial_lr": NEEDED, "multiplier": NEEDED, "start_epoch": 0},
                **{"end_epoch": None, "staircase": True},
                **{"momentum_correction": True, "steps_per_epoch": None},
            },
        ),
        (
            "callbacks.LearningRateWarmupCallback",
            {"initial_lr": NEEDED, **WARMUP, "verbose": 0},
        ),
        ("callbacks.BestModelCheckpoint", {"monitor": "val_loss", **BEST}),
        ("elastic.CommitStateCallback", {"state": NEEDED, "batches_per_commit": 1}),
        ("elastic.UpdateBatchStateCallback", {"state": NEEDED}),
        ("elastic.UpdateEpochStateCallback", {"state": NEEDED}),
    ],
)
def test_signatures_are_horovods(name, expected):
    found = hvd
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters
    assert {k: p.default for k, p in parameters.items()} == expected
    assert list(parameters) == list(expected)


def test_both_packages_have_the_same_names():
    assert hvd.__all__ == hvd_keras.__all__
    for module in (hvd, hvd_keras):
        assert all(hasattr(module, name) for name in module.__all__)
    assert hvd_keras.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd_keras.callbacks.__all__ == hvd.callbacks.__all__
    assert hvd_keras.elastic.KerasState is hvd.elastic.KerasState
    parameters = inspect.signature(hvd.PartialDistributedOptimizer).parameters
    assert set(parameters) == {*DISTRIBUTED_OPTIMIZER, "local_layers"}


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
    trained(optimizer)
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


@pytest.mark.slow
def test_state_that_does_not_fit_is_told(tmp_path, caplog):
    path = str(tmp_path / "model.h5")
    trained(keras.optimizers.Adam(0.5)).save(path)
    with h5py.File(path, "a") as file:
        group = file["optimizer_weights"]
        group.attrs["weight_names"] = list(group.attrs["weight_names"])[:-2]
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert int(hvd.load_model(path).optimizer.iterations) == 0
    assert "begins anew" in caplog.text


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


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"op": hvd.Adasum},
            ValueError,
            "op == Adasum is not supported yet with Keras",
        ),
        ({"op": hvd.Max}, ValueError, "only supports Average and Sum"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            *(ValueError, "not supported with op != Average"),
        ),
        ({"groups": -1}, ValueError, "non-negative integer"),
        ({"groups": "all"}, ValueError, "list of list"),
        ({"backward_passes_per_step": 0}, ValueError, "must be > 0, got 0"),
        ({"backward_passes_per_step": 1.5}, TypeError, "an integer, got 1.5"),
        ({"compression": object()}, ValueError, "Compression.fp16"),
        ({"process_set": [0]}, TypeError, "ProcessSet"),
    ],
)
def test_wrong_options_are_refused(options, kind, words):
    optimizer = keras.optimizers.SGD(0.5)
    with pytest.raises(kind, match=words):
        hvd.DistributedOptimizer(optimizer, **options)
    assert not is_distributed(optimizer)


def test_optimizers_that_cannot_accumulate_are_refused():
    built = keras.optimizers.SGD(0.5)
    built.build([tf.Variable(1.0)])
    with pytest.raises(ValueError, match="is built, without room"):
        hvd.DistributedOptimizer(built, backward_passes_per_step=2)
    other = keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)
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


def test_local_layers_and_variables_are_checked():
    make = lambda: keras.optimizers.SGD(0.5)  # noqa: E731
    with pytest.raises(TypeError, match="a layer or a list of layers"):
        hvd_keras.PartialDistributedOptimizer(make(), local_layers=[1])
    with pytest.raises(ValueError, match="has no weights yet"):
        hvd_keras.PartialDistributedOptimizer(
            make(), local_layers=keras.layers.Dense(1)
        )
    optimizer = hvd_keras.PartialDistributedOptimizer(make())
    assert optimizer.tfdist_options.local_variables is None
    with pytest.raises(TypeError, match="variables and layers"):
        optimizer.register_local_var(3)
    clips = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, global_clipnorm=1.0))
    with pytest.raises(ValueError, match="global_clipnorm"):
        clips.register_local_var(tf.Variable(1.0))
    with pytest.raises(ValueError, match="must be variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])


def test_devices_are_told_once(caplog):
    note_device.cache_clear()
    with caplog.at_level(logging.WARNING, "tfdist"):
        for _ in range(2):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), device_dense="/gpu:0")
            hvd.callbacks.MetricAverageCallback(device="/cpu:0")
    assert [r.getMessage().split(" ")[0] for r in caplog.records] == [
        "device_dense='/gpu:0'",
        "device='/cpu:0'",
    ]


def test_slots_of_a_variable_are_found():
    first, second = keras.Variable([1.0]), keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.Adam(0.5, use_ema=True, gradient_accumulation_steps=2)
    optimizer.build([first, second])
    found = slots_of(optimizer, [identity(second)])
    assert len(found) == 4 and {v.shape for v in found} == {(2,)}


# ---- callbacks


def test_the_warm_up_is_the_formula_of_the_documentation():
    for size in (1, 2, 4, 8):
        for warmup in (1, 3, 5):
            assert warmup_multiplier(0, warmup, size) == pytest.approx(1 / size)
            assert warmup_multiplier(warmup, warmup, size) == pytest.approx(1)
            middle = (size - 1) / warmup * (warmup / 2) + 1
            assert warmup_multiplier(warmup / 2, warmup, size) * size == middle


def rates_with(callback, epochs=4):
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    history = model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback])
    return history.history["lr"]


def test_a_number_as_multiplier_decays_from_the_first_epoch_on(caplog):
    _warned.clear()
    schedule = hvd.callbacks.LearningRateScheduleCallback
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert rates_with(schedule(2.0, 0.5, start_epoch=1)) == [1.0, 2.0, 1.0, 0.5]
        assert rates_with(schedule(2.0, 1.0, start_epoch=1)) == [1.0, 2.0, 2.0, 2.0]
        assert rates_with(schedule(2.0, 0.5, 1, 2)) == [1.0, 2.0, 2.0, 2.0]
    texts = [r.getMessage() for r in caplog.records if "multiplier" in r.getMessage()]
    assert len(texts) == 1 and "Write multiplier=lambda epoch: 0.5" in texts[0]


def test_a_function_is_asked_per_epoch_or_per_batch():
    schedule = hvd.callbacks.LearningRateScheduleCallback
    asked = []

    def multiplier(epoch):
        asked.append(epoch)
        return 0.5

    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    for staircase in (True, False):
        model.fit(
            *(X, Y),
            batch_size=2,
            epochs=2,
            verbose=0,
            callbacks=[schedule(1.0, multiplier, staircase=staircase)],
        )
    assert asked == [0, 1, 0.0, 0.5, 1.0, 1.5]


def test_rates_that_cannot_be_set_are_refused():
    schedule = hvd.callbacks.LearningRateScheduleCallback
    with pytest.raises(ValueError, match="`initial_lr` is required"):
        schedule(None, 1.0)
    cosine = keras.optimizers.schedules.CosineDecay(0.5, 10)
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(cosine)))
    with pytest.raises(TypeError, match="Give the optimizer a number"):
        model.fit(X, Y, verbose=0, callbacks=[schedule(0.5, 1.0)])
    warmup = hvd.callbacks.LearningRateWarmupCallback(1.0)

    def forever():
        while True:
            yield X, Y

    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    data = tf.data.Dataset.from_generator(
        forever,
        output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1))),
    )
    with pytest.raises(ValueError, match="Could not autodetect"):
        model.fit(data.take(2), verbose=0, callbacks=[warmup])


@pytest.mark.slow
def test_the_end_of_the_warm_up_is_said(capsys):
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=1, verbose=1)
    rates_with(warmup, epochs=2)
    told = capsys.readouterr().out
    assert told.count("Epoch 1: finished gradual learning rate warmup to 0.25.") == 1


def test_the_best_model_is_saved_where_it_is_said_later(tmp_path):
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="no file to write to"):
        model.fit(X, Y, verbose=0, callbacks=[best])
    best.filepath = str(tmp_path / "best.keras")
    model.fit(X, Y, verbose=0, callbacks=[best])
    assert is_distributed(hvd.load_model(best.filepath).optimizer)
    weights = hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=True)
    weights.filepath = str(tmp_path / "best.weights.h5")
    model.fit(X, Y, verbose=0, callbacks=[weights])
    model.load_weights(weights.filepath)


@pytest.mark.slow
def test_commits_are_counted():
    model = trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        hvd.elastic.CommitStateCallback(state, batches_per_commit=0)
    commits = []
    state.commit = lambda: commits.append(int(model.optimizer.iterations))
    callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=3)
    model.fit(X, Y, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    assert commits == [1 + n for n in (3, 4, 7, 8)]
