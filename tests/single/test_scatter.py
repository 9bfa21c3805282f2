"""Who reads for whom; elements as bytes and back; frames that carry them."""

import asyncio
import collections
import itertools
import pathlib
import socket
import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers.deadline import deadline
from helpers.pages import run_page
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.core.rendezvous.auth import AuthenticationError, new_secret
from tfdist.core.rendezvous.channel import Channel, ChannelClosed
from tfdist.core.rendezvous.stream import Stream
from tfdist.data import _element_codec, _scatter_server
from tfdist.data._reader_assignment import reader_of

# ---- who reads ----


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.data())
def test_readers_are_as_many_as_asked_for_and_their_groups_even(hosts, data):
    names = sorted(set(hosts), key=hosts.index)  # hosts are numbered by first rank
    host_of = [names.index(host) for host in hosts]
    readers = data.draw(st.integers(1, len(host_of)))
    found = reader_of(host_of, readers)
    chosen = sorted(set(found))
    assert len(chosen) == readers
    assert all(found[reader] == reader for reader in chosen)
    sizes = collections.Counter(found)
    if len(names) == 1:
        assert max(sizes.values()) - min(sizes.values()) <= 1
    if readers >= len(names):  # nobody is read for from another host
        assert [host_of[reader] for reader in found] == host_of
    else:  # and no host has two readers
        assert len({host_of[reader] for reader in chosen}) == readers
        for host in names:
            ranks = [r for r in range(len(hosts)) if hosts[r] == host]
            assert len({found[r] for r in ranks}) == 1


def test_one_reader_a_host_is_the_first_rank_of_each():
    assert reader_of([0, 0, 0, 1, 1, 1], 2) == [0, 0, 0, 3, 3, 3]
    assert reader_of([0, 1, 0, 1], 2) == [0, 1, 0, 1]  # dealt out to the hosts in turn
    assert reader_of([0, 0, 0, 0, 0], 2) == [0, 0, 0, 3, 3]


# ---- iterators that wait ----


def test_a_reader_keeps_the_newest_iterators_that_wait_and_says_so():
    share = _scatter_server.Share(tf.data.Dataset.range(3))
    most = _scatter_server._MAX_UNREAD
    last = most + 1  # so that one more waits than is kept
    assert [int(one) for one in share.iterator(last)] == [0, 1, 2]
    with pytest.raises(ValueError, match=f"the newest {most} .* create a new it"):
        share.iterator(0)
    for number in range(1, last):
        assert [int(one) for one in share.iterator(number)] == [0, 1, 2]
    # In the order in which they are made there is no limit.
    for number in range(last + 1, last + 100):
        share.iterator(number)
    with pytest.raises(ValueError, match="create an iterator only when you read"):
        share.iterator(last + 101 + _scatter_server._MAX_SKIPPED)
    words = f"newest {most}"
    assert words in " ".join(tfdist.data.scatter.__doc__.split())
    page = pathlib.Path(__file__).parents[2] / "docs" / "scatter.md"
    assert words in page.read_text()


# ---- structure ----


def test_a_spec_comes_back_as_it_was():
    spec = {
        "b": (tf.TensorSpec([None, 3], tf.bfloat16), tf.TensorSpec([], tf.string)),
        "a": collections.OrderedDict(z=tf.TensorSpec(None, tf.int8), y=()),
    }
    found = _element_codec.restore(_element_codec.describe(spec))
    assert found == spec and list(found) == ["b", "a"]
    assert type(found["a"]) is collections.OrderedDict
    single = tf.TensorSpec([4], tf.bool)
    assert _element_codec.restore(_element_codec.describe(single)) == single


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"a": (tf.RaggedTensorSpec([None, None]),)}, r"element\['a'\]\[0\]"),
        (tf.SparseTensorSpec([2, 2]), "tf.sparse.to_dense"),
        (Pair(tf.TensorSpec([]), tf.TensorSpec([])), "named tuple"),
        ({"q": tf.TensorSpec([], tf.qint8)}, "a tensor of qint8"),
        ({("a", 1): tf.TensorSpec([])}, "keys of type str"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(spec, words):
    with pytest.raises(TypeError, match=words):
        _element_codec.describe(spec)


# ---- bytes ----

DTYPES = [
    tf.as_dtype(name)
    for name in "float16 bfloat16 float64 complex64 bool int8 uint16 int64".split()
]


def element(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype == tf.string:
        size = int(np.prod(shape))
        texts = [rng.bytes(int(rng.integers(0, 6000))) for _ in range(size)]
        array = np.empty(size, object)
        array[:] = texts
        return array.reshape(shape) if shape else texts[0]
    return (rng.integers(0, 2, shape) * 3).astype(dtype.as_numpy_dtype)


def over_the_wire(elements, dtypes):
    description, parts = _element_codec.encode(elements)
    room = _element_codec.room_for(description, len(dtypes))
    sent = b"".join(parts)
    assert len(sent) == len(room)
    memoryview(room)[:] = sent
    return _element_codec.decode(description, room, dtypes)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sampled_from([*DTYPES, tf.string]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_blocks_come_back_bit_for_bit_and_aligned(columns, count):
    dtypes = [dtype for _, dtype in columns]
    sent = [
        [element(shape, dtype, seed) for shape, dtype in columns]
        for seed in range(count)
    ]
    found = over_the_wire(sent, dtypes)
    for number, one in enumerate(sent):
        for part, column, dtype in zip(one, found, dtypes, strict=True):
            assert column.dtype == np.dtype(dtype.as_numpy_dtype)
            assert column.shape[1:] == np.shape(part)
            np.testing.assert_array_equal(column[number], part)
            if dtype != tf.string and column.size:
                assert column.ctypes.data % _element_codec.ALIGNMENT == 0


SENT = [[np.arange(3), [b"ab", b"c"]], [np.arange(3), [b"", b"def"]]]


def changed(**fields):
    elements = [[x, np.array(texts, object)] for x, texts in SENT]
    description, parts = _element_codec.encode(elements)
    return {**description, **fields}, b"".join(parts)


@pytest.mark.parametrize(
    "fields",
    [
        {"elements": 0},
        {"elements": 3},
        {"elements": -2},
        {"elements": True},
        {"elements": 1 << 40},
        {"elements": None},
        {"shapes": [[3]]},
        {"shapes": [[3], [-2]]},
        {"shapes": [[4], [2]]},
        {"shapes": [[3], [1 << 62]]},
        {"shapes": [[3], 2]},
        {"shapes": None},
        {"bytes": [48]},
        {"bytes": [48, 1 << 60]},
        {"bytes": [48, -1]},
        {"bytes": [48.0, 38]},
        {"bytes": [47, 38]},
        {"bytes": [48, 37]},
        {"bytes": [48, 39]},
        {"bytes": None},
    ],
)
def test_a_description_that_does_not_fit_is_refused(fields):
    description, sent = changed(**fields)
    with pytest.raises(ValueError, match="Expected"):
        room = _element_codec.room_for(description, 2)
        memoryview(room)[: len(sent)] = sent[: len(room)]
        _element_codec.decode(description, room, [tf.int64, tf.string])


@pytest.mark.parametrize("lengths", [[2, 1, 0, 4], [-1, 4, 0, 3], [1 << 62] * 4])
def test_lengths_of_strings_that_do_not_fit_are_refused(lengths):
    description, sent = changed()
    room = _element_codec.room_for(description, 2)
    memoryview(room)[:] = sent
    start = 64 if description["bytes"][0] == 48 else 0
    room[start : start + 32] = np.array(lengths, "<i8").view(np.uint8)
    with pytest.raises(ValueError, match="of other data"):
        _element_codec.decode(description, room, [tf.int64, tf.string])


# ---- frames ----


def connected(family):
    """Two streams after a handshake."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(
        "\0tfdist-test-scatter" if family == socket.AF_UNIX else ("127.0.0.1", 0)
    )
    listener.listen()
    client = socket.socket(family, socket.SOCK_STREAM)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    secret = new_secret()
    one, other = Channel(client), Channel(server)

    async def meet():
        async def serve():
            await other.handshake_as_server(secret)
            await other.accept()

        await asyncio.gather(one.handshake_as_client(secret, {}), serve())

    asyncio.run(meet())
    return [Stream(one, send_timeout_s=5.0), Stream(other, send_timeout_s=5.0)]


FAMILIES = [socket.AF_UNIX, socket.AF_INET]


@deadline(30)
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_and_megabytes_arrive_in_order(family):
    one, other = connected(family)
    parts = [memoryview(bytes([n % 256]) * (n * 37)) for n in range(1500)]
    sending = threading.Thread(
        target=lambda: [one.send({"n": n}, parts) for n in range(2)]
    )
    sending.start()
    for number in range(2):
        assert other.receive() == {"n": number}
        room = memoryview(bytearray(sum(map(len, parts))))
        other.receive_data(room)
        assert room == b"".join(parts)
    sending.join()
    other.send({"taken": 1})
    assert one.has_input(5.0) and one.receive() == {"taken": 1}
    assert not one.has_input(0.0)
    other.close()
    assert one.has_input(5.0)
    with pytest.raises(ChannelClosed):
        one.receive()
    one.close()


@deadline(30)
@pytest.mark.parametrize("place", [0, 3, 4, 40, 60, 160, 250])
def test_over_tcp_a_bit_that_is_changed_anywhere_is_noticed(place):
    one, other = connected(socket.AF_INET)
    data = [memoryview(bytes(200))]
    frames = []
    one._write = lambda parts: frames.append(bytearray(b"".join(parts)))
    one.send({"bytes": [200]}, data)
    (frame,) = frames
    frame[place] ^= 1
    one._sock.sendall(frame)
    one._sock.shutdown(socket.SHUT_WR)
    with pytest.raises((AuthenticationError, ChannelClosed)):
        other.receive()
        other.receive_data(memoryview(bytearray(200)))
    one.close()
    other.close()


@deadline(30)
def test_a_thread_that_waits_wakes_up_when_one_hangs_up():
    one, other = connected(socket.AF_UNIX)
    threading.Timer(0.1, one.hang_up).start()
    with pytest.raises(ChannelClosed):
        one.receive()
    one.close()
    other.close()


# ---- one rank ----


def test_alone_the_dataset_is_that_of_the_function():
    tfdist.init()
    whole = tf.data.Dataset.range(4)
    assert tfdist.data.scatter(lambda rank: whole) is whole
    dealt = tfdist.data.scatter(whole)
    assert list(dealt.as_numpy_iterator()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="readers to be from 1 to 1"):
        tfdist.data.scatter(whole, readers=2)
    with pytest.raises(ValueError, match="shuffled before tfdist.data.scatter"):
        tfdist.data.scatter(whole.shuffle(2))
    with pytest.raises(TypeError, match="accepts a rank"):
        tfdist.data.scatter(itertools.count())


def test_the_lines_of_the_page_run():
    names = run_page("scatter.md")
    assert [len(batch) for batch in names["train"]] == [32] * 31 + [8]
    assert sorted(names["mine"].as_numpy_iterator()) == list(range(10))
    tfdist.shutdown()
