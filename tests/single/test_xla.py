"""Gradients reduced inside of what XLA compiles, at size 1: when that is refused, what
is compiled, and what an error looks like. Most of it needs no `libtfdist_xla.so`.
"""

import importlib.util
import logging
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.xla_library import needs_xla_library

import tfdist
from tfdist import errors
from tfdist.collectives.tf_ops import xla_context
from tfdist.gradients import reduction
from tfdist.gradients import xla as gradient_xla
from tfdist.gradients.sparse import TABLE_BYTES

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


def fitted(train_step=None, jit_compile=True, **options):
    """A model after three epochs of two batches."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)

    class Model(keras.Sequential):
        pass

    if train_step is not None:
        Model.train_step = train_step
    model = Model([keras.Input((3,)), keras.layers.Dense(1)])
    accumulated = options.pop("accumulated", None)
    adam = keras.optimizers.Adam(0.1, gradient_accumulation_steps=accumulated)
    optimizer = tfdist.DistributedOptimizer(adam, **options)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    model.fit(X, Y, 4, 3, verbose=0, callbacks=callbacks, shuffle=False)
    return model


def own_step(apply):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        apply(self.optimizer, tape.gradient(loss, self.trainable_variables), self)
        return {"error": loss}

    return train_step


def weighted(optimizer, gradients, model):
    optimizer.apply(gradients, model.trainable_variables, weight=4)


REFUSED = {
    "switched off": ({"xla": "off"}, "xla='off' was given"),
    "accumulation": ({"accumulated": 2}, "gradients are accumulated"),
    "nan policy": ({"nan_policy": "raise"}, "nan_policy='raise'"),
    "weight": ({"train_step": own_step(weighted)}, "a weight is given"),
}


SLOW = ("accumulation", "nan policy")


@pytest.mark.parametrize(
    "what",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in REFUSED],
)
def test_what_has_no_place_inside_takes_the_split_step(what, monkeypatch, caplog):
    monkeypatch.setattr(gradient_xla, "unusable", lambda: None)
    caplog.set_level(logging.INFO, logger="tfdist")
    options, reason = REFUSED[what]
    model = fitted(**options)
    [line] = [r.message for r in caplog.records if "jit_compile=True" in r.message]
    assert "run outside XLA, because" in line
    assert reason in line
    plain = fitted(jit_compile=False, **options)
    for a, b in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_the_commit_gate_takes_the_split_step(monkeypatch):
    monkeypatch.setattr(gradient_xla, "unusable", lambda: None)
    monkeypatch.setattr(reduction, "gated", lambda: True)
    with pytest.raises(xla_context.InsideXlaError, match="TFDIST_ATOMIC_STEPS=1"):
        compiled_gradients([tf.Variable([1.0])])


@pytest.mark.parametrize("how", ["cond", "loop", "function"])
def test_a_reduction_in_a_branch_a_loop_or_a_function_is_refused(how, monkeypatch):
    monkeypatch.setattr(gradient_xla, "unusable", lambda: None)
    v = tf.Variable(1.0)

    def reduce():
        return reduction.reduce_gradients([v * 2.0], [v])[0]

    ways = {
        "cond": lambda: tf.cond(v > 0.0, reduce, lambda: v * 1.0),
        "loop": lambda: tf.while_loop(
            lambda i, _: i < 2, lambda i, _: (i + 1, reduce()), (0, v * 1.0)
        ),
        "function": lambda: tf.function(reduce)(),
    }
    with pytest.raises(xla_context.InsideXlaError, match="tf.cond, tf.while_loop"):
        tf.function(ways[how], jit_compile=True)()


def compiled_gradients(variables):
    @tf.function(jit_compile=True)
    def step():
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
        return tape.gradient(loss, variables)

    return step()


def test_rows_of_a_large_table_are_refused(monkeypatch):
    monkeypatch.setattr(gradient_xla, "unusable", lambda: None)
    table = tf.Variable(tf.zeros([TABLE_BYTES // 16, 4]))

    @tf.function(jit_compile=True)
    def step():
        with tfdist.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 1, 5]))
        return tape.gradient(loss, table)

    with pytest.raises(xla_context.InsideXlaError, match="reduced by rows"):
        step()


def test_a_missing_library_is_named_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(gradient_xla, "LIBRARY_PATH", tmp_path / "none.so")
    assert gradient_xla.unusable() == gradient_xla.NOT_BUILT
    with pytest.raises(NotImplementedError, match=r"(?s)make xla.*jit_compile=False"):
        compiled_gradients([tf.Variable([1.0])])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"tfdist ops built for TensorFlow 1.2.3;", "was built for TensorFlow 1.2.3"),
        (f"tfdist ops built for TensorFlow {tf.__version__};".encode(), "not load"),
    ],
)
def test_a_library_of_another_tensorflow_is_not_loaded(
    content, words, monkeypatch, tmp_path
):
    path = tmp_path / "library.so"
    path.write_bytes(content)
    monkeypatch.setattr(gradient_xla, "LIBRARY_PATH", path)
    monkeypatch.setattr(gradient_xla, "_load", gradient_xla._load.__wrapped__)
    assert words in gradient_xla.unusable()
    assert "make xla" in gradient_xla.unusable()


def test_a_machine_with_a_gpu_takes_the_split_step(monkeypatch, tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(b"")
    monkeypatch.setattr(gradient_xla, "LIBRARY_PATH", path)
    devices = [tf.config.LogicalDevice(f"/device:{d}:0", d) for d in ("CPU", "GPU")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: devices)
    assert "CPUs only, and TensorFlow sees GPU here" in gradient_xla.unusable()


def test_make_xla_names_what_a_tensorflow_lacks(monkeypatch, tmp_path, capsys):
    path = Path(__file__).resolve().parents[2] / ".ci" / "xla.py"
    spec = importlib.util.spec_from_file_location("build_xla", path)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(tf.sysconfig, "get_include", lambda: str(tmp_path))
    monkeypatch.setattr(build.subprocess, "run", None)  # nothing is begun
    assert build.main() == 1
    message = capsys.readouterr().err
    for name in build.HEADERS:
        assert str(tmp_path / name) in message
    assert "Nothing was built. tfdist works without it" in message


def test_only_known_choices_are_taken():
    with pytest.raises(ValueError, match="xla='auto' or 'off', got 'on'"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), xla="on")


RECORD = '{"kind": "rank_failed", "rank": 3, "host": "h", "cause": "it [stopped]"}'


def test_an_error_that_xla_carried_as_text_is_ours_again():
    text = (
        f'in step: tfdist: rank 3: "x" [tfdist.error {RECORD}]\n\t [[{{{{node f}}}}]]'
    )
    ours = errors.from_tf(tf.errors.AbortedError(None, None, text))
    assert type(ours) is errors.RankFailedError
    assert str(ours) == 'rank 3: "x"'
    assert ours.record == errors.ErrorRecord(
        "rank_failed", rank=3, host="h", cause="it [stopped]"
    )


@pytest.mark.parametrize(
    "text", ["", "plain", "a [tfdist.error {]", "[tfdist.error 1]"]
)
def test_other_texts_are_not_ours(text):
    assert errors.from_tf(tf.errors.AbortedError(None, None, text)) is None


@needs_xla_library
def test_one_custom_call_a_group_in_place_and_in_order():
    a, b = tf.Variable(tf.ones([64, 32])), tf.Variable(tf.ones([32]))
    c = tf.Variable(tf.ones([8, 4]))

    @tf.function(jit_compile=True)
    def step(x):
        with tfdist.DistributedGradientTape(persistent=True) as tape:
            one, two = tf.reduce_sum(tf.tanh(x @ a + b)), tf.reduce_sum(c**2)
        return tape.gradient(one, [a, b]), tape.gradient(two, [c])

    x = tf.ones([16, 64])
    step(x)
    text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
    calls = [
        line for line in text.splitlines() if 'target="tfdist_reduce_group"' in line
    ]
    assert len(calls) == 2
    for line, outputs in zip(calls, (3, 2), strict=True):
        pairs = ", ".join(f"{{{i}}}: ({i}, {{}})" for i in range(outputs))
        assert f"output_to_operand_aliasing={{{pairs}}}" in line
    [(first, token)] = re.findall(r"custom-call\(%([\w.]+), %([\w.]+)\)", calls[1])
    [source] = [line for line in text.splitlines() if f"%{first} = " in line]
    assert "get-tuple-element(%TfdistReduceGroup" in source, token


@needs_xla_library
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_with_a_nan_is_left_out_inside(finite):
    model = fitted(nan_policy="skip_step")
    before = [v.numpy() for v in model.weights]
    x = X[:4] if finite else np.full_like(X[:4], np.nan)
    model.train_on_batch(x, Y[:4])
    same = [
        np.array_equal(a, b.numpy()) for a, b in zip(before, model.weights, strict=True)
    ]
    assert same == [not finite] * len(before)


@needs_xla_library
def test_a_reduced_gradient_has_no_gradient_inside():
    v = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as outer:
            with tfdist.DistributedGradientTape() as inner:
                loss = tf.reduce_sum(v**3)
            first = inner.gradient(loss, v)
        return outer.gradient(first, v)

    with pytest.raises(NotImplementedError, match="differentiated again"):
        step()


@needs_xla_library
def test_the_library_is_found_after_xla_has_compiled_something():
    assert float(tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(1.0))) == 2
    [gradient] = compiled_gradients([tf.Variable([3.0])])
    assert gradient.numpy().tolist() == [6.0]
