"""DistributedOptimizer at size 1: what it wraps, keeps and refuses."""

import copy
import gc
import json
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import ReduceOp
from tfdist.collectives.per_rank_variables import is_accumulator
from tfdist.core import native
from tfdist.gradients import xla
from tfdist.training import model_optimizers
from tfdist.training.optimizer import is_distributed

X = np.random.default_rng(1).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def small_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def fitted(optimizer, **compile_options):
    model = small_model()
    model.compile(optimizer, "mse", jit_compile=False, **compile_options)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "scheduled": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 8)
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01)
    ),
}


# The others are subclasses of these, or are tried by another test.
SAMPLE = ("clipped", "scheduled")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.slow])
        for name in OPTIMIZERS
    ],
)
def test_one_rank_trains_as_the_plain_optimizer_does(name):
    plain = fitted(OPTIMIZERS[name]())
    wrapped = fitted(tfdist.DistributedOptimizer(OPTIMIZERS[name]()))
    for a, b in zip(plain.weights, wrapped.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class Halves(keras.optimizers.LossScaleOptimizer):
    """Changes the gradients before the step, and the weights after it."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(tf.clip_by_norm(g, 0.5), v) for g, v in grads_and_vars]
        super().apply_gradients(pairs)
        for _, v in pairs:
            v.assign(v * 0.5)
        return self._iterations


def test_an_apply_gradients_of_the_class_is_called_in_fit_under_a_loss_scale():
    def weights(wrap):
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        return fitted(wrap(Halves(inner, initial_scale=4.0))).get_weights()

    wrapped = weights(tfdist.DistributedOptimizer)
    for a, b in zip(weights(lambda plain: plain), wrapped, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(b).max() < 0.2  # halved eight times


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_every_step_reduces_one_group(run_eagerly):
    native.take_records()
    fitted(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=run_eagerly
    )
    names = [r["name"] for r in native.take_records() if r["kind"] == native.ALLREDUCE]
    assert len([n for n in names if n.startswith("gradients.")]) == 8


def test_it_stays_the_same_object_of_a_class_of_the_same_name():
    optimizer = keras.optimizers.Adam(0.01)
    wrapped = tfdist.DistributedOptimizer(optimizer)
    assert wrapped is optimizer
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    assert type(wrapped).__module__ == "keras.optimizers"
    again = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    assert type(again) is type(wrapped)


def test_a_built_optimizer_keeps_its_slots():
    model = fitted(keras.optimizers.Adam(0.01))
    before = [v.numpy() for v in model.optimizer.variables]
    wrapped = tfdist.DistributedOptimizer(model.optimizer)
    for a, b in zip(before, wrapped.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_copies_reduce_too():
    wrapped = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), op=ReduceOp.SUM)
    for other in (
        copy.deepcopy(wrapped),
        type(wrapped).from_config(wrapped.get_config()),
    ):
        assert is_distributed(other)
        assert other.tfdist_options.op is ReduceOp.SUM


@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        (lambda: "adam", TypeError, "keras.optimizers.SGD"),
        (lambda: keras.optimizers.SGD, TypeError, "Keras optimizer"),
        (
            lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD()),
            ValueError,
            "already wrapped",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(optimizer, error, words):
    with pytest.raises(error, match=words):
        tfdist.DistributedOptimizer(optimizer())


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_other_operations_are_refused(op):
    with pytest.raises(ValueError, match="AVERAGE, SUM or ADASUM"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), op=op)


@pytest.mark.parametrize("compression", ["fp8", "", 16, tf.float16, True])
def test_only_known_compressions_are_accepted(compression):
    with pytest.raises(ValueError, match="None, 'fp16' or 'bf16', got"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), compression=compression)
    with pytest.raises(ValueError, match="None, 'fp16' or 'bf16', got"):
        tfdist.DistributedGradientTape(compression=compression)


def test_a_name_has_to_be_a_string():
    with pytest.raises(TypeError, match="name to be a string or None, got 3"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), name=3)
    with pytest.raises(TypeError, match="name to be a string or None, got 3"):
        tfdist.DistributedGradientTape(name=3)


def test_layers_with_local_variables_are_not_kept_alive():
    layer = keras.layers.Dense(1)
    alive = weakref.ref(layer)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.SGD(0.1), local_variables=[layer]
    )
    del layer, optimizer
    gc.collect()
    assert alive() is None


def test_mixed_float16_puts_the_reduction_outside_of_the_loss_scale(mixed_float16):
    wrapped = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01))
    assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
    assert is_distributed(wrapped)
    assert not is_distributed(wrapped.inner_optimizer)
    model = fitted(wrapped)
    assert model.optimizer is wrapped
    assert int(wrapped.step_counter) == 8  # of fit, which scales


def minimized(optimizer, *, scales, traced):
    """What two steps of a loop on w squared, from 1, come to."""
    w = keras.Variable([1.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w.value**2)
            loss = optimizer.scale_loss(loss) if scales else loss
        optimizer.apply(tape.gradient(loss, [w.value]), [w])

    run = tf.function(step) if traced else step
    run()
    run()
    return w.numpy().tolist()


@pytest.mark.parametrize("traced", [False, True])
def test_an_added_loss_scale_counts_where_the_loss_is_scaled(
    mixed_float16, traced, caplog
):
    wrapped = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25))
    copied = type(wrapped).from_config(wrapped.get_config())
    for optimizer in (wrapped, copied, copy.deepcopy(wrapped)):
        caplog.clear()
        assert minimized(optimizer, scales=False, traced=traced) == [0.25]
        (told,) = [r.getMessage() for r in caplog.records if r.name == "tfdist"]
        assert "optimizer.scale_loss(loss)" in told
    assert int(wrapped.step_counter) == 0 and int(wrapped.iterations) == 2
    scaled = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25))
    assert minimized(scaled, scales=True, traced=traced) == [0.25]
    assert int(scaled.step_counter) == 2


def test_one_scaled_loss_of_two_optimizers_is_refused(mixed_float16):
    first, second = (
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.25)) for _ in range(2)
    )
    w = keras.Variable([1.0])
    gradients = [first.scale_loss(tf.constant([1.0]))]
    first.apply(gradients, [w])
    with pytest.raises(ValueError, match="wrap keras.optimizers.LossScaleOptimizer"):
        second.apply(gradients, [w])
    assert w.numpy() == [0.75]


def test_a_loss_scale_of_the_users_own_unscales_as_keras_does(mixed_float16):
    sgd = keras.optimizers.SGD(0.25)
    own = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=0.5)
    w = keras.Variable([1.0])
    tfdist.DistributedOptimizer(own).apply([tf.constant([1.0])], [w])
    assert w.numpy() == [0.5]


def test_batches_are_added_up_without_the_added_loss_scale(mixed_float16):
    sgd = keras.optimizers.SGD(0.25, gradient_accumulation_steps=2)
    optimizer = tfdist.DistributedOptimizer(sgd)
    assert minimized(optimizer, scales=False, traced=False) == [0.5]


def test_a_loss_scale_around_it_is_refused():
    wrapped = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    with pytest.raises(ValueError, match="has to be outermost"):
        keras.optimizers.LossScaleOptimizer(wrapped)


def test_a_factor_that_is_taken_away_is_told_how():
    sgd = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    wrapped = tfdist.DistributedOptimizer(sgd)
    with pytest.raises(
        ValueError, match="loss_scale_factor .* set to None.* set it to 1.0"
    ):
        wrapped.loss_scale_factor = None
    wrapped.loss_scale_factor = 1.0


def test_compile_of_a_mixed_float16_model_is_refused_if_it_would_wrap():
    model = small_model()
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(ValueError, match="has to be outermost"):
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse")


@pytest.mark.parametrize("nested", [False, True])
def test_xla_is_refused_before_the_first_step(nested, monkeypatch):
    monkeypatch.setattr(xla, "unusable", lambda: xla.NOT_BUILT)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    v = tf.Variable(1.0)

    def step():
        optimizer.apply([tf.constant(1.0)], [v])

    inner = tf.function(step) if nested else step
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        tf.function(lambda: inner(), jit_compile=True)()
    assert float(v) == 1.0


def test_fit_with_xla_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr(xla, "unusable", lambda: xla.NOT_BUILT)
    model = small_model()
    before = [w.numpy() for w in model.weights]
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        model.fit(X, Y, verbose=0)
    for a, b in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


def test_float8_gradients_are_refused():
    v = keras.Variable(1.0)
    v.overwrite_with_gradient = True
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(NotImplementedError, match="float8"):
        optimizer.apply([tf.constant(1.0)], [v])


def test_gradients_without_variables_need_a_built_optimizer():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="not built"):
        optimizer.apply([tf.constant(1.0)])
    v = keras.Variable(1.0)
    optimizer.build([v])
    optimizer.apply([tf.constant(1.0)])
    assert float(v.numpy()) == pytest.approx(0.9)


def test_a_loss_scale_that_does_not_know_its_variables(monkeypatch):
    """In Keras 3.11, only the inner optimizer knows them."""
    model = small_model()
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.25), initial_scale=1.0
        )
    )
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    vars(optimizer)["_trainable_variables"] = []
    before = [v.numpy() for v in model.trainable_variables]
    optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    for old, v in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), old - np.float32(0.25))
    told = []
    monkeypatch.setattr(
        model_optimizers,
        "broadcast_object",
        lambda own, *_, **options: told.append(own) or own,
    )
    model_optimizers.build_alike(model, 0, None)
    assert told == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize(
    ("method", "name"),
    [("save", "m.keras"), ("save", "m.h5"), ("save_weights", "m.weights.h5")],
)
def test_torn_weights_are_not_saved(method, name, tmp_path, monkeypatch):
    model = fitted(tfdist.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    monkeypatch.setattr(
        native, "failure", lambda: native.CoreError(10, "rank 3 on h7 died")
    )
    monkeypatch.setattr(native, "good_steps", lambda: 41)
    with pytest.raises(RuntimeError, match=r"rank 3 on h7 died.*last good step is 41"):
        getattr(model, method)(tmp_path / name)


LOAD = """
import json, sys
sys.modules["tfdist"] = None  # importing it raises ImportError
import keras, numpy as np
found = {}
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    o = model.optimizer
    found[path] = [
        f"{type(o).__module__}.{type(o).__qualname__}",
        [np.asarray(v).tolist() for v in model.weights + o.variables],
        np.asarray(model(np.ones((1, 4), "float32"))).tolist(),
    ]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_saved_models_load_without_tfdist_as_plain_keras(tmp_path):
    saved = {}
    for name, make in OPTIMIZERS.items():
        model = fitted(tfdist.DistributedOptimizer(make()))
        path = tmp_path / f"{name}.keras"
        model.save(path)
        saved[str(path)] = model
    loader = subprocess.run(
        [sys.executable, "-c", LOAD, *saved],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert loader.returncode == 0, loader.stderr[-3000:]
    found = json.loads(loader.stdout.splitlines()[-1])
    for path, model in saved.items():
        kind, values, output = found[path]
        own_class = type(model.optimizer)
        base = next(c for c in own_class.__mro__ if "keras.src" in c.__module__)
        assert kind == f"{base.__module__}.{base.__qualname__}"
        expected = [np.asarray(v) for v in model.weights + model.optimizer.variables]
        for a, b in zip(expected, values, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b, a.dtype))
        np.testing.assert_array_equal(model(np.ones((1, 4), "float32")), output)


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulators_are_known_before_the_first_step(scaled):
    def made():
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(sgd) if scaled else sgd

    v = tf.Variable([1.0])
    built_before, built_after = made(), made()
    built_before.build([v])
    tfdist.DistributedOptimizer(built_before)
    tfdist.DistributedOptimizer(built_after).build([v])
    copied = copy.deepcopy(built_before)
    copied.build([v])
    for optimizer in (built_before, built_after, copied):
        inner = optimizer.inner_optimizer if scaled else optimizer
        [sums] = inner._accumulated_gradients
        noted = [one for one in optimizer.variables if is_accumulator(one)]
        assert [id(one) for one in noted] == [id(sums)]
