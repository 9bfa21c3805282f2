"""Which ranks share a host: claims, proofs, and what every rank makes of them."""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from helpers.deadline import deadline

from tfdist.core.rendezvous import links, mesh, mesh_links, same_host
from tfdist.core.rendezvous.address import bind
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.environment import Placement
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.mesh_types import Settings
from tfdist.core.rendezvous.store import StoreServer

SECRET = bytes(range(32))


@asynccontextmanager
async def job(size, *, transport="auto", timeout_s=10.0):
    server = StoreServer(bind("127.0.0.1", 0), SECRET)
    server.start()
    common = Settings(
        placement=Placement(rank=0, size=size),
        generation=1,
        secret=SECRET,
        store=server.address,
        deadline=time.monotonic() + timeout_s,
        timeout_s=timeout_s,
        transport=transport,
        shm_bytes=1 << 16,
        window_bytes=1 << 16,
        settings={},
    )
    try:
        yield [
            replace(common, placement=Placement(rank=rank, size=size))
            for rank in range(size)
        ]
    finally:
        await server.close()


def found(size, **options):
    """(host_of, kinds of links) as every rank sees them; they must agree."""

    async def go():
        async with job(size, **options) as settings:
            meshes = await asyncio.gather(*(mesh.build(own) for own in settings))
        kinds = {
            (rank, end.peer): end.transport
            for rank, own in enumerate(meshes)
            for end in own.links
        }
        seen = {own.topology.host_of for own in meshes}
        for own in meshes:
            own.close()
        assert len(seen) == 1
        return seen.pop(), kinds

    return asyncio.run(go())


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
@deadline(30)
def test_ranks_of_one_machine_are_one_host_whatever_the_transport(transport):
    assert found(3, transport=transport)[0] == (0, 0, 0)


@deadline(30)
def test_equal_claims_without_a_proof_are_several_hosts(monkeypatch):
    """As of virtual machines that were cloned while they ran."""
    machine = [0, 1, 0, 1, 1]
    listen, reaches = mesh_links.MeshLinks.listen, same_host.reaches
    names = {}

    def listen_and_note(self, credentials, own_host):
        record = listen(self, credentials, own_host)
        names[record["unix_name"]] = machine[self.rank]
        return record

    async def within_a_machine(unix_name, *, claims, **more):
        if names[unix_name] != machine[claims["from"]]:
            unix_name = "nobody-has-this-name"
        return await reaches(unix_name, claims=claims, **more)

    monkeypatch.setattr(mesh_links.MeshLinks, "listen", listen_and_note)
    monkeypatch.setattr(same_host, "reaches", within_a_machine)
    host_of, kinds = found(5)
    assert host_of == (0, 1, 0, 1, 1)
    for (rank, peer), kind in kinds.items():
        assert kind == ("shm" if machine[rank] == machine[peer] else "tcp")


@deadline(30)
def test_different_claims_are_never_tried(monkeypatch):
    """Two network namespaces of one kernel cannot share memory."""
    claims = iter(["k/1", "k/2", "k/1"])
    tried = []

    async def reaches(unix_name, *, claims, **more):
        tried.append(claims)
        return True

    monkeypatch.setattr(same_host, "claim", lambda: next(claims))
    monkeypatch.setattr(same_host, "reaches", reaches)
    host_of, kinds = found(3)
    assert sorted(host_of) in ([0, 0, 1], [0, 1, 1])
    assert len(tried) == 1
    assert sorted(kinds.values()) == ["shm"] * 2 + ["tcp"] * 4


@deadline(30)
def test_a_slow_proof_is_waited_for_and_a_missing_one_is_an_error():
    """The answer depends on where the ranks are, never on how fast they answer."""

    async def go():
        sock, name = links.unix_listener()

        def refusal(claims):
            if claims["generation"] == 3:
                return "generation 1 here"
            if claims["generation"] != 1 or time.monotonic() < ready:
                raise AuthenticationError("not now")
            return ""

        listener = Listener(sock, secret=SECRET, refusal=refusal, serve=_close)
        listener.start()
        ready = time.monotonic() + 0.3
        common = {"secret": SECRET, "description": "rank 0 (h, process 1)"}
        assert await same_host.reaches(
            name, claims={"generation": 1}, deadline=ready + 5, **common
        )
        assert time.monotonic() >= ready
        with pytest.raises(RendezvousError, match="rank 0 .* is on this host but"):
            await same_host.reaches(
                name,
                claims={"generation": 2},
                deadline=time.monotonic() + 0.3,
                **common,
            )
        before = time.monotonic()
        with pytest.raises(RendezvousError, match="generation 1 here"):
            await same_host.reaches(
                name, claims={"generation": 3}, deadline=before + 5, **common
            )
        assert time.monotonic() < before + 3
        await listener.close()
        assert not await same_host.reaches(
            name, claims={"generation": 1}, deadline=time.monotonic() + 5, **common
        )

    async def _close(channel):
        channel.close()

    asyncio.run(go())


def test_hosts_are_numbered_by_their_lowest_rank():
    assert same_host.number_hosts([0, 0, 2, 0, 2, 5]) == (0, 0, 1, 0, 1, 2)
    assert same_host.number_hosts([0, 0, 1, 3, 2, 3, 6]) == (0, 0, 0, 1, 0, 1, 2)
    assert same_host.candidates(3, ["a", "b", "a", "a"]) == [2, 0]
