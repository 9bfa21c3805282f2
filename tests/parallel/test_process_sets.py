"""Collectives of some of the ranks."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist import errors
from tfdist.collectives import ReduceOp


def all_collectives(in_graph):
    rank = tfdist.rank()
    pairs = [tfdist.add_process_set([0, 2]), tfdist.add_process_set([1, 3])]
    own = pairs[rank % 2]
    assert own.included() and not pairs[1 - rank % 2].included()
    last = own.ranks[-1]
    x = tf.constant([float(rank), 1.0])

    def step(x):
        rows = tf.fill([rank + 1, 2], rank)
        tfdist.barrier(process_set=own)
        return {
            "sum": tfdist.allreduce(x, op=ReduceOp.SUM, process_set=own),
            "average": tfdist.grouped_allreduce([x, x], process_set=own)[1],
            "gather": tfdist.allgather(rows, process_set=own)[:, 0],
            "broadcast": tfdist.broadcast(x, last, process_set=own),
            "reduce": tfdist.reduce(x, last, process_set=own),
            "scatter": tfdist.scatter(rows[:, 0], last, process_set=own),
            "all": tfdist.allreduce(x, op=ReduceOp.MAX),
        }

    found = (tf.function(step) if in_graph else step)(x)
    return [own.rank(), own.size(), {k: v.numpy() for k, v in found.items()}]


@pytest.mark.parametrize(
    "in_graph", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_every_collective_takes_a_process_set(in_graph):
    for rank, (index, size, found) in enumerate(
        run_ranks(all_collectives, 4, in_graph)
    ):
        first, last = rank % 2, rank % 2 + 2
        assert (index, size) == (rank // 2, 2)
        assert found["sum"].tolist() == [first + last, 2.0]
        assert found["average"].tolist() == [(first + last) / 2, 1.0]
        gathered = [first] * (first + 1) + [last] * (last + 1)
        assert found["gather"].tolist() == gathered
        assert found["broadcast"].tolist() == [last, 1.0]
        expected = [(first + last) / 2, 1.0] if rank == last else [float(rank), 1.0]
        assert found["reduce"].tolist() == expected
        assert found["all"].tolist() == [3.0, 1.0]


def gradients():
    rank = tfdist.rank()
    own = tfdist.add_process_set([0, 1] if rank < 2 else [0, 1])
    if rank == 2:
        return None
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        factor = tf.constant([1.0, 10.0])[rank]
        average = factor * tf.reduce_sum(tfdist.allreduce(x, process_set=own))
        to_root = factor * tf.reduce_sum(tfdist.reduce(x, 1, process_set=own))
    return [tape.gradient(y, x).numpy() for y in (average, to_root)]


def test_gradients_go_through_the_same_set():
    first, second, outside = run_ranks(gradients, 3)
    assert outside is None
    assert first[0].tolist() == second[0].tolist() == [5.5, 5.5]
    assert first[1].tolist() == [6.0, 6.0]  # 10 / 2, and its own unchanged tensor
    assert second[1].tolist() == [5.0, 5.0]


def one_step(own, w, optimizer):
    rank = tfdist.rank()
    with tfdist.DistributedGradientTape(process_set=own) as tape:
        loss = tf.reduce_sum(w.value * float(rank + 1))
    gradient = tape.gradient(loss, w)
    optimizer.apply([gradient * 0 + float(rank)], [w])
    return gradient


def tape_and_optimizer():
    rank = tfdist.rank()
    tfdist.shutdown()
    tfdist.init(process_sets=[[0, 1], [1, 2]])
    assert [s.ranks for s in tfdist.process_sets()] == [(0, 1), (1, 2)]
    found = []
    for number, own in enumerate(tfdist.process_sets()):
        if not own.included():
            continue
        w = keras.Variable([0.0], name="w")
        tfdist.broadcast_variables([w], root=own.ranks[0], process_set=own)
        optimizer = tfdist.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=own
        )

        step = tf.function(functools.partial(one_step, own, w, optimizer))
        for _ in range(4):
            gradient = step()
        texts = tfdist.allgather_object(f"rank {rank}", process_set=own)
        root = tfdist.broadcast_object(rank, own.ranks[1], process_set=own)
        found.append([number, gradient.numpy(), w.numpy(), texts, root])
    return found


def test_training_in_overlapping_sets():
    zero, one, two = run_ranks(tape_and_optimizer, 3)
    for found in (zero[0], one[0]):
        assert found[1] == [1.5] and found[2] == [-2.0]
        assert found[3] == ["rank 0", "rank 1"] and found[4] == 1
    for found in (one[1], two[0]):
        assert found[1] == [2.5] and found[2] == [-6.0]
        assert found[3] == ["rank 1", "rank 2"] and found[4] == 2


def refused(call):
    try:
        call()
    except Exception as error:
        return [type(errors.from_tf(error) or error).__name__, str(error)]
    return ["none", ""]


def mistakes():
    rank = tfdist.rank()
    found = {}
    found["differ"] = refused(lambda: tfdist.add_process_set([0, 1 + rank]))
    found["invalid"] = refused(lambda: tfdist.add_process_set([1, 0]))
    found["wide"] = refused(lambda: tfdist.add_process_set([0, (1 << 32) + 1]))
    found["types"] = refused(lambda: tfdist.add_process_set(["0"]))
    pair = tfdist.add_process_set([0, 1])
    x = tf.ones([2])
    if rank == 2:
        found["outside"] = refused(lambda: tfdist.allreduce(x, process_set=pair))
        found["rank"] = refused(pair.rank)
        found["root"] = refused(
            lambda: tfdist.broadcast_object(1, root=2, process_set=pair)
        )
    found["no set"] = refused(lambda: tfdist.allreduce(x, process_set=[0, 1]))
    compiled = tf.function(lambda y: tfdist.allreduce(y, process_set=pair))
    if pair.included():
        compiled(x)
    tfdist.remove_process_set(pair)
    found["removed"] = refused(lambda: tfdist.allreduce(x, process_set=pair))
    again = tfdist.add_process_set([0, 1])
    assert again != pair
    tfdist.shutdown()
    tfdist.init()
    found["stale"] = refused(lambda: tfdist.allreduce(x, process_set=again))
    tfdist.add_process_set([0, 1])
    if rank < 2:
        found["graph"] = refused(lambda: compiled(x))
    tfdist.barrier()
    return found


def test_mistakes_say_what_to_do():
    results = run_ranks(mistakes, 3)
    for found in results:
        assert found["differ"][0] == "MismatchError"
        assert "rank 0: [0,1]; rank 1: [0,2]; rank 2: [0,3]" in found["differ"][1]
        assert found["invalid"][0] == "InvalidArgumentError"
        assert "ascending" in found["invalid"][1]
        assert found["wide"][0] == "InvalidArgumentError"
        assert found["types"][0] == "TypeError"
        assert found["no set"][0] == "TypeError"
        assert "tfdist.add_process_set(ranks)" in found["no set"][1]
        assert "was removed. Create a new" in found["removed"][1]
        assert "an earlier tfdist.init()" in found["stale"][1]
    assert results[2]["outside"][0] == "InvalidArgumentError"
    assert "rank 2 is not in process set" in results[2]["outside"][1]
    assert "got rank 2" in results[2]["rank"][1]
    assert "one of the ranks [0, 1]" in results[2]["root"][1]
    for found in results[:2]:
        assert found["graph"][0] == "InvalidArgumentError"
        assert "is not known" in found["graph"][1]


def alone():
    own = [tfdist.add_process_set([r]) for r in range(tfdist.size())][tfdist.rank()]
    value = tfdist.allreduce(tf.constant([float(tfdist.rank())]), process_set=own)
    return value.numpy()


def test_a_set_of_one_rank_works_too():
    assert np.concatenate(run_ranks(alone, 2)).tolist() == [0.0, 1.0]
