"""broadcast_object and allgather_object of any object, where all ranks ask for it."""

import functools
import os

import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks
from helpers.unplain import Bomb, NotOn, Point, ran

import tfdist
from tfdist import collectives
from tfdist.collectives import objects
from tfdist.core import pickling

PICKLE = {"TFDIST_OBJECTS": "pickle"}


def caught(call):
    """What it raises: class, text, blamed rank."""
    try:
        result = call()
    except Exception as error:
        record = getattr(error, "record", None)
        return [type(error).__name__, str(error), record and record.rank]
    return ["", repr(result), None]


def share():
    rank, size = tfdist.rank(), tfdist.size()
    own = {"point": Point(rank), "set": {rank, "a"}, "big": 1 << 100, "plain": [rank]}
    gathered = tfdist.allgather_object(own)
    for other, found in enumerate(gathered):
        assert found == {**own, "point": Point(other), "set": {other, "a"}} | {
            "plain": [other]
        }
    for root in range(size):
        sent = tfdist.broadcast_object(Point(root) if rank == root else None, root)
        assert sent == Point(root)
    # One of an object and of plain data.
    mixed = tfdist.allgather_object(Point(5) if rank == 0 else rank, name="mixed")
    assert mixed == [Point(5), *range(1, size)]
    if size > 1:
        pair = tfdist.add_process_set([0, size - 1])
        if pair.included():
            own = tfdist.allgather_object(Point(rank), process_set=pair)
            assert own == [Point(0), Point(size - 1)]
    # The number under a mask is none: it stays behind.
    masked = tfdist.broadcast_object(np.ma.array([1, 2, 3], mask=[0, 1, 0]))
    assert masked.tolist() == [1, None, 3]
    tfdist.barrier()
    # Plain data travel as without the variable.
    before, pickling.seal = pickling.seal, None
    try:
        array = tfdist.broadcast_object({"a": np.arange(3), "b": (1, None)})
        assert array["a"].tolist() == [0, 1, 2]
    finally:
        pickling.seal = before
    return True


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_any_object_reaches_all_ranks(size):
    assert run_ranks(share, size, env=PICKLE) == [True] * size


def refusals():
    rank = tfdist.rank()
    bad = Point(1) if rank == 0 else 5
    os.environ["TFDIST_OBJECTS"] = "pickle"  # too late
    try:
        found = [
            caught(lambda: tfdist.broadcast_object(bad)),
            caught(lambda: tfdist.allgather_object(bad)),
        ]
    finally:
        del os.environ["TFDIST_OBJECTS"]
    return [found, tfdist.allgather_object(rank)]


def test_without_the_variable_an_object_is_refused_by_an_error_that_names_it():
    for rank, (found, later) in enumerate(run_ranks(refusals, 2)):
        for kind, text, culprit in found:
            assert kind == ("TypeError" if rank == 0 else "RankFailedError")
            assert "Point" in text
            assert "set TFDIST_OBJECTS=pickle for all ranks" in text
            assert culprit == (None if rank == 0 else 0)
        assert later == [0, 1]


def one_rank_asks():
    if os.environ["TFDIST_RANK"] == "1":
        os.environ["TFDIST_OBJECTS"] = "pickle"
    try:
        return caught(lambda: tfdist.init(timeout_s=20))
    finally:
        os.environ.pop("TFDIST_OBJECTS", None)


def test_one_rank_alone_cannot_ask_for_it():
    for kind, text, _ in run_ranks(one_rank_asks, 2, init=False):
        assert kind == "MismatchError"
        assert "TFDIST_OBJECTS: plain on rank 0; pickle on rank 1" in text


def tampered():
    """Rank 1 gets other bytes from rank 0 than those that were sent."""
    ran.clear()
    plain = collectives.allgather

    def changed(words, **options):
        found = plain(words, **options).numpy()
        if tfdist.rank() == 1 and found[1] == objects._PICKLED:
            last = objects._HEADER_WORDS + -(-found[2] // 4) - 1
            found[last] ^= 1
        return tf.constant(found)

    objects.collectives.allgather = changed
    try:
        result = caught(lambda: tfdist.broadcast_object(Bomb()))
    finally:
        objects.collectives.allgather = plain
    return [result, list(ran)]


def test_bytes_that_were_changed_are_not_unpickled_and_all_ranks_say_so():
    there, here = run_ranks(tampered, 2, env=PICKLE)
    assert here[1] == []
    assert here[0][0] == "ValueError"
    assert "Nothing was unpickled" in here[0][1]
    text = f"rank 1 could not load an object: {here[0][1]}"
    assert there == [["RankFailedError", text, 1], ["boom"]]


def test_a_job_that_did_not_ask_for_it_unpickles_nothing():
    data = pickling.seal(Bomb(), "rank 0: call", pickling.key(), max_bytes=1000)
    ran.clear()
    with pytest.raises(ValueError, match="not started with TFDIST_OBJECTS=pickle"):
        objects._object_of(0, objects._PICKLED, data, "call", 1000)
    assert ran == []


def not_loaded():
    found = caught(lambda: tfdist.broadcast_object(NotOn(1)))
    unpicklable = (x for x in [1]) if tfdist.rank() == 1 else 3
    return [
        found,
        caught(lambda: tfdist.allgather_object(unpicklable)),
        caught(lambda: tfdist.allgather_object(Point("x" * 99), max_bytes=99)),
        tfdist.allgather_object(tfdist.rank()),
    ]


def test_what_one_rank_cannot_load_or_send_is_an_error_on_all_ranks():
    there, here = run_ranks(not_loaded, 2, env=PICKLE)
    cause = (
        "The object of rank 0 was not loaded: ModuleNotFoundError: No module named "
        "'theirs'"
    )
    assert here[0] == ["ValueError", cause, None]
    assert there[0] == [
        "RankFailedError",
        f"rank 1 could not load an object: {cause}",
        1,
    ]
    assert here[1][0] == "TypeError"
    assert "got builtins.generator: cannot pickle" in here[1][1]
    assert there[1][0] == "RankFailedError"
    assert there[1][2] == 1
    assert there[2][0] == here[2][0] == "ValueError"
    assert "at most 99 bytes" in here[2][1]
    assert there[3] == here[3] == [0, 1]  # the world goes on


def failing(error):
    def fail(*args, **options):
        raise error

    return fail


def all_that_fails():
    """Whatever goes wrong on rank 0: pickling, making bytes, and the way back."""
    rank = tfdist.rank()
    found = []
    for module, name, error, own in (
        (pickling, "seal", AttributeError("no attribute 'dumps'"), Point(rank)),
        (objects, "encode", MemoryError(), rank),
        (objects, "decode", MemoryError(), Point(1) if rank == 1 else 0),
    ):
        before = getattr(module, name)
        if rank == 0:
            setattr(module, name, failing(error))
        try:
            call = functools.partial(tfdist.allgather_object, own, timeout_s=20)
            found.append(caught(call))
        finally:
            setattr(module, name, before)
    return [found, tfdist.allgather_object(rank)]


def test_whatever_fails_on_one_rank_nobody_waits():
    (here, later), (there, _) = run_ranks(all_that_fails, 2, env=PICKLE)
    causes = [
        ("AttributeError", "no attribute 'dumps'", "send its object"),
        ("MemoryError", "", "send its object"),
        ("MemoryError", "", "load an object"),
    ]
    assert here == [[kind, text, None] for kind, text, _ in causes]
    assert there == [
        ["RankFailedError", f"rank 0 could not {what}: {text or kind}", 0]
        for kind, text, what in causes
    ]
    assert later == [0, 1]


def over_tcp_with_a_rank_that_has_joined():
    if tfdist.rank() == 1:
        tfdist.join()
        return True
    found = tfdist.allgather_object(Point(tfdist.rank()))
    tfdist.join()
    return found == [Point(0), None, Point(2)]


def test_objects_over_tcp_with_a_rank_that_has_joined():
    env = {**PICKLE, "TFDIST_TRANSPORT": "tcp"}
    assert run_ranks(over_tcp_with_a_rank_that_has_joined, 3, env=env) == [True] * 3


def by_the_names_of_horovod():
    import tfdist.horovod.tensorflow as hvd

    rank = hvd.rank()
    calls = [
        lambda: hvd.broadcast_object(Point(7) if rank == 0 else None, root_rank=0).x,
        lambda: [point.x for point in hvd.allgather_object(Point(rank))],
        lambda: hvd.broadcast_object_fn(root_rank=1)(Point(rank)).x,
    ]
    return [caught(call) for call in calls]


def test_scripts_of_horovod_send_any_object_with_the_variable():
    for found in run_ranks(by_the_names_of_horovod, 2, env=PICKLE):
        assert [text for _, text, _ in found] == ["7", "[0, 1]", "1"]
    for found in run_ranks(by_the_names_of_horovod, 2):
        for kind, text, _ in found:
            assert kind in ("TypeError", "RankFailedError")
            assert "set TFDIST_OBJECTS=pickle for all ranks" in text
