"""Operations after the step of a model, in the function that `fit` traces."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

import tfdist
from tfdist.gradients import xla
from tfdist.training import jit_compile
from tfdist.training.train_steps import remake_train_function

X, Y = np.ones((12, 2), "float32"), np.ones((12, 1), "float32")


class OwnFunction(keras.Sequential):
    """A model that keeps its first train function."""

    def make_train_function(self, force=False):
        if self.train_function is None:
            self.train_function = lambda _: {"loss": tf.constant(0.0)}


def model_of(kind=keras.Sequential, **options):
    model = kind([keras.Input((2,)), keras.layers.Dense(1)])
    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(sgd, loss="mse", **options)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": False},
        {"jit_compile": True},
        {"run_eagerly": True},
        {"jit_compile": False, "steps_per_execution": 3},
    ],
    ids=str,
)
def test_the_addition_follows_each_step_and_xla_does_not_compile_it(
    options, monkeypatch
):
    monkeypatch.setattr(xla, "unusable", lambda: xla.NOT_BUILT)
    tfdist.init()
    model = model_of(**options)
    steps, in_xla = tf.Variable(0), []

    def after(logs):
        graph = tf.compat.v1.get_default_graph()
        in_xla.append(control_flow_util.GraphOrParentsInXlaContext(graph))
        return {**logs, "steps": steps.assign_add(1)}

    jit_compile.install(model)
    remake_train_function(model, after)
    jit_compile.remove(model)
    assert "train_step" not in vars(model)
    data = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    logs = model.train_function(data)
    calls = options.get("steps_per_execution", 1)
    assert int(logs["steps"]) == calls == int(steps) and "loss" in logs
    assert in_xla and not any(in_xla)
    assert int(model.optimizer.iterations) == calls


def test_a_train_step_that_was_set_on_the_model_is_kept():
    model = model_of(run_eagerly=True)
    object.__setattr__(model, "train_step", lambda data: {"loss": 2.0})
    remake_train_function(model, lambda logs: {"loss": logs["loss"] + 1})
    assert model.train_function(iter([(X, Y)])) == {"loss": 3.0}
    assert model.train_step(None) == {"loss": 2.0}


def test_a_model_with_its_own_train_function_may_leave_it_out():
    model = model_of(OwnFunction)
    remake_train_function(model, lambda logs: {})
    assert "loss" in model.train_function(None)
