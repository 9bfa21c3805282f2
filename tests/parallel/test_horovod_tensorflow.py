"""horovod.tensorflow on two ranks: every function with every parameter."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.horovod_calls import on_ranks, recorded

import tfdist.horovod.tensorflow as hvd
from tfdist.horovod.tensorflow import mpi_ops


def both_modes(step, *inputs):
    """What `step` returns eagerly, and in a tf.function, as arrays."""
    traced = tf.function(step, autograph=False)  # which takes seconds
    return [
        [value.numpy() for value in tf.nest.flatten(mode(*inputs))]
        for mode in (step, traced)
    ]


def own_set():
    """A process set of this rank alone; every rank has to make all of them."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    return sets[hvd.rank()]


# ---- reductions ----


@recorded
def reductions():
    rank, alone = hvd.rank(), own_set()
    x = tf.constant([1.0, 2.0, 4.0]) * (rank + 1)
    n = tf.constant([3, -5], tf.int32) * (rank + 1)

    def step(x, n):
        options = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
        with tf.name_scope(f"scope_of_{rank}"):
            scoped = [
                hvd.allreduce(x, name="same", ignore_name_scope=True),
                *hvd.grouped_allreduce([x], name="all", ignore_name_scope=True),
                hvd.reducescatter(x, name="part", ignore_name_scope=True),
            ]
        compressed = hvd.grouped_allreduce(
            [x * 1.001, n], compression=hvd.Compression.fp16, device_dense="/cpu:0"
        )
        return [
            [hvd.allreduce(x, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)],
            scoped,
            hvd.allreduce(x, device_dense="/cpu:0", **options),
            hvd.allreduce(n, **options),
            hvd.allreduce(n, postscale_factor=1.5),
            hvd.allreduce(x * 1.001, compression=hvd.Compression.fp16),
            compressed,
            hvd.grouped_allreduce([x, n, tf.cast(x, tf.float64)], **options),
            hvd.reducescatter(x, device_dense="/cpu:0", **options),
            hvd.reducescatter(n, compression=hvd.Compression.fp16, op=hvd.Max),
            hvd.grouped_reducescatter([x, n], device_dense="/cpu:0", **options),
            hvd.grouped_reducescatter([x], compression=hvd.Compression.fp16),
            [
                hvd.allreduce(x, process_set=alone),
                *hvd.grouped_allreduce([x, n], process_set=alone),
                hvd.reducescatter(x, process_set=alone),
                *hvd.grouped_reducescatter([x, n], process_set=alone),
            ],
        ]

    with pytest.warns(DeprecationWarning):
        old = [
            hvd.allreduce(x, average=False).numpy(),
            hvd.grouped_allreduce([x], average=True)[0].numpy(),
        ]
    return [both_modes(step, x, n), old]


def test_reductions_are_those_of_numpy():
    x, n = np.float32([1, 2, 4]), np.int32([3, -5])
    rough = np.float16(x * np.float32(1.001)), np.float16(2 * x * np.float32(1.001))
    average = np.float16((rough[0].astype("f4") + rough[1]) / 2).astype("f4")
    summed = [x * 4.5, np.int32([1 + 3, -2 - 5]) * 3]
    for rank, (modes, old) in enumerate(on_ranks(reductions, 2)):
        part = slice(0, 2) if rank == 0 else slice(2, 3)
        own = slice(rank, rank + 1)
        mine = [x * (rank + 1), n * (rank + 1)]
        expected = [
            *(x, x * 2, 2 * x * x),
            *(x * 1.5, x * 1.5, (x * 1.5)[part]),
            *(summed[0], summed[1], np.int32([6, -11])),
            *(average, average, np.int32([4, -7])),
            *(summed[0], summed[1], summed[0].astype("f8")),
            *(summed[0][part], np.int32([6, -5])[own]),
            *(summed[0][part], summed[1][own], (x * 1.5)[part]),
            *(mine[0], *mine, mine[0], *mine),
        ]
        for found in modes:
            assert len(found) == len(expected)
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one.dtype == other.dtype, place
                assert np.array_equal(one, other), place
        assert [value.tolist() for value in old] == [(3 * x).tolist(), [1.5, 3.0, 6.0]]


@recorded
def sparse_reductions():
    rank = hvd.rank()
    values = tf.constant([[1.0], [2.0], [4.0]]) * (rank + 1)
    slices = tf.IndexedSlices(values, tf.constant([7, rank, 7]), tf.constant([9, 1]))

    def step(values):
        mine = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        ends = [
            hvd.allreduce(mine, device_sparse="/cpu:0"),
            *hvd.grouped_allreduce([values, mine], device_sparse="/cpu:0")[1:],
        ]
        return [(end.values, end.indices) for end in ends]

    for function, given in ((hvd.allreduce, slices), (hvd.grouped_allreduce, [slices])):
        for option in ("prescale_factor", "postscale_factor"):
            with pytest.raises(NotImplementedError, match="slices.values [*] factor"):
                function(given, **{option: 2.0})
    integers = [
        hvd.allreduce(
            tf.IndexedSlices(tf.cast([1, 2 + rank], dtype), tf.constant([0, 1])), op=op
        ).values
        for dtype in (tf.int32, tf.uint8, tf.float16)
        for op in (hvd.Average, hvd.Sum)
    ]
    exact = [[one.dtype.name, one.numpy().tolist()] for one in integers]
    return [both_modes(step, values), exact]


def test_slices_come_with_every_index_once():
    for modes, exact in on_ranks(sparse_reductions, 2):
        for found in modes:
            for values in (found[0], found[2]):
                assert values[:, 0].tolist() == [7.5, 1.0, 2.0]
            assert found[1].tolist() == found[3].tolist() == [7, 0, 1]
        averages, sums = exact[::2], exact[1::2]
        # Of integers a true division, as Horovod's.
        kinds = ["float64", "float32", "float16"]
        assert averages == [[kind, [1.0, 2.5]] for kind in kinds]
        assert sums == [[kind, [2, 5]] for kind in ("int32", "uint8", "float16")]


# ---- rows, one rank's values ----


@recorded
def movements():
    rank, alone = hvd.rank(), own_set()
    rows = tf.reshape(tf.range(2 * (rank + 1)), (-1, 2)) + 10 * rank

    def step(rows):
        with tf.name_scope(f"scope_of_{rank}"):
            scoped = [
                hvd.allgather(rows, name="rows", ignore_name_scope=True),
                hvd.grouped_allgather([rows], name="all", ignore_name_scope=True),
                hvd.broadcast(rows[:1], 1, name="one", ignore_name_scope=True),
                hvd.alltoall(rows, [0, rank + 1], name="a", ignore_name_scope=True),
            ]
        return [
            scoped,
            hvd.alltoall(tf.range(4) + 10 * rank),
            [
                hvd.allgather(rows, process_set=alone),
                hvd.grouped_allgather([rows, rows + 1], process_set=alone),
                hvd.broadcast(rows, rank, process_set=alone),
                hvd.alltoall(rows, splits=[rank + 1], process_set=alone),
            ],
        ]

    return both_modes(step, rows)


def test_rows_go_where_they_belong():
    rows = [np.int32([[0, 1]]), np.int32([[10, 11], [12, 13]])]
    for rank, modes in enumerate(on_ranks(movements, 2)):
        mine, all_rows = rows[rank], np.concatenate(rows)
        received = [np.zeros((0, 2), "i4"), np.int32([0, 0])]
        if rank == 1:
            received = [all_rows, np.int32([1, 2])]
        expected = [
            *(all_rows, all_rows, rows[1][:1], *received),
            np.int32([0, 1, 10, 11]) + 2 * rank,
            *(mine, mine, mine + 1, mine, mine, np.int32([rank + 1])),
        ]
        for found in modes:
            assert [(v.tolist(), v.dtype) for v in found] == [
                (v.tolist(), v.dtype) for v in expected
            ]


# ---- variables and objects ----


@recorded
def variables_and_objects():
    rank, alone = hvd.rank(), own_set()
    own = float(rank + 1)
    of_keras = keras.Variable([own, own], name="of_keras")
    plain = tf.Variable(own, name="plain")
    both = [of_keras, plain]
    kept = tf.Variable(own)
    hvd.broadcast_variables([kept], root_rank=rank, process_set=alone)
    hvd.broadcast_variables(both, 1)
    first = [of_keras.numpy(), plain.numpy(), kept.numpy()]
    plain.assign(own)
    hvd.broadcast_variables([plain], 0, inplace=True)
    second = plain.numpy()
    plain.assign(own)
    values = hvd.broadcast_([of_keras, plain], 1, name="in place")
    hvd.broadcast_([kept], rank, process_set=alone)

    @tf.function
    def inside(root):
        plain.assign(own)
        hvd.broadcast_variables([plain], root)
        return plain.read_value(), hvd.broadcast_([plain], root)[0]

    session = tf.compat.v1.Session(graph=tf.Graph())
    options = {"session": session, "name": "object"}
    objects = [
        hvd.broadcast_object({"rank": rank, "big": np.zeros(1 << 18)}, 1, **options),
        hvd.broadcast_object_fn(1, **options)([rank]),
        hvd.broadcast_object_fn(rank, process_set=alone)([rank]),
        hvd.broadcast_object(rank, rank, process_set=alone),
        hvd.allgather_object((rank,), **options),
        hvd.allgather_object(rank, process_set=alone),
    ]
    objects[0]["big"] = objects[0]["big"].shape[0]
    objects[4] = [list(one) for one in objects[4]]
    ends = [one.numpy() for one in inside(0)] + [one.numpy() for one in values]
    return [first, second, ends, objects]


def test_variables_and_objects_of_one_rank_reach_all():
    for rank, (first, second, ends, objects) in enumerate(
        on_ranks(variables_and_objects, 2)
    ):
        assert [v.tolist() for v in first] == [[2.0, 2.0], 2.0, rank + 1.0]
        assert second == 1.0
        assert [v.tolist() for v in ends] == [1.0, 1.0, [2.0, 2.0], 2.0]
        assert objects == [
            {"rank": 1, "big": 1 << 18},
            *([1], [rank], rank, [[0], [1]], [rank]),
        ]


# ---- start, end, who this process is ----


@recorded
def topology(folder):
    before = hvd.is_initialized()
    first, both = hvd.ProcessSet([1]), hvd.ProcessSet([0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank"):
        hvd.init(process_sets=[both, first, hvd.ProcessSet([5])])
    refused = [first.process_set_id, both.process_set_id]
    refused.append(str(mpi_ops._basics._get_process_set_ids_and_ranks()))
    hvd.init(comm=[0, 1], process_sets=[first, both])
    ids = [first.process_set_id, both.process_set_id]
    rank = hvd.rank()
    asked = [
        *(hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size),
        *(hvd.mpi_enabled, hvd.mpi_built, hvd.gloo_enabled, hvd.gloo_built),
        *(hvd.nccl_built, hvd.ddl_built, hvd.ccl_built, hvd.cuda_built),
        *(hvd.rocm_built, hvd.is_homogeneous),
    ]
    facts = [int(ask()) for ask in asked]
    facts.append(int(hvd.gpu_available("tensorflow", verbose=True)))
    facts.append(int(hvd.check_num_rank_power_of_2(3)))
    facts.append(int(hvd.handle_average_backwards_compatibility(hvd.Max, None)))
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()

    @tf.function
    def numbers():
        number = first.process_set_id
        return [
            *(hvd.rank_op(name="r"), hvd.size_op(name="s")),
            *(hvd.local_rank_op(name="l"), hvd.local_size_op(name="m")),
            hvd.size_op(process_set_id=number),
            hvd.process_set_included_op(process_set_id=number, name="i"),
            hvd.process_set_included_op(process_set_id=99),
        ]

    hvd.start_timeline(f"{folder}/trace", mark_cycles=True)
    sets = [first.size(), first.included(), [one.ranks for one in (first, both)]]
    mean = hvd.allreduce(tf.constant(float(rank)), process_set=(both, first)[rank])
    hvd.stop_timeline()
    found = [before, facts, [int(n) for n in numbers()], sets, float(mean)]
    found.append(hvd.remove_process_set(first))
    ids.append(hvd.add_process_set([1]).process_set_id)
    hvd.shutdown()
    found.append(hvd.is_initialized())
    hvd.init(process_sets=[both])
    return [*found, refused, [*ids, both.process_set_id]]


def test_every_rank_knows_its_place(tmp_path):
    for rank, found in enumerate(on_ranks(topology, 2, str(tmp_path), init=False)):
        before, facts, numbers, sets, mean, removed, after, refused, ids = found
        assert (before, after, removed) == (False, False, True)
        assert facts == [2, rank, 2, 0, 1, *[0, 0, 1, 1], *[0] * 5, 1, 0, 0, 4]
        assert numbers == [rank, 2, rank, 2, 1, rank, -3]
        assert sets == [1, rank == 1, [[1], [0]]]
        # After an init that was refused, 1 and 2; that of a removed set once more.
        assert refused == [None, None, "{0: [0, 1]}"] and ids == [1, 2, 1, 1]
        assert mean == rank
    assert (tmp_path / "trace.d" / "rank-0.jsonl").is_file()


@recorded
def uneven():
    rank = hvd.rank()
    totals = [
        float(hvd.allreduce(tf.constant(1.0 + rank), op=hvd.Sum))
        for _ in range(3 - 2 * rank)
    ]
    return [totals, int(hvd.join())]


def test_join_contributes_zeros_and_names_a_rank_with_all_steps():
    assert on_ranks(uneven, 2) == [[[3.0, 1.0, 1.0], 0], [[3.0], 0]]
