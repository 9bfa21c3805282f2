"""Elastic and compute-service names: what works, and what says that it does not."""

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod.tensorflow as hvd
import tfdist.horovod.tensorflow.keras as hvd_keras
from tfdist.core import runtime
from tfdist.core.generations import Generations
from tfdist.elastic.sharing import Newest
from tfdist.horovod import _elastic_loop
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

        with pytest.raises(RuntimeError, match="--min-np M"):
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


@pytest.mark.parametrize("ranks_when_traced", [1, 2])
def test_gradients_use_the_number_of_ranks_when_they_run(
    world, monkeypatch, ranks_when_traced
):
    monkeypatch.setenv("TFDIST_MEMBER", "0")
    v = tf.Variable([3.0])

    def of_local_variable():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(v)
        return tape.gradient(loss, v)

    def of(operation):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(operation(v * 1.0))
        return tape.gradient(loss, v)

    @tf.function
    def gradients():
        return [
            of_local_variable(),
            of(hvd.allgather),
            of(lambda x: hvd.grouped_allgather([x])[0]),
            of(lambda x: hvd.broadcast(x, 0)),
            of(hvd.reducescatter),
        ]

    with monkeypatch.context() as patched:
        for owner in (tfdist, runtime):
            patched.setattr(owner, "size", lambda: ranks_when_traced)
        traced = gradients.get_concrete_function()
    assert [g.numpy().tolist() for g in traced()] == [[6.0], *[[1.0]] * 4]
    read = [op for op in traced.graph.get_operations() if op.type == "TfdistTopology"]
    assert len(read) >= 5


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


# ---- the loop, as one process sees it ----


class Recorded(ObjectState):
    """Records what the loop does with it; `enters` ends the job if it is "stop"."""

    def __init__(self, monkeypatch, enters=None):
        self.events = []
        self.newest = []  # whether this rank had the newest commit, for each `sync`
        super().__init__(lambda obj, **_: obj, lambda: 0, batch=0)
        monkeypatch.setattr(_elastic_loop._state, "was_called", False)
        monkeypatch.setattr(runtime.state, "shutdowns", 0)  # of earlier tests
        monkeypatch.setattr(Generations, "leave", lambda _: self.events.append("leave"))
        monkeypatch.setattr(_elastic_loop, "enter_next", self.enter)
        self.enters = enters or Newest(0, 1, True)

    def enter(self, generations, committed, lines, share):
        self.events.append(f"enter {committed}")
        if self.enters == "stop":
            raise tfdist.RankFailedError("too few ranks are left")
        share(self.enters)

    def restore(self):
        self.events.append("restore")
        super().restore()

    def sync(self):
        self.events.append("sync")
        self.newest.append(self._is_newest)
        super().sync()

    def reset(self):
        self.events.append("reset")

    def run(self, *errors):
        """Trains 5 batches in each call, and commits after 3; returns the batches."""
        calls = iter([*errors, None])
        self.events.clear()

        def train(state):
            state.events.append("call")
            for _ in range(3):
                state.batch += 1
            state.commit()
            for _ in range(2):
                state.batch += 1
            if error := next(calls):
                raise error
            return state.batch

        return _elastic_loop.ElasticLoop(self).run(train, (), {})


def lost_in_a_graph():
    """The error of a traced function in which a rank was lost."""
    payload = b'{"kind": "rank_failed", "rank": 1, "message": "rank 1 was lost"}'
    error = tf.errors.AbortedError(None, None, "in f")
    error._experimental_payloads = {b"tfdist.error": payload}
    return error


@pytest.mark.parametrize(
    "error",
    [
        HorovodInternalError("lost"),
        tfdist.RankFailedError("lost"),
        tfdist.errors.EvictedError("excluded"),
        lost_in_a_graph(),
    ],
    ids=["internal", "eager", "excluded", "graph"],
)
def test_after_a_loss_the_function_is_called_again_with_the_last_commit(
    world, monkeypatch, error
):
    state = Recorded(monkeypatch)
    assert state.run(error) == 3 + 5
    again = ["leave", "restore", "enter 1", "reset", "sync", "call"]
    assert state.events == ["sync", "call", *again]
    assert state._commits == 2
    assert state.newest == [None, True]


def test_a_rank_knows_in_sync_that_another_has_a_newer_commit(world, monkeypatch):
    state = Recorded(monkeypatch, Newest(1, 2, False))
    state.run(HorovodInternalError("lost"))
    assert state.newest == [None, False]


def test_when_newcomers_are_ready_the_function_is_called_again_as_it_is(
    world, monkeypatch
):
    state = Recorded(monkeypatch)
    are_ready = iter([True, False])
    monkeypatch.setattr(*(Generations, "is_change_due", lambda _: next(are_ready)))
    assert state.run() == 3 + 5
    assert state.events == ["sync", "call", "enter 1", "reset", "sync", "call"]
    state.check_host_updates()  # outside of the function, it does nothing


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_without_sync_the_ranks_go_on_if_all_have_the_newest_state(
    world, monkeypatch, is_everywhere
):
    state = Recorded(monkeypatch, Newest(0, 1, is_everywhere))
    assert state.run(HostsUpdatedInterrupt(skip_sync=True)) == 5 + 5
    sync = [] if is_everywhere else ["sync"]
    assert state.events == ["sync", "call", "leave", "enter 1", "reset", *sync, "call"]


def test_if_the_job_cannot_go_on_the_state_is_that_of_the_last_commit(
    world, monkeypatch
):
    for error in (HorovodInternalError("lost"), HostsUpdatedInterrupt(False)):
        state = Recorded(monkeypatch, "stop")
        with pytest.raises(tfdist.RankFailedError, match="too few ranks are left"):
            state.run(error)
        assert state.batch == 3


def test_other_errors_pass(world, monkeypatch):
    for error in (ValueError("x"), tfdist.MismatchError("x"), OSError("x")):
        with pytest.raises(type(error), match="x"):
            Recorded(monkeypatch).run(error)


def test_an_elastic_job_calls_one_function_once(world, monkeypatch):
    state = Recorded(monkeypatch)
    state.run()
    with pytest.raises(RuntimeError, match="was called before"):
        state.run()


def test_the_current_attributes_are_sent_from_the_newest_rank():
    roots = []

    def broadcast(obj, root_rank=0):
        roots.append(root_rank)
        return {**obj, "sent": True}

    state = ObjectState(broadcast, lambda: 1, epoch=0)
    state.epoch = 4
    state.sync()
    state._newest_rank = 3
    state.sync()
    state.restore()
    assert (state.epoch, state.sent, roots) == (4, True, [0, 3])


def test_the_compute_service_is_an_error_that_says_what_to_use():
    with pytest.raises(ImportError, match=r"tfdist\.data\.scatter"):
        importlib.import_module("tfdist.horovod.tensorflow.data.compute_service")
