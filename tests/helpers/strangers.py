"""Connections that a job must survive: strangers, and members with a wrong story.

Every kind connects to a port of a job, does its worst, and says whether it got further
than an unauthenticated or refused connection may. Used by helpers/hostile.py.
"""

from __future__ import annotations

import asyncio
import collections
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tfdist import __version__
from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.channel import Channel

_PATIENCE_S = 20.0  # a stranger is given 2 s, but the machine may be busy
_MOST_HELD = 150  # silent connections that are open at the same time
_CLAIMS = {"purpose": "store", "job": "", "generation": 0}

HTTP = b"GET / HTTP/1.1\r\nHost: tfdist\r\nUser-Agent: scanner\r\n\r\n"
TLS = bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2
SSH = b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"


class AcceptedError(AssertionError):
    """A connection got in that must not."""


@dataclass
class Job:
    """What a hostile process knows of a job.

    Attributes:
        ports: where the job listens.
        secret: of the job; only the kinds that play a wrong member use it.
        job: its name.
        recorded: bytes that a member once sent, for replaying.
    """

    ports: list[tuple[str, int]]
    secret: bytes
    job: str
    recorded: bytes = b""


def _connect(where: tuple[str, int]) -> socket.socket:
    return socket.create_connection(where, timeout=_PATIENCE_S)


def _drain(sock: socket.socket, allowed: int) -> None:
    """Reads until the job closes; more than `allowed` bytes mean that it talked."""
    total = 0
    try:
        while part := sock.recv(4096):
            total += len(part)
    except ConnectionError:
        pass
    if total > allowed:
        raise AcceptedError(f"{total} bytes came back, at most {allowed} may")


def _send(where: tuple[str, int], data: bytes, *, allowed: int = 0) -> None:
    with _connect(where) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # dropped already
        _drain(sock, allowed)


def _hello(generation: int = 0) -> bytes:
    claims = {**_CLAIMS, "generation": generation}
    return auth.hello(__version__, auth.new_nonce(), claims)


def random_bytes(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """Anything."""
    del job
    _send(where, rng.randbytes(rng.randrange(1, 3000)))


def other_protocols(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """A browser, a TLS client, an SSH client."""
    del job
    _send(where, rng.choice([HTTP, TLS, SSH]))


def partial(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """The first bytes of a right hello, then the end."""
    del job
    data = _hello()
    _send(where, data[: rng.randrange(len(data))])


def flipped(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """A hello with a bit flipped, and a random proof."""
    del job
    data = bytearray(_hello())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    _send(where, bytes(data) + rng.randbytes(32), allowed=auth.ANSWER_BYTES)


def replayed(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """Everything a member once sent, or the first part of it."""
    cut = rng.choice([len(job.recorded), rng.randrange(1, len(job.recorded) + 1)])
    _send(where, job.recorded[:cut], allowed=auth.ANSWER_BYTES)


def wrong_secret(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """A right hello, then a proof under another secret, or the job's own proof."""
    del job
    with _connect(where) as sock:
        hello = _hello()
        sock.sendall(hello)
        answer = b""
        while len(answer) < auth.ANSWER_BYTES:
            try:
                part = sock.recv(auth.ANSWER_BYTES - len(answer))
            except ConnectionError:
                return
            if not part:
                return  # dropped to make room
            answer += part
        nonce_end = auth.PREAMBLE_BYTES + auth.NONCE_BYTES
        session = auth.Session.derive(rng.randbytes(32), hello, answer[:nonce_end])
        own = rng.choice([session.client_proof, answer[nonce_end:]])
        try:
            sock.sendall(own + auth.Sealer(session.client_key).seal(b"{}"))
        except OSError:
            pass
        _drain(sock, 0)


def reset(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """Connects, perhaps speaks, and resets the connection."""
    del job
    with _connect(where) as sock:
        if rng.random() < 0.5:
            sock.sendall(_hello())
        linger = struct.pack("ii", 1, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def wrong_member(job: Job, where: tuple[str, int], rng: random.Random) -> None:
    """Has the secret, but comes from an old generation, another job or pair."""
    link = {"purpose": "link", "job": job.job, "transport": "tcp", "frames": ""}
    claims = rng.choice(
        [
            {**_CLAIMS, "job": "another"},
            {**_CLAIMS, "purpose": "member", "job": job.job, "generation": -1},
            {**link, "generation": 0, "from": 2, "to": 0},
            {**link, "generation": 1, "from": 0, "to": 2},
            {**link, "generation": 1, "from": 2, "to": 0},  # not this job's session
            {},
        ]
    )

    async def go() -> None:
        sock = _connect(where)
        channel = Channel(sock)
        try:
            await channel.handshake_as_client(job.secret, claims)
            raise AcceptedError(f"the job accepts {claims}")
        except (auth.AuthenticationError, OSError, TimeoutError):
            pass
        finally:
            channel.close()

    asyncio.run(go())


KINDS: dict[str, tuple[Callable[[Job, tuple[str, int], random.Random], None], int]] = {
    "random bytes": (random_bytes, 20),
    "other protocols": (other_protocols, 15),
    "partial": (partial, 15),
    "flipped": (flipped, 10),
    "replayed": (replayed, 10),
    "wrong secret": (wrong_secret, 10),
    "reset": (reset, 8),
    "wrong member": (wrong_member, 2),
    "silent": (lambda *_: None, 10),
}


@dataclass
class Attack:
    """Makes connections of all kinds on a few threads.

    Attributes:
        job: whom to attack.
        seed: of the choices.
        kinds: names of KINDS to choose from.
        made: how many connections were made, by kind.
        refused: connections that the kernel did not let through (the port closed).
    """

    job: Job
    seed: int
    kinds: tuple[str, ...] = tuple(KINDS)
    made: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: int = 0
    _held: collections.deque[socket.socket] = field(default_factory=collections.deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failure: BaseException | None = None

    def run(self, connections: int, *, threads: int = 3) -> None:
        """Makes that many connections; raises AcceptedError when one got in."""
        workers = [
            threading.Thread(
                target=self._work,
                args=(random.Random(f"{self.seed} {n}"), connections // threads),
            )
            for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for sock in self._held:
            sock.close()
        self._held.clear()
        if self._failure is not None:
            raise self._failure

    def _work(self, rng: random.Random, connections: int) -> None:
        names = self.kinds
        weights = [KINDS[name][1] for name in names]
        try:
            for _ in range(connections):
                if self._failure is not None:
                    return
                self._one(rng.choices(names, weights)[0], rng)
        except BaseException as error:
            self._failure = error

    def _one(self, name: str, rng: random.Random) -> None:
        where = rng.choice(self.job.ports)
        try:
            if name == "silent":
                self._hold(_connect(where))
            else:
                KINDS[name][0](self.job, where, rng)
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            with self._lock:
                self.refused += 1
            return
        with self._lock:
            self.made[name] += 1

    def _hold(self, sock: socket.socket) -> None:
        """Keeps a silent connection open; gives up the oldest one."""
        with self._lock:
            self._held.append(sock)
            oldest = self._held.popleft() if len(self._held) > _MOST_HELD else None
        if oldest is not None:
            oldest.settimeout(_PATIENCE_S)
            with oldest:
                _drain(oldest, 0)


async def record(address: tuple[str, int], secret: bytes, job: str) -> bytes:
    """What a right client sends to the store while it adds 1 to a key."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, address)
    sent: list[bytes] = []

    class Recorder(Channel):
        async def _write(self, data: bytes, fds: list[int]) -> None:
            sent.append(data)
            await super()._write(data, fds)

    channel = Recorder(sock)
    await channel.handshake_as_client(secret, {**_CLAIMS, "job": job})
    await channel.send({"op": "add", "key": "replayed", "amount": 1})
    await channel.receive()
    channel.close()
    return b"".join(sent)
