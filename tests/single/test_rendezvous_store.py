"""The store: operations, authentication, and strangers at its port."""

import asyncio
import inspect
import socket
import time
import types
from contextlib import asynccontextmanager

import pytest
from helpers.deadline import deadline
from helpers.ports import free_ports

from tfdist import __version__
from tfdist.core.rendezvous import address, auth, channel, listener
from tfdist.core.rendezvous.address import (
    bind,
    is_loopback,
    join_address,
    split_address,
)
from tfdist.core.rendezvous.auth import AuthenticationError, Sealer
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.store import (
    SESSION,
    Membership,
    MissingKeysError,
    StoreClient,
    StoreServer,
    StoreThread,
    failure_key,
)

SECRET = bytes(range(32))
OTHER_SECRET = bytes(32)
CLAIMS = {"purpose": "store", "job": "", "generation": 0}


@asynccontextmanager
async def serving(**more):
    server = StoreServer(bind("127.0.0.1", 0), SECRET, **more)
    server.start()
    try:
        yield server
    finally:
        await server.close()


async def client_of(server, secret=SECRET, timeout_s=5.0, **more):
    return await StoreClient.connect(
        server.address, secret, deadline=time.monotonic() + timeout_s, **more
    )


async def connections(server, count):
    """That say nothing."""
    return [await asyncio.open_connection(*server.address) for _ in range(count)]


def run(test):
    """Runs an async test on a loop of its own."""

    def wrapped(**fixtures):
        asyncio.run(test(**fixtures))

    wrapped.__signature__ = inspect.signature(test)
    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


# ---- operations ----


@deadline(20)
@run
async def test_a_key_that_is_set_again_has_its_new_value_for_all():
    async with serving() as server:
        one, two = await client_of(server), await client_of(server)
        for value in (1, 2):
            await one.set("a", value)
            for client in (one, two):
                assert await client.wait(["a"], 5.0) == [value]
        one.close()
        two.close()


@deadline(20)
@run
async def test_set_wait_and_add():
    async with serving() as server:
        one, two = await client_of(server), await client_of(server)
        await one.set("a", {"x": [1, 2.5, None, "é"]})
        assert await two.wait(["a"], 1.0) == [{"x": [1, 2.5, None, "é"]}]
        assert await one.add("n") == 1
        assert await two.add("n", 4) == 5
        waiting = asyncio.create_task(two.wait(["a", "later"], 5.0))
        await one.set("later", 7)
        assert (await waiting)[1] == 7
        one.close()
        two.close()


@deadline(20)
@run
async def test_wait_ends_at_its_deadline_and_names_the_missing_keys():
    async with serving() as server:
        client = await client_of(server)
        keys = [f"k{i}" for i in range(100)]  # more than one request holds
        for key in keys[:99]:
            await client.set(key, 0)
        before = time.monotonic()
        with pytest.raises(MissingKeysError) as caught:
            await client.wait(keys, 0.2)
        assert caught.value.keys == ["k99"]
        assert 0.2 <= time.monotonic() - before < 1.5
        client.close()


@deadline(20)
@run
async def test_a_client_that_ends_while_it_waits_leaves_nothing():
    """A rank of an elastic job waits in each generation for news that may not come."""
    async with serving() as server:
        for _ in range(3):
            client = await client_of(server)
            waiting = asyncio.create_task(client.wait(["a"], 60.0))
            while not server._waiting:
                await asyncio.sleep(0.01)
            client.close()
            waiting.cancel()
            while server._listener.open_connections or server._waiting:
                await asyncio.sleep(0.01)


@deadline(20)
@run
async def test_removed_keys_are_not_set():
    async with serving() as server:
        client = await client_of(server)
        for key in ("1/a", "1/b", "11/a", "c"):
            await client.set(key, key)
        assert await client.wait(["1/a", "11/a"], 1.0) == ["1/a", "11/a"]
        server.remove_prefix("1/")
        server.remove("c")
        server.remove("never set")
        assert [key for key in server.values if key != SESSION] == ["11/a"]
        assert not server._answers
        with pytest.raises(MissingKeysError):
            await client.wait(["1/a", "11/a"], 0.05)
        client.close()


@deadline(20)
@run
async def test_a_late_answer_is_not_taken_for_that_to_another_request(monkeypatch):
    """As from a tfdistrun that was stopped for a while."""
    goes_on = asyncio.Event()
    answer = StoreServer._answer

    async def late(self, request, channel):
        await goes_on.wait()
        return await answer(self, request, channel)

    monkeypatch.setattr(StoreServer, "_answer", late)
    async with serving() as server:
        client = await client_of(server)
        with pytest.raises(RendezvousError, match="no answer within 0.1 s"):
            await client.set("a", 1, timeout_s=0.1)
        goes_on.set()
        with pytest.raises(RendezvousError, match="lost the rendezvous store"):
            await client.add("n", timeout_s=5.0)
        client.close()


@deadline(20)
@run
async def test_a_member_that_dies_is_the_failure_that_others_are_told():
    async with serving() as server:
        members = [
            await Membership.join(
                server.address,
                SECRET,
                member={"rank": rank, "host": "h", "pid": 40 + rank},
                generation=3,
                deadline=time.monotonic() + 5,
            )
            for rank in range(2)
        ]
        watching = asyncio.create_task(members[0].first_failure())
        members[1].close()
        failed = await asyncio.wait_for(watching, 2.0)
        assert (failed["rank"], failed["pid"]) == (1, 41)
        await members[0].leave()


@deadline(20)
@run
async def test_a_member_that_leaves_is_no_failure():
    async with serving() as server:
        member = await Membership.join(
            server.address,
            SECRET,
            member={"rank": 0, "host": "h", "pid": 1},
            generation=1,
            deadline=time.monotonic() + 5,
        )
        await member.leave()
        await server.close(drain_s=2.0)
        assert failure_key(1) not in server.values


@deadline(20)
@run
async def test_no_server_is_an_error_at_the_deadline():
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()[:2]
    sock.close()
    before = time.monotonic()
    with pytest.raises(RendezvousError, match="no rendezvous at 127.0.0.1") as caught:
        await StoreClient.connect(address, SECRET, deadline=before + 0.3)
    assert time.monotonic() - before < 2.0
    assert caught.value.payload["kind"] == "timeout"


@deadline(20)
@run
async def test_a_server_that_never_answers_is_an_error_at_the_deadline(monkeypatch):
    async def silent(*arguments):
        await asyncio.Event().wait()

    monkeypatch.setattr(channel, "_try_to_connect", silent)
    before = time.monotonic()
    connecting = StoreClient.connect(("127.0.0.1", 1), SECRET, deadline=before + 0.2)
    with pytest.raises(RendezvousError, match="no rendezvous at 127.0.0.1:1 within"):
        await asyncio.wait_for(connecting, 10.0)
    assert time.monotonic() - before >= 0.2


@deadline(20)
@run
async def test_a_name_that_is_not_known_yet_is_asked_for_again(monkeypatch):
    loop = asyncio.get_running_loop()
    known = loop.getaddrinfo
    asked = []

    async def learning(host, port, **options):
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await known("127.0.0.1", port, **options)

    async with serving() as server:
        monkeypatch.setattr(loop, "getaddrinfo", learning)
        address = ("rank-0.train", server.address[1])
        deadline_s = time.monotonic() + 5
        client = await StoreClient.connect(address, SECRET, deadline=deadline_s)
        client.close()
    assert asked == ["rank-0.train"] * 4


@deadline(20)
def test_the_thread_of_the_launcher_serves_and_stops():
    thread = StoreThread(SECRET)
    thread.start()
    address = split_address(thread.address)

    async def talk():
        client = await StoreClient.connect(
            address, SECRET, deadline=time.monotonic() + 5
        )
        await client.set("report/1", 3)
        client.close()

    asyncio.run(talk())
    assert thread.values("report/") == {"report/1": 3}
    thread.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=2.0)


# ---- who may enter ----


@deadline(20)
@run
async def test_a_wrong_secret_is_refused_on_both_sides():
    async with serving() as server:
        with pytest.raises(RendezvousError, match="does not know the secret"):
            await client_of(server, OTHER_SECRET)
        client = await client_of(server)  # and the server goes on
        await client.set("a", 1)
        client.close()


@deadline(20)
@run
async def test_a_client_without_the_secret_gets_nothing_done():
    """A client that skips the server's proof must fail at its own."""
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        before = dict(server.values)
        writer.write(auth.hello("0.1.0", auth.new_nonce(), CLAIMS))
        answer = await asyncio.wait_for(reader.readexactly(auth.ANSWER_BYTES), 3.0)
        # Reflecting the server's own proof must not help either.
        writer.write(answer[-auth.MAC_BYTES :])
        assert await asyncio.wait_for(reader.read(), 3.0) == b""
        writer.close()
        assert server.values == before


@deadline(20)
@run
async def test_a_rank_of_another_job_or_an_older_generation_is_told_so():
    async with serving(job="slurm 7.0") as server:
        with pytest.raises(RendezvousError) as caught:
            await client_of(server, job="slurm 8.0")
        assert "job 'slurm 7.0' here, 'slurm 8.0' at the side that connects" in str(
            caught.value
        )
        new = await join(server, generation=2, job="slurm 7.0")
        with pytest.raises(RendezvousError) as caught:
            await join(server, generation=1, job="slurm 7.0")
        assert "generation 2 here, 1 at the side that connects" in str(caught.value)
        again = await join(server, generation=2, job="slurm 7.0")
        await new.leave()
        await again.leave()


@deadline(20)
@run
async def test_claims_that_no_client_makes_are_refused():
    async with serving() as server:
        for claims in (
            {},
            {**CLAIMS, "purpose": "x"},
            {**CLAIMS, "generation": "1"},
            {**CLAIMS, "generation": True},
            {**CLAIMS, "job": None},
        ):
            with pytest.raises(auth.RefusedError):
                await channel_of(server, claims)


@deadline(20)
@run
async def test_a_recorded_conversation_cannot_be_replayed():
    async with serving() as server:
        recorded = await record(server, lambda client: client.add("n"))
        before = dict(server.values)
        assert before["n"] == 1
        for cut in range(1, len(recorded) + 1):
            reader, writer = await asyncio.open_connection(*server.address)
            for frame in recorded[:cut]:
                writer.write(frame)
            writer.write_eof()
            await read_to_end(reader, 3.0)
            writer.close()
        assert server.values == before


@deadline(20)
@run
async def test_a_changed_repeated_or_reordered_message_is_refused():
    key = auth.new_nonce()
    sealer = Sealer(key)
    first, second = sealer.seal(b'{"a":1}'), sealer.seal(b'{"a":2}')
    assert Sealer(key).open(first) == b'{"a":1}'
    for stream in (
        [second],
        [first, first],
        [first[:-1] + b"]"],
        [bytes([first[0] ^ 1]) + first[1:]],
        [first[:31]],
        [b""],
    ):
        opener = Sealer(key)
        with pytest.raises(AuthenticationError):
            for message in stream:
                opener.open(message)


def test_every_byte_of_the_handshake_counts():
    hello = auth.hello("0.1.0", bytes(32), CLAIMS)
    answer = auth.preamble("0.1.0") + bytes(32)
    good = auth.Session.derive(SECRET, hello, answer)
    assert good == auth.Session.derive(SECRET, hello, answer)
    keys = {
        *(good.client_proof, good.server_proof, good.client_key, good.server_key),
        *(good.link_key[:32], good.link_key[32:]),
    }
    assert len(keys) == 6  # else something could be reflected, or used twice
    others = [(OTHER_SECRET, hello, answer), (SECRET, hello + answer[:1], answer[1:])]
    for at in range(len(hello)):
        changed = hello[:at] + bytes([hello[at] ^ 1]) + hello[at + 1 :]
        others.append((SECRET, changed, answer))
    for at in range(len(answer)):
        changed = answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]
        others.append((SECRET, hello, changed))
    for what in others:
        other = auth.Session.derive(*what)
        assert not keys & {other.client_proof, other.server_proof, other.client_key}
        assert good.link_key != other.link_key
        with pytest.raises(AuthenticationError):
            auth.check_proof("client", good.client_proof, other.client_proof)


def test_keys_are_derived_as_the_standard_says():
    # RFC 5869, appendix A.1 and A.2.
    key = auth.extract(b"\x0b" * 22, bytes(range(13)))
    assert key.hex() == (
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    )
    assert auth.expand(key, bytes(range(0xF0, 0xFA)), 42).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
        "34007208d5b887185865"
    )
    key = auth.extract(bytes(range(0x50)), bytes(range(0x60, 0xB0)))
    assert auth.expand(key, bytes(range(0xB0, 0x100)), 82).hex() == (
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
        "cc30c58179ec3e87c14c01d5c1f3434f1d87"
    )


def of_protocol(protocol, version):
    own = auth.preamble(version)
    return own[:8] + protocol.to_bytes(4, "big") + own[12:]


@deadline(20)
@run
async def test_another_protocol_is_refused_with_both_versions(caplog):
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(of_protocol(99, "9.9.1"))
        assert await read_to_end(reader, 3.0) == auth.preamble(__version__)
        writer.close()
    mine = f"tfdist '{__version__}' with protocol {auth.PROTOCOL}"
    assert f"runs tfdist '9.9.1' with protocol 99, this one {mine}" in caplog.text

    async def old_server(reader, writer):
        await reader.readexactly(auth.HELLO_BYTES)
        writer.write(of_protocol(99, "9.9.2\n\x1b[31m"))

    old = await asyncio.start_server(old_server, "127.0.0.1", 0)
    address = old.sockets[0].getsockname()[:2]
    with pytest.raises(RendezvousError) as caught:
        await StoreClient.connect(address, SECRET, deadline=time.monotonic() + 3)
    theirs = "'9.9.2??[31m' with protocol 99"
    assert f"runs tfdist {theirs}, this one {mine}" in caught.value.message
    old.close()


# ---- strangers ----


@deadline(30)
@run
async def test_silent_strangers_delay_nobody_and_the_oldest_are_dropped():
    async with serving() as server:
        strangers = await connections(server, 3 * listener.MAX_UNAUTHENTICATED)
        before = time.monotonic()
        client = await client_of(server)
        await client.set("a", 1)
        assert time.monotonic() - before < 1.0
        # The first one went at once, to make room; the rest at the deadline.
        assert await asyncio.wait_for(strangers[0][0].read(), 0.5) == b""
        assert await asyncio.wait_for(strangers[-2][0].read(), 4.0) == b""
        assert time.monotonic() - before >= 1.0
        assert await client.add("n") == 1
        client.close()
        for _, writer in strangers:
            writer.close()


@deadline(30)
@run
async def test_a_store_that_ends_lets_its_clients_leave_first():
    async with serving() as server:
        client = await client_of(server)
        ending = asyncio.create_task(server.close(drain_s=60.0))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(ending), 0.1)
        await client.set("last words", 1)
        client.close()
        await asyncio.wait_for(ending, 10.0)
    async with serving() as server:
        staying = await client_of(server)
        await asyncio.wait_for(server.close(drain_s=0.1), 10.0)
        staying.close()


@deadline(30)
@run
async def test_strangers_push_out_nobody_who_has_proved_itself():
    async with serving() as server:
        client = await client_of(server)
        await client.set("a", 1)
        strangers = await connections(server, 2 * listener.MAX_UNAUTHENTICATED)
        assert await asyncio.wait_for(strangers[0][0].read(), 10.0) == b""
        assert await client.wait(["a"], 10.0) == [1]
        client.close()
        for _, writer in strangers:
            writer.close()


@deadline(30)
@run
async def test_many_ranks_have_more_room(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 60.0)
    size = listener.MAX_UNAUTHENTICATED
    async with serving(size=size) as server:
        ranks = await connections(server, 2 * size)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ranks[0][0].read(), 0.2)
        ranks.append(await asyncio.open_connection(*server.address))
        assert await asyncio.wait_for(ranks[0][0].read(), 10.0) == b""
        for _, writer in ranks:
            writer.close()


@deadline(30)
@run
async def test_a_flood_from_one_address_keeps_no_other_out(caplog):
    async with serving() as server:
        quiet, _ = await asyncio.open_connection(
            *server.address, local_addr=("127.0.0.2", 0)
        )
        flood = await connections(server, 2 * listener.MAX_UNAUTHENTICATED)
        assert await asyncio.wait_for(flood[0][0].read(), 0.5) == b""
        with pytest.raises(asyncio.TimeoutError):  # the oldest of all is still there
            await asyncio.wait_for(quiet.read(), 0.2)
        told = [r.getMessage() for r in caplog.records]
        assert len(told) == 1
        assert "more than 64 connections at once" in told[0]
        assert "(from 127.0.0.1)" in told[0]
        for _, writer in flood:
            writer.close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "huge": b"\x7f\xff\xff\xff" * 2,
    "an older hello": b"\0\0\0\x22" + b'{"magic": "tfdist", "protocol": 1}',
    "long claims": auth.hello("0", bytes(32), {})[:-4] + b"\xff\xff",
    "not the magic": b"tfdist\r\r" + bytes(90),
}


@deadline(30)
@run
async def test_garbage_is_dropped_at_once_and_the_server_goes_on():
    async with serving() as server:
        for name, data in GARBAGE.items():
            reader, writer = await asyncio.open_connection(*server.address)
            before = time.monotonic()
            writer.write(data)
            assert await read_to_end(reader, 3.0) == b"", name
            assert time.monotonic() - before < 1.5, name
            writer.close()
        client = await client_of(server)
        assert await client.add("n") == 1
        client.close()


@deadline(30)
@run
async def test_a_hello_cut_at_any_byte_or_sent_bytewise_is_survived():
    async with serving() as server:
        hello = (await record(server, lambda client: client.add("n")))[0]
        assert len(hello) > 100
        for cut in range(0, len(hello), 7):
            _, writer = await asyncio.open_connection(*server.address)
            writer.write(hello[:cut])
            writer.close()
        # Slowly, one byte at a time, is no way to stay past the deadline.
        reader, writer = await asyncio.open_connection(*server.address)
        before = time.monotonic()
        with pytest.raises(ConnectionError):
            for byte in hello * 9:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        assert 1.5 < time.monotonic() - before < 4.0
        writer.close()
        client = await client_of(server)
        assert await client.add("n") == 2
        client.close()


@deadline(20)
@run
async def test_messages_above_the_limit_are_refused_after_authentication():
    async with serving() as server:
        client = await client_of(server)
        with pytest.raises(ValueError, match="above the limit"):
            await client.set("a", "x" * (1 << 20))
        # A client that ignores the limit is cut off.
        raw = await channel_of(server)
        raw.sock.sendall(((1 << 20) + 1).to_bytes(4, "big"))
        with pytest.raises(channel.ChannelClosed):
            await asyncio.wait_for(raw.receive(), 3.0)
        raw.close()
        assert await client.add("n") == 1
        client.close()


@deadline(20)
@run
async def test_a_malformed_request_ends_its_connection_only():
    async with serving() as server:
        client = await client_of(server)
        for request in ({}, {"op": "no"}, {"op": "wait", "keys": 3}, {"op": "set"}):
            raw = await channel_of(server)
            await raw.send(request)
            with pytest.raises(channel.ChannelClosed):
                await asyncio.wait_for(raw.receive(), 2.0)
            raw.close()
        assert await client.add("n") == 1
        client.close()


@deadline(20)
@run
async def test_who_reaches_itself_instead_of_the_server_tries_again(monkeypatch):
    [port] = free_ports(1)

    class Calling(socket.socket):
        """The first one calls from the port that it calls."""

        bound = 0

        def __init__(self, *arguments):
            super().__init__(*arguments)
            if not Calling.bound:
                self.bind(("127.0.0.1", port))
            Calling.bound += 1

    seen = []

    def connected_to_itself(sock):
        seen.append(address.connected_to_itself(sock))
        return seen[-1]

    ours = types.SimpleNamespace(**{**vars(socket), "socket": Calling})
    monkeypatch.setattr(channel, "socket", ours)
    monkeypatch.setattr(channel, "connected_to_itself", connected_to_itself)
    connecting = asyncio.ensure_future(
        StoreClient.connect(
            ("127.0.0.1", port), SECRET, deadline=time.monotonic() + 5.0
        )
    )
    while Calling.bound < 2 and not connecting.done():  # then the port is free
        await asyncio.sleep(0.005)
    server = StoreServer(bind("127.0.0.1", port), SECRET)
    server.start()
    try:
        client = await connecting
        assert await client.add("n") == 1
        client.close()
    finally:
        await server.close()
    assert seen == [True, False]


# ---- addresses ----


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "h:0", "h:65536", "h:x"])
def test_a_malformed_address_is_refused(text):
    with pytest.raises(RendezvousError, match="TFDIST_RENDEZVOUS="):
        split_address(text)


def test_addresses_of_both_families():
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address(join_address("::1", 80)) == ("::1", 80)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("10.0.0.1") and not is_loopback("node1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
def test_nothing_listens_on_all_interfaces(host):
    with pytest.raises(RendezvousError, match="all network interfaces"):
        bind(host, 0)


# ---- helpers ----


async def read_to_end(reader, timeout_s):
    """What comes until the server closes; b"" when it resets the connection."""
    try:
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionResetError:
        return b""


async def join(server, **more):
    return await Membership.join(
        server.address,
        SECRET,
        member={"rank": 0, "host": "h", "pid": 1},
        deadline=time.monotonic() + 5,
        **more,
    )


async def channel_of(server, claims=None):
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, server.address)
    raw = channel.Channel(sock)
    await raw.handshake_as_client(SECRET, CLAIMS if claims is None else claims)
    return raw


async def record(server, act):
    """The frames that a real client sends during `act`."""
    frames = []
    original = channel.Channel._write

    async def listen(self, data, fds):
        if self is recorded:
            frames.append(data)
        await original(self, data, fds)

    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, server.address)
    recorded = channel.Channel(sock)
    channel.Channel._write = listen
    try:
        await recorded.handshake_as_client(SECRET, CLAIMS)
        await act(StoreClient(recorded))
    finally:
        channel.Channel._write = original
    recorded.close()
    assert len(frames) == 3  # hello, proof, request
    return frames
