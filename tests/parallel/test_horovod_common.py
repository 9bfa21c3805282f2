"""What Horovod's packages share, its data loaders and its states, on two ranks."""

import os

import pytest
import tensorflow as tf
from helpers.horovod_calls import on_ranks, recorded
from helpers.ranks import run_ranks

import tfdist.horovod.tensorflow as hvd
from tfdist.elastic import sharing
from tfdist.horovod import data
from tfdist.horovod.common import elastic, exceptions, util
from tfdist.horovod.tensorflow import compression
from tfdist.horovod.tensorflow import elastic as of_tensorflow


@recorded
def small_functions():
    built = [
        one(verbose=True)
        for one in (
            *(util.mpi_built, util.gloo_built, util.nccl_built),
            *(util.ddl_built, util.ccl_built),
        )
    ]
    name = f"TFDIST_TEST_ENV_{hvd.rank()}"
    with util.env(**{name: "inside"}):
        inside = os.environ[name]
    error = exceptions.HorovodVersionMismatchError("keras", "3.15", "3.14")
    text = exceptions.get_version_mismatch_message("keras", "3.15", "3.14")
    return [
        [int(one) for one in built],
        [inside, name in os.environ],
        util.extension_available("tensorflow", verbose=True),
        [util.is_iterable([]), util.is_iterable(3)],
        util.is_version_greater_equal_than("2.21.0", "2.6.0"),
        util.split_list([1, 2, 3], 2),
        [str(error) == text, error.version, error.installed_version],
        exceptions.HostsUpdatedInterrupt(True).skip_sync,
    ]


def test_small_functions_answer_alike_on_all_ranks():
    expected = [
        [0, 1, 0, 0, 0],
        ["inside", False],
        True,
        [True, False],
        True,
        [[1, 2], [3]],
        [True, "3.15", "3.14"],
        True,
    ]
    assert on_ranks(small_functions, 2) == [expected, expected]


@recorded
def compressions():
    x = tf.constant([1.0, 1.001])
    found = []
    for kind in (compression.NoneCompressor, compression.FP16Compressor):
        sent, context = kind.compress(x)
        end = kind.decompress(hvd.allreduce(sent, op=hvd.Sum), context)
        found.append([sent.dtype.name, end.dtype.name, end.numpy()])
    with pytest.raises(NotImplementedError):
        compression.Compressor.compress(x)
    with pytest.raises(NotImplementedError):
        compression.Compressor.decompress(x, None)
    return found


def test_compressors_by_hand():
    rounded = tf.cast(tf.constant([1.0, 1.001]), tf.float16).numpy()
    for plain, half in on_ranks(compressions, 2):
        assert plain[:2] == ["float32", "float32"]
        assert half[:2] == ["float16", "float32"]
        assert half[2].tolist() == (rounded + rounded).tolist()
        assert plain[2].tolist() == (2 * tf.constant([1.0, 1.001])).numpy().tolist()


class Numbers(data.BaseDataLoader):
    """As many batches as it is told, the rank's own."""

    def __init__(self, count, scale=1):
        self.count, self.scale = count, scale

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            yield self.scale * (number + hvd.rank())


class ReadAhead(data.AsyncDataLoaderMixin, Numbers):
    """The same in a thread."""


@recorded
def loaders():
    ahead = ReadAhead(2, True, 3, scale=10)
    first = list(ahead)
    ahead.close_async_loader()
    return [first, list(ReadAhead(async_loader_queue_size=0, count=2))]


def test_loaders_read_ahead_on_each_rank():
    assert on_ranks(loaders, 2) == [[[0, 10, 20], [0, 1]], [[10, 20, 30], [1, 2]]]


@recorded
def states():
    rank = hvd.rank()
    bare = elastic.State(hvd.broadcast_object, hvd.rank)
    resets = []
    bare.register_reset_callbacks([lambda: resets.append("called")])
    bare.on_reset()
    bare.reset()
    bare.check_host_updates()
    for method in (bare.save, bare.restore, bare.sync, bare.commit):
        with pytest.raises(NotImplementedError):
            method()
    plain = elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=rank)
    plain.sync()
    synced = plain.epoch
    plain.epoch = 5
    plain.save()
    plain.epoch = 6
    plain.restore()
    w = tf.Variable(rank + 1.0)
    tracked = of_tensorflow.TensorFlowState([w], batch=rank)
    tracked.sync()
    first = float(w)
    w.assign(7.0)
    tracked.save()
    w.assign(8.0)
    tracked.restore()
    session = tf.compat.v1.Session(graph=tf.Graph())
    with pytest.raises(ValueError, match="session=None"):
        of_tensorflow.TensorFlowState([w], session=session)
    with pytest.raises(ValueError, match="backend=None"):
        of_tensorflow.TensorFlowKerasState(tf.Module(), backend=tf.keras.backend)
    with pytest.raises(NotImplementedError, match="session hook"):
        hvd.BroadcastGlobalVariablesHook(1, device="/cpu:0")
    return [resets, synced, plain.epoch, first, float(w), tracked.batch]


def test_states_are_those_of_rank_0_and_go_back():
    assert on_ranks(states, 2) == [[["called"], 0, 5, 1.0, 7.0, 0]] * 2


class OwnState(elastic.ObjectState):
    """A state of a script of its own."""

    def sync(self):
        self.batch = self._bcast_object(self.batch)


def newest_states():
    hvd.init()
    own = OwnState(hvd.broadcast_object, hvd.rank, batch=hvd.rank())
    w = tf.Variable(hvd.rank() + 1.0)
    tracked = of_tensorflow.TensorFlowState([w], batch=hvd.rank())
    for state in (own, tracked):
        state.save()
        # As `run` in a new generation, in which rank 1 has the newest commit.
        newest = sharing._find_newest(hvd.rank())
        assert newest == sharing.Newest(root=1, committed=1, is_everywhere=False)
        state._newest_rank = newest.root
        state.sync()
    w.assign(5.0)
    tracked.restore()
    return [own.batch, float(w), tracked.batch]


def test_states_are_those_of_the_rank_with_the_newest_commit():
    assert run_ranks(newest_states, 2) == [[1, 2.0, 1]] * 2


@recorded
def tape_and_slots():
    rank, factor = hvd.rank(), 2.0 * hvd.rank() + 1  # 1 and 3: the average is 2
    a, b = tf.Variable([1.0]), tf.Variable([1.0], name=f"b_on_{rank}")
    with tf.GradientTape(persistent=True) as tape:
        loss = factor * (tf.reduce_sum(a) + tf.reduce_sum(b))
    tape = hvd.DistributedGradientTape(tape)
    twice = tape.gradient(loss, a, output_gradients=tf.constant(2.0))
    tape.register_local_source(a)
    local, others = tape.get_local_and_global_gradients(
        loss, [a, b], tf.constant(4.0), use_generic_names=True
    )
    made = hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.0))
    made.apply_gradients([(tf.constant([1.0]), a)], name="mine")
    slot = made.get_slot(var=a, name="m")
    members = hvd.add_process_set([1])
    index = members.rank() if rank == 1 else None
    return [float(twice[0]), float(local[0][1][0]), float(others[0][1][0])] + [
        slot.shape.as_list(),
        index,
    ]


def test_output_gradients_and_slots():
    first, second = on_ranks(tape_and_slots, 2)
    assert first == [4.0, 1 * 4 / 2, 8.0, [1], None]
    assert second == [4.0, 3 * 4 / 2, 8.0, [1], 0]


@recorded
def numbers_of_sets():
    first, second = (hvd.add_process_set([rank]) for rank in range(2))
    hvd.remove_process_set(second)
    if hvd.rank() == 1:
        hvd.size_op(first.process_set_id)  # looks the set up, on one rank only
    hvd.remove_process_set(first)
    return [hvd.add_process_set([rank]).process_set_id for rank in range(2)]


def test_ids_of_removed_process_sets_are_used_again_in_the_order_of_removal():
    assert on_ranks(numbers_of_sets, 2) == [[2, 1], [2, 1]]
