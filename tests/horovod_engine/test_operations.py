"""Operations of the Horovod engine that fail or are stale, on a fake of Horovod.

With a real one: tests/horovod_engine/test_launchers.py.
"""

import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.collectives.engines.horovod._engine import HorovodEngine
from tfdist.collectives.reduce_op import ReduceOp
from tfdist.collectives.tf_ops import emit
from tfdist.core import native


class Horovod:
    """Adds 100 on one rank, or fails.

    Attributes:
        does: what an operation does with its tensor when it runs.
        runs: how many have run.
        gathered: name and tensor of each allgather.
    """

    Sum = 1

    def __init__(self):
        self.does, self.runs = (lambda tensor: tensor + 100), 0
        self.gathered = []

    def _run(self, tensor):
        self.runs += 1
        return self.does(tensor)

    def _allreduce(self, tensor, *, op, **_options):
        if tf.executing_eagerly():
            return self._run(tensor)
        found = tf.py_function(self._run, [tensor], tensor.dtype)
        found.set_shape(tensor.shape)
        return found

    def allgather(self, tensor, *, name, **_options):
        self.gathered.append((name, tensor))
        return tf.reshape(tensor, tf.shape(tensor))  # TensorFlow may fold it

    def rank_op(self):
        return tf.constant(0)


def fails(tensor):
    raise ValueError("Mismatched shapes")


@pytest.fixture
def engine():
    alone = native.Topology(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        cross_rank=0,
        cross_size=1,
        host_of=(0,),
    )
    made = HorovodEngine()
    made.fake = Horovod()
    made._sets.start()
    made.operations().start(made.fake, alone)
    yield made
    made.operations().end()


def reduced(engine, x, name="a", process_set=0):
    (found,) = engine.operations().tfdist_allreduce(
        tensors=[x],
        tensor_name=name,
        reduce_op=int(ReduceOp.SUM),
        prescale="1",
        postscale="1",
        timeout_s=0.0,
        process_set=process_set,
    )
    return found


def gathered(engine, x):
    found = engine.operations().tfdist_allgather(
        tensor=x, tensor_name="a", timeout_s=0.0, process_set=0
    )
    return found.rows


def test_an_eager_operation_that_fails_does_not_wait(engine):
    counts = engine.operations().counts
    assert float(reduced(engine, tf.constant(1.0))) == 101.0
    engine.fake.does = fails
    with pytest.raises(ValueError, match="Mismatched"):
        reduced(engine, tf.constant(1.0))
    assert not counts.is_waiting()
    assert counts.ended_count() == counts.operation_count() == 1


def test_an_operation_waits_while_it_runs(engine):
    counts, seen = engine.operations().counts, []

    def note(tensor):
        # In a graph beside what sets the mark, which may come a moment later.
        deadline = time.monotonic() + 10.0
        while not counts.is_waiting() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(counts.is_waiting())
        return tensor

    engine.fake.does = note
    step = tf.function(lambda x: reduced(engine, x, "batch_norm.b"))
    for call in (lambda x: reduced(engine, x), step, step):
        call(tf.constant(1.0))
        assert not counts.is_waiting()
    assert seen == [True] * 3
    assert (counts.ended_count(), counts.operation_count()) == (3, 1)


def test_a_step_that_failed_waits_for_nothing_when_it_has_run_again(engine):
    counts = engine.operations().counts

    @tf.function
    def step(x):
        return reduced(engine, reduced(engine, x, "a") * 2, "b")

    engine.fake.does = fails
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(1.0))
    assert counts.is_waiting()
    engine.fake.does = tf.identity
    assert float(step(tf.constant(1.0))) == 2.0
    assert not counts.is_waiting()
    assert counts.ended_count() == 2


def test_who_asks_what_an_error_means_has_left_the_step_behind(engine):
    step = tf.function(lambda x: reduced(engine, x))
    engine.fake.does = fails
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        step(tf.constant(1.0))
    assert engine.operations().counts.is_waiting()
    engine.to_core_error(raised.value)
    assert not engine.operations().counts.is_waiting()


@pytest.mark.parametrize("what", ["removed", "another world", "another of its number"])
def test_a_function_of_a_set_that_has_ended_reduces_over_no_other(engine, what):
    sets = engine._sets
    sets.add(1, 7)
    step = tf.function(lambda x: reduced(engine, x, process_set=1))
    assert float(step(tf.constant(1.0))) == 101.0
    if what == "another world":
        sets.start()
        sets.add(1, 7)
    else:
        assert sets.remove(1) == 7
    if what == "another of its number":
        sets.add(1, 7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="set 1 .* was removed"):
        step(tf.constant(1.0))
    assert engine.fake.runs == 1
    assert not engine.operations().counts.is_waiting()


def test_a_function_of_a_set_runs_while_others_come_and_go(engine, monkeypatch):
    made = iter([SimpleNamespace(process_set_id=7), SimpleNamespace(process_set_id=8)])
    engine._horovod = engine.fake
    monkeypatch.setattr(engine.fake, "size", lambda: 4, raising=False)
    monkeypatch.setattr(
        engine.fake, "add_process_set", lambda _: next(made), raising=False
    )
    engine.add_process_set(1, [0, 1])
    step = tf.function(lambda x: reduced(engine, x, process_set=1))
    step(tf.constant(1.0))
    engine.add_process_set(2, [0, 2])
    engine._sets.remove(2)
    assert float(step(tf.constant(1.0))) == 101.0


def test_the_gradient_of_an_allgather_sends_no_constants(engine, monkeypatch):
    monkeypatch.setattr(emit, "ops", engine.operations)
    engine.fake.does = tf.identity

    @tf.function
    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            rows = gathered(engine, x)
            first, second = tf.reduce_sum(rows * 2.0), tf.reduce_sum(rows * rows)
        return tape.gradient(first, x), tape.gradient(second, x)

    first, second = gradients(tf.constant([[3.0], [4.0]]))
    assert first.numpy().tolist() == [[2.0], [2.0]]
    assert second.numpy().tolist() == [[6.0], [8.0]]
    last = engine.fake.gathered[-3:]  # a function that makes variables is traced twice
    assert len({name for name, _ in last}) == 3
    assert [sent.op.type for _, sent in last] == ["DebugIdentityV2"] * 3
    counts = engine.operations().counts
    assert counts.ended_count() == 5 and not counts.is_waiting()
