"""The hosts of --nnodes: their places, what they agree on, their connections."""

import contextlib
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.launch.connection import SealedConnection
from tfdist.launch.nodes import place
from tfdist.launch.options import parser

RDZV = ("--rdzv", "host0:29400")


def options(*words, size=4, nodes=2):
    parsed = parser().parse_args(
        ["-np", str(size), "--nnodes", str(nodes), *words, "true"]
    )
    parsed.signal_grace_s = 25.0
    return parsed


# ---- the place ----

PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
# Platforms that set these once for each host.
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("words", "environ", "rank", "where"),
    [
        (("--node-rank", "1", *RDZV), {}, 1, "host0:29400"),
        (("--node-rank", "0", "--rdzv", "[fd00::7]:1"), {}, 0, "[fd00::7]:1"),
        (("--node-rank", "0"), {"TFDIST_RENDEZVOUS": "a:7"}, 0, "a:7"),
        ((), PET, 1, "pod-0:29500"),
        (("--node-rank", "1", *RDZV), PET, 1, "host0:29400"),
        (RDZV, SLURM, 1, "host0:29400"),
        ((), RANK, 1, "h0:23456"),
        (RDZV, {"JOB_COMPLETION_INDEX": "1"}, 1, "host0:29400"),
        (
            (),
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            1,
            "algo-1:29600",
        ),
    ],
)
def test_the_place_is_that_of_the_options_or_of_a_launcher(words, environ, rank, where):
    found = place.node_place(options(*words), environ)
    assert (found.rank, found.count, found.where) == (rank, 2, where)


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (RDZV, {}, "--node-rank is missing: pass 0 on the first host"),
        (("--node-rank", "1"), {}, "--rdzv HOST:PORT is missing"),
        (
            ("--node-rank", "1", "--rdzv", "host0"),
            {},
            "--rdzv='host0' is not host:port",
        ),
        (("--node-rank", "2", *RDZV), {}, "--node-rank is 2, but with --nnodes 2"),
        (RDZV, {"JOB_COMPLETION_INDEX": "7"}, "JOB_COMPLETION_INDEX is 7, but"),
        (("--node-rank", "0"), PET, "--node-rank 0 contradicts PET_NODE_RANK=1"),
        (RDZV, {**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, "describe 4 processes"),
        (("-H", "a:2"), {}, "-H and --nnodes exclude each other"),
        (("--ssh-command", "ssh"), {}, "--ssh-command and --nnodes exclude"),
        (("--node-rank", "0", "--rdzv", "[::]:1"), {}, "means all network interfaces"),
        (("--node-rank", "0", "--rdzv", "a..b:1"), {}, "is not the name of a host"),
    ],
)
def test_what_is_missing_or_contradicts_is_told(words, environ, says):
    with pytest.raises(RendezvousError) as caught:
        place.node_place(options(*words), environ)
    assert says in caught.value.message


def test_ranks_are_divided_equally():
    with pytest.raises(RendezvousError, match="-np 5 is the number of ranks on all"):
        place.node_place(options(*RDZV, "--node-rank", "0", size=5), {})


def test_one_host_needs_neither_number_nor_address():
    assert place.node_place(options(nodes=1), {}) is None
    with pytest.raises(RendezvousError, match="it must be from 0 to 0"):
        place.node_place(options("--node-rank", "1", nodes=1), {})


def test_numbers_of_hosts_are_kept_from_the_ranks_but_not_descriptions():
    kept = {"TFDIST_SECRET_FILE": "f", "TFDIST_LOG_DIR": "d", "HOME": "/"}
    assert place.variables_to_remove({**kept, **SLURM}) == sorted(SLURM)
    assert place.variables_to_remove({**kept, **RANK}) == sorted(RANK)
    assert place.variables_to_remove({**kept, **PET}) == []


# ---- what all agree on ----


def test_the_same_options_agree_and_others_are_named():
    first = place.node_place(options("--node-rank", "0", *RDZV), {})
    second = place.node_place(options("--node-rank", "1", *RDZV), {})
    own = place.claims(options("--node-rank", "0", *RDZV), first, "a")
    same = options("--node-rank", "1", *RDZV, "--log-dir", "elsewhere")
    assert place.differences(own, place.claims(same, second, "b"), "there") == ""
    other = options("--node-rank", "1", *RDZV, "--min-np", "2", size=8)
    told = place.differences(own, place.claims(other, second, "b"), "on node 1")
    assert told == (
        "-np 8 on node 1, 4 on the first host; --min-np 2 on node 1, not given on the "
        "first host"
    )
    assert "version" in place.differences(own, {**own, "version": "0"}, "there")


def test_each_job_has_its_own_secret():
    one = place.job_secret(b"s" * 32, "tfdistrun:1")
    assert len(one) == auth.SECRET_BYTES
    assert one == place.job_secret(b"s" * 32, "tfdistrun:1")
    assert one != place.job_secret(b"s" * 32, "tfdistrun:2")
    assert one != place.job_secret(b"t" * 32, "tfdistrun:1")


# ---- the connection ----


@pytest.fixture
def pair():
    """The two ends of a TCP connection, and the socket of the first one."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
        keys = b"k" * 32, b"l" * 32
        left = SealedConnection(one, auth.Sealer(keys[0]), auth.Sealer(keys[1]))
        right = SealedConnection(two, auth.Sealer(keys[1]), auth.Sealer(keys[0]))
        yield left, right, one
        for end in (left, right):
            end.close()


def received(connection, count):
    """So many bytes from a connection, or fewer at its end."""
    data, ends_s = b"", time.monotonic() + 10.0
    while len(data) < count and time.monotonic() < ends_s:
        try:
            part = connection.receive()
        except BlockingIOError:
            select.select([connection.reading], [], [], 1.0)
            continue
        if not part:
            break
        data += part
    return data


def test_everything_arrives_in_order_in_both_directions(pair):
    left, right, _ = pair
    data = bytes(range(256)) * 30000  # longer than one message, and than the buffers
    left.send(b"first")
    left.send(data)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(received, right, 5 + len(data))
        ends_s = time.monotonic() + 10.0
        while left.waiting and time.monotonic() < ends_s:
            left.flush()
        assert reading.result() == b"first" + data
    right.send(b"back")
    right.flush()
    assert received(left, 4) == b"back"
    with pytest.raises(BlockingIOError):
        left.receive()


def test_a_part_of_a_message_is_not_its_end(pair):
    left, right, sock = pair
    left.send(b"whole")
    sealed, left.waiting = bytes(left.waiting), bytearray()
    sock.send(sealed[:20])
    select.select([right.reading], [], [], 5.0)
    with pytest.raises(BlockingIOError):
        right.receive()
    sock.send(sealed[20:])
    assert received(right, 5) == b"whole"


@pytest.mark.parametrize(
    "forge",
    [
        lambda first, second: first[:-1] + bytes([first[-1] ^ 1]),
        lambda first, second: second + first,
        lambda first, second: first + first,
        lambda first, second: b"\xff\xff\xff\xff" + first,
        lambda first, second: b"\0\0\0\0" + first,
    ],
    ids=["changed", "reordered", "repeated", "too long", "without a MAC"],
)
def test_changes_on_the_way_break_the_connection(pair, forge):
    left, right, sock = pair
    sealed = []
    for data in (b"one", b"two"):
        left.send(data)
        sealed.append(bytes(left.waiting))
        left.waiting.clear()
    sock.send(forge(*sealed))
    with pytest.raises(ConnectionError):
        received(right, 7)


def test_what_was_sent_before_the_end_still_arrives(pair):
    left, right, _ = pair
    left.send(b"last words")
    left.kill()
    assert received(right, 100) == b"last words"


def test_what_was_not_read_does_not_discard_what_was_sent(pair):
    """As when an agent ends while tfdistrun sends signs of life."""
    left, right, _ = pair
    right.send(b"sign of life")
    right.flush()
    data = b"output" * 1_000_000
    left.send(data)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(left.finish, 10.0)
        assert received(right, len(data) + 1) == data
        right.kill()
        ending.result()
