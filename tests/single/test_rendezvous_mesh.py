"""Ranks that come together. All ranks of a test live on one loop in this process."""

import asyncio
import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import re
import socket
import time
from dataclasses import replace

import pytest
from helpers.deadline import deadline

from tfdist.core import native
from tfdist.core.rendezvous import (
    links,
    mesh,
    mesh_links,
    on_demand_links,
    same_host,
    settings_check,
)
from tfdist.core.rendezvous.address import bind
from tfdist.core.rendezvous.environment import Placement
from tfdist.core.rendezvous.errors import RendezvousError, timeout
from tfdist.core.rendezvous.mesh_types import Mesh, Settings, close_ends
from tfdist.core.rendezvous.same_host import number_hosts
from tfdist.core.rendezvous.store import Membership, StoreClient, StoreServer

SECRET = bytes(range(32))
SHM_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def job(size, *, timeout_s=10.0, generation=1, **changes):
    """Settings of all ranks of a job, with a store that runs."""
    server = StoreServer(bind("127.0.0.1", 0), SECRET)
    server.start()
    common = {
        "generation": generation,
        "secret": SECRET,
        "store": server.address,
        "deadline": time.monotonic() + timeout_s,
        "timeout_s": timeout_s,
        "transport": "auto",
        "shm_bytes": SHM_BYTES,
        "window_bytes": SHM_BYTES,
        "settings": {"TFDIST_SEGMENT_BYTES": 4096},
        **changes,
    }
    try:
        yield [
            Settings(placement=Placement(rank=rank, size=size), **common)
            for rank in range(size)
        ]
    finally:
        await server.close()


async def build_all(settings):
    """The mesh of every rank; an exception stands where a rank failed."""
    tasks = (mesh.build(own) for own in settings)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def connected(settings):
    meshes = await build_all(settings)
    for found in meshes:
        if isinstance(found, BaseException):
            raise found
    return meshes


def close(meshes):
    for found in meshes:
        if isinstance(found, Mesh):
            found.close()


def open_fds():
    """What is open, as (number, what it is). Another test's leftover may close later
    than that test, so a leak is what is here now and was not before: `now <= before`.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def end_of(meshes, rank, peer):
    return next(end for end in meshes[rank].links if end.peer == peer)


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
@pytest.mark.parametrize("size", [2, 3, 5])
@deadline(30)
def test_every_pair_of_ranks_gets_one_link(size, transport):
    async def go():
        async with job(size, transport=transport) as settings:
            meshes = await connected(settings)
        kind = "tcp" if transport == "tcp" else "shm"
        for rank, own in enumerate(meshes):
            peers = [end.peer for end in own.links]
            assert peers == [r for r in range(size) if r != rank]
            assert {end.transport for end in own.links} == {kind}
            assert all(end.initiator == (rank > end.peer) for end in own.links)
        # Both ends are really the two ends of one connection.
        for low in range(size):
            for high in range(low + 1, size):
                one, two = end_of(meshes, low, high), end_of(meshes, high, low)
                os.write(one.socket_fd, b"%d" % high)
                assert os.read(two.socket_fd, 8) == b"%d" % high
        close(meshes)

    before = open_fds()
    asyncio.run(go())
    assert open_fds() <= before


@deadline(30)
def test_shared_memory_is_shared_zeroed_sealed_and_has_both_doorbells():
    async def go():
        async with job(2) as settings:
            meshes = await connected(settings)
        low, high = end_of(meshes, 0, 1), end_of(meshes, 1, 0)
        with (
            mmap.mmap(low.memory_fd, SHM_BYTES) as one,
            mmap.mmap(high.memory_fd, SHM_BYTES) as two,
        ):
            assert one[:] == bytes(SHM_BYTES)
            one[100] = 7
            assert two[100] == 7
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(high.memory_fd, 0)
        os.eventfd_write(low.peer_doorbell_fd, 5)
        assert os.eventfd_read(meshes[1].own_doorbell_fd) == 5
        os.eventfd_write(high.peer_doorbell_fd, 6)
        assert os.eventfd_read(meshes[0].own_doorbell_fd) == 6
        for end in (low, high):
            for fd in (end.socket_fd, end.memory_fd, end.peer_doorbell_fd):
                assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        close(meshes)

    asyncio.run(go())


@deadline(30)
def test_settings_that_differ_are_an_error_on_every_rank():
    async def go():
        async with job(3) as settings:
            settings[1] = replace(settings[1], settings={"TFDIST_SEGMENT_BYTES": 8192})
            return await build_all(settings)

    before = open_fds()
    for error in asyncio.run(go()):
        assert isinstance(error, RendezvousError)
        assert error.payload["kind"] == "mismatch"
        assert (
            "TFDIST_SEGMENT_BYTES: 4096 on ranks 0 and 2; 8192 on rank 1"
            in error.message
        )
    assert open_fds() <= before


@deadline(30)
def test_a_missing_rank_is_named_at_the_deadline_by_every_other_one():
    async def go():
        async with job(4, timeout_s=1.0) as settings:
            return await build_all([settings[0], settings[2]])

    before = time.monotonic()
    errors = asyncio.run(go())
    assert 1.0 <= time.monotonic() - before < 8.0
    for error in errors:
        assert error.payload["kind"] == "timeout"
        assert "ranks 1 and 3 of 4 did not call tfdist.init()" in error.message
        assert "TFDIST_START_TIMEOUT_S" in error.message


@deadline(30)
def test_who_waited_in_vain_first_is_not_what_the_others_say_has_failed():
    async def go():
        async with job(3, timeout_s=20.0) as settings:
            impatient = replace(
                settings[2], timeout_s=0.5, deadline=time.monotonic() + 0.5
            )
            return await build_all([settings[0], impatient])

    patient, impatient = asyncio.run(go())
    assert "rank 1 of 3 did not call tfdist.init() within 0.5 s" in impatient.message
    assert patient.message == impatient.message
    assert patient.payload == impatient.payload
    assert patient.payload["kind"] == "timeout"


@deadline(30)
def test_a_link_that_is_never_made_names_the_rank_behind_it(monkeypatch):
    original = mesh_links.MeshLinks._connect

    async def hangs(self, peer):
        if (self.rank, peer.rank) == (2, 0):
            await asyncio.sleep(60)
        return await original(self, peer)

    monkeypatch.setattr(mesh_links.MeshLinks, "_connect", hangs)

    async def go():
        async with job(3, timeout_s=1.0) as settings:
            return await build_all(settings)

    errors = asyncio.run(go())
    assert all(isinstance(error, RendezvousError) for error in errors)
    ends = ("rank 0 has no link to rank 2", "rank 2 has no link to rank 0")
    for error in errors:  # whichever end gives up first
        assert any(f"{words} after 1 s" in error.message for words in ends), errors


@deadline(30)
def test_a_way_between_hosts_that_is_closed_is_told_from_both_ends(monkeypatch):
    """A firewall that drops what comes: nobody answers, nobody refuses."""
    original, claims = links.connect_tcp, itertools.count()

    async def dropped(credentials, peer, **more):
        if (credentials.rank, peer.rank) == (2, 0):
            await asyncio.sleep(60)
        return await original(credentials, peer, **more)

    monkeypatch.setattr(links, "connect_tcp", dropped)
    monkeypatch.setattr(same_host, "claim", lambda: f"host {next(claims)}")

    async def go():
        async with job(3, timeout_s=2.0) as settings:
            return await build_all(settings)

    where = r"at 127\.0\.0\.1:\d+"
    within = r"within 2 s \(TFDIST_START_TIMEOUT_S\)"
    ends = (
        rf"rank 2 cannot connect to rank 0 \(.*\) {where}: no answer {within}",
        rf"rank 2 did not connect to rank 0 {where} {within}",
    )
    for error in asyncio.run(go()):  # whichever end gives up first
        assert any(re.match(words, error.message) for words in ends), error
        assert error.message.endswith("and is there a firewall?")


@pytest.mark.parametrize("served", [False, True])
@deadline(30)
def test_the_end_of_the_store_is_that_of_rank_0_where_no_launcher_runs_it(served):
    async def go():
        async with job(3) as settings:
            server = StoreServer(bind("127.0.0.1", 0), SECRET)
            server.start()
            others = [
                replace(
                    own,
                    store=server.address,
                    placement=replace(own.placement, launcher_runs_store=served),
                )
                for own in settings[1:]
            ]
            waiting = asyncio.create_task(build_all(others))
            while not {"1/rank/1", "1/rank/2"} <= server.values.keys():
                await asyncio.sleep(0.01)
            await server.close()
            return await waiting, server.address[1]

    errors, port = asyncio.run(go())
    for error in errors:
        assert "lost the rendezvous store" in error.message
        if served:
            assert error.payload["kind"] == "timeout"
            continue
        assert (error.payload["kind"], error.payload["rank"]) == ("rank_failed", 0)
        runs = f"rank 0, which runs the store at 127.0.0.1:{port}, failed while"
        assert error.message.startswith(runs)


@deadline(30)
def test_a_rank_that_dies_while_connecting_is_named_at_once():
    async def go():
        async with job(2) as settings:
            dying = await Membership.join(
                settings[1].store,
                SECRET,
                member={"rank": 1, "host": "h", "pid": 4711},
                generation=1,
                deadline=settings[1].deadline,
            )
            waiting = asyncio.create_task(mesh.build(settings[0]))
            await asyncio.sleep(0.1)
            dying.close()
            before = time.monotonic()
            with pytest.raises(RendezvousError) as caught:
                await waiting
            assert time.monotonic() - before < 1.0
            return caught.value

    error = asyncio.run(go())
    assert error.payload["kind"] == "rank_failed"
    assert error.payload["rank"] == 1
    assert error.payload["pid"] == 4711


@deadline(30)
def test_the_reason_of_a_rank_that_gives_up_reaches_the_others():
    async def go():
        async with job(3) as settings:
            settings[2] = replace(settings[2], address="203.0.113.7")  # of nobody here
            return await build_all(settings)

    errors = asyncio.run(go())
    assert "cannot listen on 203.0.113.7" in errors[2].message
    for error in errors[:2]:
        assert error.payload["rank"] == 2
        assert "cannot listen on 203.0.113.7" in error.message


@deadline(30)
def test_two_processes_with_one_rank_are_an_error():
    async def go():
        # Rank 2 is not there yet: else the first one of rank 1 may be done before the
        # second one comes, who alone is refused then.
        async with job(3) as settings:
            return await build_all([settings[0], settings[1], settings[1]])

    errors = asyncio.run(go())
    assert all(isinstance(e, RendezvousError) for e in errors)
    assert all("2 processes call themselves rank 1" in str(e) for e in errors)


@deadline(30)
def test_failing_shared_memory_falls_back_to_tcp_with_one_warning(monkeypatch, caplog):
    def no_memory(size):
        raise links.ShmFailedError(f"no {size} bytes of shared memory: test")

    monkeypatch.setattr(links, "create_memory", no_memory)

    async def go():
        async with job(3) as settings:
            meshes = await connected(settings)
        kinds = {end.transport for own in meshes for end in own.links}
        close(meshes)
        return kinds

    before = open_fds()
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        assert asyncio.run(go()) == {"tcp"}
    told = [r.message for r in caplog.records if "no shared memory" in r.message]
    assert len(told) == 2  # ranks 1 and 2, one each: rank 0 connects to nobody
    assert "using TCP" in told[0]
    assert open_fds() <= before


@deadline(30)
def test_a_peer_that_sees_other_memory_is_not_on_this_host(monkeypatch, caplog):
    original = links.exchange_nonce

    def elsewhere(fd, size, write):
        found = original(fd, size, write)
        return found if write else bytes(16)

    monkeypatch.setattr(links, "exchange_nonce", elsewhere)

    async def go():
        async with job(2) as settings:
            meshes = await connected(settings)
        kinds = {end.transport for own in meshes for end in own.links}
        close(meshes)
        return kinds

    with caplog.at_level(logging.WARNING, logger="tfdist"):
        assert asyncio.run(go()) == {"tcp"}
    assert "do not see the same memory" in caplog.text


@deadline(30)
def test_shared_memory_that_was_demanded_but_fails_is_an_error(monkeypatch):
    def no_memory(size):
        raise links.ShmFailedError("no bytes: test")

    monkeypatch.setattr(links, "create_memory", no_memory)

    async def go():
        async with job(2, transport="shm") as settings:
            return await build_all(settings)

    errors = asyncio.run(go())
    assert "TFDIST_TRANSPORT=shm" in errors[1].message
    assert errors[0].payload["rank"] == 1


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_could_shrink_is_refused(seals):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SHM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(links.ShmFailedError, match="seals"):
        links.check_memory(fd, SHM_BYTES)
    os.close(fd)
    good = links.create_memory(SHM_BYTES)
    links.check_memory(good, SHM_BYTES)
    with pytest.raises(links.ShmFailedError, match="expected 1"):
        links.check_memory(good, 1)
    os.close(good)


@deadline(30)
def test_strangers_at_a_ranks_ports_do_not_disturb():
    async def go():
        async with job(2) as settings:
            first = asyncio.create_task(mesh.build(settings[0]))
            store = await StoreClient.connect(
                settings[0].store, SECRET, deadline=settings[0].deadline
            )
            (record,) = await store.wait(["1/rank/0"], 5.0)
            strangers = []
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100) * 30:
                _, writer = await asyncio.open_connection(*record["address"])
                writer.write(data)
                strangers.append(writer)
                _, writer = await asyncio.open_unix_connection(
                    "\0" + record["unix_name"]
                )
                writer.write(data)
                strangers.append(writer)
            before = time.monotonic()
            meshes = [await first_of(mesh.build(settings[1]), first), first.result()]
            assert time.monotonic() - before < 1.5
            close(meshes)
            for writer in strangers:
                writer.close()
            store.close()

    async def first_of(building, other):
        found, _ = await asyncio.gather(building, other)
        return found

    asyncio.run(go())


@deadline(30)
def test_a_peer_of_another_generation_pair_job_or_secret_is_refused_and_told_why():
    async def go():
        async with job(2) as settings:
            first = asyncio.create_task(mesh.build(settings[0]))
            store = await StoreClient.connect(
                settings[0].store, SECRET, deadline=settings[0].deadline
            )
            record, session = await store.wait(["1/rank/0", "session"], 5.0)
            peer = links.Peer(
                rank=0,
                host="h",
                pid=1,
                address=tuple(record["address"]),
                unix_name=record["unix_name"],
            )
            good = links.LinkCredentials(
                secret=SECRET, job=f" {session}", generation=1, rank=1, frames=""
            )
            for change, why in (
                ({"generation": 2}, "generation 1 here, 2 at the side that connects"),
                ({"rank": 0}, "rank 0 does not connect to rank 0"),
                ({"rank": 2}, "rank 2 does not connect to rank 0"),
                ({"job": " other"}, f"job ' {session}' here, ' other' at the side"),
                ({"frames": "none"}, "'hmac-sha256 none' at the side that connects"),
                ({"sockets": 2}, "sockets 1 here, 2 at the side that connects"),
            ):
                with pytest.raises(links.auth.RefusedError) as caught:
                    await links.connect_tcp(replace(good, **change), peer)
                assert "rank 0 refused a link" in str(caught.value)
                assert why in str(caught.value)
            with pytest.raises(links.auth.RefusedError, match="target rank 0"):
                await links.connect_tcp(good, replace(peer, rank=1))
            with pytest.raises(links.auth.AuthenticationError, match="does not know"):
                await links.connect_tcp(replace(good, secret=bytes(32)), peer)
            meshes = await asyncio.gather(first, mesh.build(settings[1]))
            close(meshes)
            store.close()

    asyncio.run(go())


@deadline(30)
def test_every_tcp_link_has_its_own_key_at_both_ends():
    async def go():
        async with job(3, transport="tcp") as settings:
            meshes = await connected(settings)
        keys = set()
        for low in range(3):
            for high in range(low + 1, 3):
                one, two = end_of(meshes, low, high), end_of(meshes, high, low)
                assert one.key == two.key
                assert len(one.key) == 64
                keys.add(one.key)
        assert len(keys) == 3
        assert all(key.hex() not in repr(meshes) for key in keys)
        assert SECRET.hex() not in repr(meshes)
        close(meshes)

    asyncio.run(go())


def names(end):
    """Both addresses of each socket of a link, as this end has them."""
    found = []
    for fd in (end.socket_fd, *end.more_socket_fds):
        with socket.socket(fileno=os.dup(fd)) as sock:
            found.append((sock.getsockname(), sock.getpeername()))
    return found


@deadline(30)
def test_a_tcp_link_of_several_sockets_has_them_in_the_same_order_at_both_ends():
    async def go():
        before = open_fds()
        changes = {"transport": "tcp", "settings": {"TFDIST_TCP_SOCKETS": 4}}
        async with job(3, **changes) as settings:
            meshes = await connected(settings)
        for low, high in ((0, 1), (0, 2), (1, 2)):
            one, two = end_of(meshes, low, high), end_of(meshes, high, low)
            assert len(set(names(one))) == 4
            assert names(one) == [(theirs, own) for own, theirs in names(two)]
            assert one.key == two.key
            assert len({one.key[i : i + 64] for i in range(0, 256, 64)}) == 4
        close(meshes)
        assert open_fds() <= before

    asyncio.run(go())


@deadline(30)
def test_a_link_that_broke_half_way_is_made_anew(monkeypatch):
    before = open_fds()
    original = links.Channel.handshake_as_client
    failing = [2]  # the third socket of rank 1's link, once

    async def breaks(self, secret, claims):
        if claims.get("transport") == "tcp" and claims["socket"] in failing:
            failing.clear()
            raise ConnectionResetError("a firewall")
        return await original(self, secret, claims)

    monkeypatch.setattr(links.Channel, "handshake_as_client", breaks)

    async def go():
        changes = {"transport": "tcp", "settings": {"TFDIST_TCP_SOCKETS": 3}}
        async with job(2, **changes) as settings:
            meshes = await connected(settings)
        assert not failing
        one, two = end_of(meshes, 0, 1), end_of(meshes, 1, 0)
        assert names(one) == [(theirs, own) for own, theirs in names(two)]
        assert one.key == two.key
        close(meshes)

    asyncio.run(go())
    assert open_fds() <= before


def test_sockets_of_an_earlier_try_do_not_disturb_the_later_one():
    class Told:
        def __init__(self, link, socket):
            self.claims = {"link": link, "socket": socket}
            self.closed = False

        def close(self):
            self.closed = True

    gathering = links.Gathering(3)
    early, late = [Told(7, i) for i in range(3)], [Told(8, i) for i in range(3)]
    for one in (early[0], late[0], late[2], early[1], early[2]):
        assert gathering.add(one) is None
    assert all(one.closed for one in early)
    assert gathering.add(late[1]) == late
    assert not any(one.closed for one in late)


@deadline(60)
def test_generations_follow_each_other_on_one_store():
    async def go():
        async with job(3) as settings:
            for generation in range(1, 4):
                meshes = await connected(
                    [replace(own, generation=generation) for own in settings]
                )
                close(meshes)

    asyncio.run(go())


# ---- agreement and topology, pure ----


def record(local_rank=None, local_size=None, **versions):
    return {
        "local_rank": local_rank,
        "local_size": local_size,
        "versions": versions,
        "settings": {},
    }


def test_versions_that_differ_are_named_with_ranks():
    records = [record(tensorflow="2.21"), record(tensorflow="2.20"), record()]
    with pytest.raises(RendezvousError) as caught:
        settings_check.check_agreement(records)
    assert (
        "tensorflow: 2.21 on rank 0; 2.20 on rank 1; not set on rank 2"
        in caught.value.message
    )


def places(hosts, **told):
    records = [record() for _ in hosts]
    host_of = number_hosts([hosts.index(host) for host in hosts])
    for name, values in told.items():
        for own, value in zip(records, values, strict=True):
            own[name] = value
    size = len(hosts)
    found = [
        settings_check.topology(Placement(rank=rank, size=size), records, host_of)
        for rank in range(size)
    ]
    return [(t.local_rank, t.local_size, t.cross_rank, t.cross_size) for t in found]


def test_topology_from_the_hosts_found_also_with_unequal_hosts():
    assert places("aab") == [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]
    assert places("abab") == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


def test_topology_told_by_the_launcher_wins():
    # Two virtual nodes of Slurm on one host.
    told = {"local_rank": [0, 1, 0, 1], "local_size": [2, 2, 2, 2]}
    assert places("aaaa", **told) == [
        (0, 2, 0, 2),
        (1, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 1, 2),
    ]


def test_topology_is_computed_when_one_rank_was_told_nothing():
    assert places("aa", local_rank=[5, None])[0][:2] == (0, 2)


# ---- who shares processors ----


def shared(processors, hosts=None, local_size=None):
    """`sharing` of rank 0, where each rank may use a set of processors."""
    records = [record() for _ in processors]
    for own, numbers in zip(records, processors, strict=True):
        own["processors"] = f"{sum(1 << number for number in numbers):x}"
    hosts = hosts or "a" * len(processors)
    topology = settings_check.topology(
        Placement(rank=0, size=len(hosts)),
        records,
        number_hosts([hosts.index(host) for host in hosts]),
    )
    if local_size is not None:
        topology = replace(topology, local_size=local_size)
    return settings_check.sharing(topology, records)


def test_ranks_that_may_use_all_processors_share_them():
    assert shared([{0, 1}, {0, 1}, {0, 1}]) == 3
    assert shared([{0}, {0, 1}, {1}]) == 2


def test_ranks_with_processors_of_their_own_share_none_however_many():
    assert shared([{number} for number in range(200)]) == 1
    assert shared([{0, 1}, {2, 3}, {1, 2}]) == 2


def test_processors_of_other_hosts_are_not_shared():
    assert shared([{0}, {0}, {0}], hosts="aba") == 2


def test_a_rank_whose_host_is_not_proved_may_use_any_processor():
    # A launcher counts three ranks; one is in a network namespace of its own.
    assert shared([{0}, {1}, {2}], hosts="aab", local_size=3) == 2


@deadline(60)
def test_ranks_without_a_link_know_each_others_processors_too(monkeypatch):
    bound = iter(range(100))
    monkeypatch.setattr(settings_check, "processors", lambda: f"{1 << next(bound):x}")
    monkeypatch.setattr(
        on_demand_links, "_CLOSE_S", 0
    )  # all of them serve on one thread

    async def go():
        agreed = {"TFDIST_MESH_RANKS": 16}
        async with job(20, settings=agreed, timeout_s=40.0) as settings:
            meshes = await connected(settings)
        assert all(len(own.links) < 19 for own in meshes)
        assert [own.sharing for own in meshes] == [1] * 20
        serving = [own.on_demand.run() for own in meshes]
        await asyncio.gather(asyncio.to_thread(close, meshes), *serving)

    asyncio.run(go())


@deadline(60)
def test_a_link_on_demand_that_was_given_up_does_not_reach_the_core(monkeypatch):
    handed = []
    monkeypatch.setattr(
        on_demand_links, "_CLOSE_S", 0
    )  # all of them serve on one thread
    monkeypatch.setattr(native, "add_link", handed.append)
    low, high = 0, 3  # no neighbours among six

    async def handed_over():
        while not handed:
            await asyncio.sleep(0.01)

    async def go():
        agreed = {"TFDIST_MESH_RANKS": 2}
        async with job(6, settings=agreed, transport="tcp") as settings:
            meshes = await connected(settings)
        for own in meshes:
            own.on_demand.core_started()
        serving = [asyncio.ensure_future(own.on_demand.run()) for own in meshes]
        maker = meshes[high].on_demand._connect.__self__
        # Its handshake is complete, and its time was over.
        close_ends([await links.connect_tcp(maker._credentials, maker.peers[low])])
        await asyncio.sleep(0.3)
        assert handed == []
        made = await meshes[high].on_demand._connect(low)
        await asyncio.wait_for(handed_over(), 10.0)
        assert [end.peer for end in handed] == [high]
        close_ends([made, *handed])
        await asyncio.gather(asyncio.to_thread(close, meshes), *serving)

    asyncio.run(go())


@deadline(30)
def test_a_rank_whose_store_is_silent_says_so_before_its_caller_gives_up():
    waits = []

    class Silent:
        async def add(self, key, amount=1, *, timeout_s=10.0):
            waits.append(timeout_s)
            raise timeout("no answer")

    async def go():
        async with job(2) as settings:
            own = mesh._Builder(settings[1], [0])
            await own._report_failure(Silent(), timeout("rank 0 is missing"))
            os.close(own.links.doorbell_fd)

    asyncio.run(go())
    # `wait` has gone on for up to 5 s by then, and the caller for 10 (connect.py).
    assert waits == [2.0]
