"""Models and `keras.backend` in the spellings of Keras 2, and what they leave alone."""

import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from helpers.deadline import deadline
from helpers.keras2_mode import X, Y, linear_model, mode, step_of, told  # noqa: F401
from helpers.launcher import clean_environment

import tfdist.horovod.tensorflow.keras as hvd
from tfdist.horovod import keras2
from tfdist.horovod.keras2 import _models

# ---- models


def test_compile_leaves_out_what_keras_2_was_told():
    hvd.init()
    made, texts = told(
        lambda: linear_model(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.125)),
            experimental_run_tf_function=False,
            experimental_steps_per_execution=2,
        )
    )
    assert step_of(made) == 0.125 and made.steps_per_execution == 2
    assert len(texts) == 2
    assert "compile(...) without it" in texts[0]


def test_generators_are_fitted_evaluated_and_predicted():
    model = linear_model(keras.optimizers.SGD(0.0))

    def batches():
        while True:
            yield X, Y

    history, texts = told(
        lambda: model.fit_generator(batches(), 2, 3, 0, workers=4, max_queue_size=2)
    )
    assert len(history.history["loss"]) == 3
    assert "Write model.fit(generator, ...)." in texts[0]
    assert any("keras.utils.PyDataset(workers=...)" in text for text in texts)
    assert model.evaluate_generator(batches(), 1) == 4.0
    assert model.predict_generator(batches(), steps=2).shape == (8, 1)


@pytest.mark.parametrize("end", [".h5", ".hdf5", ".weights.h5"])
def test_weights_are_saved_under_the_name_that_was_given(tmp_path, end):
    model = linear_model(keras.optimizers.SGD(0.0))
    path = str(tmp_path / f"own{end}")
    _, texts = told(lambda: model.save_weights(path))
    assert len(texts) == (0 if end == ".weights.h5" else 1)
    assert [p.name for p in tmp_path.iterdir()] == [f"own{end}"]
    model.layers[-1].kernel.assign([[0.0], [0.0]])
    model.load_weights(path)
    assert model.layers[-1].kernel.numpy().tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("name", "weights", "warned"),
    [
        ("w-{epoch}.h5", True, 2),
        ("m-{epoch}.hdf5", False, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("w-{epoch}.hdf5", True, 2),
                ("m-{epoch}.h5", False, 0),
                ("m-{epoch}.keras", False, 0),
            ]
        ),
    ],
)
def test_checkpoints_are_written_where_the_script_looks(
    tmp_path, name, weights, warned
):
    model = linear_model(keras.optimizers.SGD(0.0))

    def train():
        saver = keras.callbacks.ModelCheckpoint(
            str(tmp_path / name), save_weights_only=weights
        )
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[saver])

    assert len(told(train)[1]) == warned
    expected = [name.format(epoch=epoch) for epoch in (1, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == expected
    path = str(tmp_path / expected[1])
    if weights:
        model.load_weights(path)
    else:
        assert keras.models.load_model(path).count_params() == 2


def test_what_checkpoints_cannot_do_is_said():
    with pytest.raises(NotImplementedError, match="save_freq=3"):
        keras.callbacks.ModelCheckpoint("m.keras", period=3)
    with pytest.raises(NotImplementedError, match=r"ModelCheckpoint\(options=...\)"):
        keras.callbacks.ModelCheckpoint("m.keras", options=tf.train.CheckpointOptions())
    keras.callbacks.ModelCheckpoint("m.keras", options=None)
    model = linear_model(keras.optimizers.SGD(0.0))
    with pytest.raises(NotImplementedError, match=r"own\.weights\.h5"):
        model.save_weights("own", save_format="tf")
    with pytest.raises(ValueError, match="weights.h5"):
        model.save_weights("own")


# ---- keras.backend and the GPU lines


def test_the_gpu_lines_of_tensorflow_1():
    config = tf.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = "0"
    _, texts = told(lambda: tf.keras.backend.set_session(tf.Session(config=config)))
    assert "tf.config.set_visible_devices" in texts[-1]
    keras.backend.set_session(tf.compat.v1.Session(config=config))
    config.gpu_options.per_process_gpu_memory_fraction = 0.5
    with pytest.raises(NotImplementedError, match="memory_limit"):
        keras.backend.set_session(tf.Session(config=config))
    with pytest.raises(NotImplementedError, match="v.numpy()"):
        keras.backend.get_session()


def test_keras_backend_has_what_tf_keras_backend_has():
    found, texts = told(lambda: keras.backend.square(tf.constant(3.0)))
    assert float(found) == 9.0
    assert "Write keras.ops.square." in texts[0]
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = keras.backend.nothing
    assert keras.backend.get_value(tf.constant(2.0)) == 2.0
    assert keras.backend.get_value(3) == 3
    with pytest.raises(TypeError, match="Expected a variable"):
        keras.backend.set_value(3, 4)


# ---- outside of the mode


SNAPSHOT = """
import inspect, sys
import keras, tensorflow as tf
import keras.src.legacy.saving.legacy_h5_format, keras._tf_keras.keras
for face in (tf.keras, tf.optimizers, keras): [getattr(face, n) for n in dir(face)]

def names():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "keras" or module is None:
            continue
        for key, value in vars(module).items():
            if inspect.ismodule(value):
                continue
            found[name, key] = id(value)
            if inspect.isclass(value):
                for own, one in vars(value).items():
                    found[name, key, own] = id(one)
    tf_names = {("tf", key): id(value) for key, value in vars(tf).items()}
    return {**found, **tf_names}

def changed(before, now):
    ignored = ("__warningregistry__", "_abc_impl", "__abstractmethods__")
    return sorted(
        str(k) for k in before.keys() | now.keys()
        if before.get(k) != now.get(k) and k[-1] not in ignored
    )

before = names()
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", SNAPSHOT + code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
@deadline(110)
def test_importing_tfdist_horovod_changes_nothing_of_keras():
    done = run(
        """
import tfdist.horovod.keras, tfdist.horovod.tensorflow.keras as hvd
import tfdist.horovod.tensorflow.keras.elastic
from tfdist.horovod import keras2
from tfdist.horovod.keras2 import _models
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
print(hvd.is_initialized(), changed(before, names()))
keras2.activate()
print(len(changed(before, names())) > 20)
keras2.deactivate()
print(changed(before, names()))
"""
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["False []", "True", "[]"]


def test_assigning_lr_outside_of_the_mode_is_keras_3s_silent_nothing():
    keras2.deactivate()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.lr = 0.25
    assert float(optimizer.learning_rate) == 0.5
    with pytest.raises(ValueError, match="lr"):
        keras.optimizers.SGD(lr=0.5)
    assert not keras2.is_active()


def test_the_table_of_spellings_is_in_the_docs_of_the_package():
    lines = Path(keras2.__file__).read_text().splitlines()
    table = [i for i, line in enumerate(lines) if line.startswith("=====")]
    assert len(table) == 3 and table[2] - table[1] > 15


@pytest.mark.parametrize("keras_resets", [True, False])
def test_metrics_are_reset_by_every_version_of_keras(keras_resets):
    events = []

    class Model:
        def reset_metrics(self):
            events.append("reset")

    def train_on_batch(self, x):
        if keras_resets:
            self.reset_metrics()
        events.append(x)

    on_batch = _models._on_batch(train_on_batch)
    on_batch(Model(), 1)
    assert events[0] == "reset" and events[-1] == 1
    events.clear()
    on_batch(Model(), 2, reset_metrics=False)
    assert events == [2]
