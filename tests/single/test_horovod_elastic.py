"""Elastic and compute-service names: what works, and what says that it does not."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist.horovod.tensorflow as hvd
import tfdist.horovod.tensorflow.keras as hvd_keras
from tfdist.horovod.common.elastic import ObjectState
from tfdist.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_elastic_in_a_world_of_fixed_size(world):
    w = keras.Variable([1.0, 2.0])
    state = hvd.elastic.TensorFlowState([w], epoch=1)
    resets = []
    state.register_reset_callbacks([lambda: resets.append(state.epoch)])

    @hvd.elastic.run
    def train(state, more):
        state.epoch, _ = 2, w.assign([5.0, 6.0])
        state.commit()
        state.epoch, _ = 3, w.assign([7.0, 8.0])
        state.restore()
        state.on_reset()
        return state.epoch + more

    assert train(state, 10) == 12
    assert w.numpy().tolist() == [5.0, 6.0] and resets == [2]

    for error in (HorovodInternalError("lost"), HostsUpdatedInterrupt(False)):

        @hvd.elastic.run
        def fails(state, error=error):
            raise error

        with pytest.raises(NotImplementedError, match="checkpoint"):
            fails(state)


def one_weight(optimizer):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_the_end_of_an_epoch_is_committed(world, batches):
    model = one_weight(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    state = hvd_keras.elastic.KerasState(model, epoch=0, batch=0)
    e = hvd_keras.elastic
    callbacks = [
        e.UpdateBatchStateCallback(state),
        e.UpdateEpochStateCallback(state),
        e.CommitStateCallback(state, batches_per_commit=batches),
    ]
    ones = np.ones((2, 1), "float32")
    model.fit(ones, ones, batch_size=1, epochs=2, verbose=0, callbacks=callbacks)
    state.restore()
    assert (state.epoch, state.batch) == (2, 0)


def test_a_state_takes_back_what_an_optimizer_makes_in_its_first_step(world):
    adam = keras.optimizers.Adam(0.5)
    scaled = keras.optimizers.LossScaleOptimizer(adam, initial_scale=8.0)
    model = one_weight(hvd.DistributedOptimizer(scaled))
    state = hvd_keras.elastic.KerasState(model)
    kernel = model.layers[-1].kernel
    kept = [v.numpy() for v in model.weights]
    model.optimizer.apply([tf.constant([[16.0]])], [kernel])
    assert kernel.numpy() != kept[0]
    state.restore()
    assert [v.numpy() for v in model.weights] == kept
    found = {v.path.rpartition("/")[2]: v.numpy().max() for v in adam.variables}
    rate = found.pop("learning_rate")
    assert rate == 0.5 and len(found) == 3 and not any(found.values())
    assert model.optimizer.dynamic_scale.numpy() == 8.0


def test_elastic_states_say_what_they_need(world):
    with pytest.raises(ValueError, match="variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(ValueError, match="session=None"):
        hvd.elastic.TensorFlowState([tf.Variable(1.0)], session=object())
    with pytest.raises(ValueError, match="built first"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="backend=None"):
        hvd.elastic.TensorFlowKerasState(model, backend=object())
    state = ObjectState(lambda obj: {"epoch": 7}, lambda: 1, epoch=0)
    state.sync()
    assert state.epoch == 7


def test_the_compute_service_is_an_error_that_says_what_to_use():
    with pytest.raises(ImportError, match=r"tfdist\.data\.scatter"):
        importlib.import_module("tfdist.horovod.tensorflow.data.compute_service")
