"""A bad network between ranks: a relay that delays, cuts, swallows and changes bytes.

Every TCP link of a job goes through it without the ranks knowing: they find each other
through a store of the test, which passes on the relay's addresses in place of their own
(`RelayedStore`). Nothing in tfdist is there for it. Links are known by the pair of
ranks, read from the first message of their handshake. Each fault counts what it did,
so that a test can show that it took effect.
"""

from __future__ import annotations

import collections
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.store import StoreServer, StoreThread

_RECORD = re.compile(r"\d+/rank/(\d+)")
_PART_BYTES = 64 << 10
_WAITING_PARTS = 64  # read ahead of the writer, so that a slow way slows its sender


@dataclass
class Fault:
    """What happens to the bytes of one direction; may be changed at any time.

    Attributes:
        delay_s: every byte comes that much later.
        jitter_s: and up to that much more, at random; order stays.
        bytes_per_s: at most, None: no limit.
        piece_bytes: most bytes written at once, e.g. 1; None: no limit.
        stalled: nothing is read any more; the sender's buffers fill.
        swallowed: everything is read, nothing is passed on.
        edit: changes a part; gets the bytes and a seeded random generator.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    piece_bytes: int | None = None
    stalled: bool = False
    swallowed: bool = False
    edit: Callable[[bytes, random.Random], bytes] | None = None


def flip_one_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit of the part is another one."""
    at = rng.randrange(8 * len(data))
    changed = bytearray(data)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def repeat_some(data: bytes, rng: random.Random) -> bytes:
    """A piece of the part comes twice."""
    end = rng.randrange(1, len(data) + 1)
    return data[:end] + data[rng.randrange(end) : end] + data[end:]


def drop_some(data: bytes, rng: random.Random) -> bytes:
    """A piece of the part is missing."""
    begin = rng.randrange(len(data))
    return data[:begin] + data[rng.randrange(begin, len(data)) + 1 :]


def once(edit: Callable[[bytes, random.Random], bytes]) -> Any:
    """The edit, of one part only; of those of at least 64 bytes."""
    done = threading.Lock()

    def edited(data: bytes, rng: random.Random) -> bytes:
        if len(data) >= 64 and done.acquire(blocking=False):
            return edit(data, rng)
        return data

    return edited


@dataclass
class Way:
    """One direction of one connection, and what was done to it.

    Attributes:
        sender, receiver: ranks.
        passed: bytes written to the receiver.
        swallowed: bytes that never were.
        edited: parts that were changed.
    """

    sender: int
    receiver: int
    source: socket.socket
    target: socket.socket
    fault: Fault
    rng: random.Random
    passed: int = 0
    swallowed: int = 0
    edited: int = 0
    _queue: collections.deque[tuple[float, bytes]] = field(
        default_factory=collections.deque
    )
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False

    def start(self) -> None:
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        last_s = 0.0
        try:
            while data := self._next():
                fault = self.fault
                if fault.swallowed:
                    self.swallowed += len(data)
                    continue
                if fault.edit is not None:
                    changed = fault.edit(data, self.rng)
                    self.edited += changed != data
                    data = changed
                at_s = time.monotonic() + fault.delay_s
                last_s = max(last_s, at_s + self.rng.uniform(0.0, fault.jitter_s))
                with self._changed:
                    while len(self._queue) >= _WAITING_PARTS:
                        self._changed.wait()
                    self._queue.append((last_s, data))
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _next(self) -> bytes:
        while self.fault.stalled:
            time.sleep(0.005)
        return self.source.recv(_PART_BYTES)

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._queue and not self._over:
                        self._changed.wait()
                    if not self._queue:
                        break
                    at_s, data = self._queue.popleft()
                    self._changed.notify_all()
                time.sleep(max(0.0, at_s - time.monotonic()))
                self._put(data)
            if not self.fault.swallowed:
                self.target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _put(self, data: bytes) -> None:
        fault = self.fault
        if fault.swallowed or fault.stalled:  # it was on its way when that began
            while self.fault.stalled:
                time.sleep(0.005)
            if self.fault.swallowed:
                self.swallowed += len(data)
                return
        piece = fault.piece_bytes or len(data)
        for begin in range(0, len(data), piece):
            part = data[begin : begin + piece]
            self.target.sendall(part)
            self.passed += len(part)
            if fault.bytes_per_s:
                time.sleep(len(part) / fault.bytes_per_s)


class Relay:
    """All connections of a job.

    Args:
        seed: of every random choice.
        fault: for both directions of all connections, from their first byte.
    """

    def __init__(self, seed: int = 0, fault: Fault | None = None) -> None:
        self.ways: dict[tuple[int, int], Way] = {}  # (sender, receiver)
        self._seed = seed
        self._fault = fault or Fault()
        self._listeners: list[socket.socket] = []
        self._lock = threading.Lock()

    def stand_in(self, address: tuple[str, int]) -> tuple[str, int]:
        """An address that leads to `address` through this relay."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept, args=(listener, address), daemon=True
        ).start()
        host, port = listener.getsockname()
        return host, port

    def _accept(self, listener: socket.socket, address: tuple[str, int]) -> None:
        while True:
            try:
                source, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._connect, args=(source, address), daemon=True
            ).start()

    def _connect(self, source: socket.socket, address: tuple[str, int]) -> None:
        try:
            target = socket.create_connection(address, timeout=10.0)
            target.settimeout(None)
            hello = source.recv(auth.HELLO_BYTES, socket.MSG_WAITALL)
            length = int.from_bytes(hello[-2:], "big")
            hello += source.recv(length, socket.MSG_WAITALL)
            claims = json.loads(hello[auth.HELLO_BYTES :])
            low, high = int(claims["to"]), int(claims["from"])
            for sock in (source, target):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target.sendall(hello)
        except (OSError, KeyError, ValueError):
            source.close()
            return
        with self._lock:
            for sender, receiver, one, other in (
                (high, low, source, target),
                (low, high, target, source),
            ):
                way = Way(
                    sender,
                    receiver,
                    one,
                    other,
                    Fault(**vars(self._fault)),
                    random.Random(f"{self._seed} {sender} {receiver}"),
                )
                self.ways[sender, receiver] = way
                way.start()

    def between(self, one: int, other: int) -> list[Way]:
        """Both directions of the connection of two ranks."""
        return [self.ways[one, other], self.ways[other, one]]

    def cut(self, one: int, other: int) -> None:
        """Resets the connection of two ranks, at both ends."""
        at_once = struct.pack("ii", 1, 0)
        for way in self.between(one, other):
            way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        for way in self.between(one, other):
            try:
                way.source.shutdown(socket.SHUT_RD)  # wakes the reader
            except OSError:
                pass  # the rank has closed it already: the other end was first
            way.source.close()

    def close(self) -> None:
        """Ends everything."""
        for listener in self._listeners:
            listener.close()
        for way in self.ways.values():
            way.fault.stalled = False
            way.fault.swallowed = True
            for sock in (way.source, way.target):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                sock.close()


class _RelayedServer(StoreServer):
    relay: Relay

    def set(self, key: str, value: Any) -> None:
        if _RECORD.fullmatch(key):
            value = {**value, "address": self.relay.stand_in(tuple(value["address"]))}
        super().set(key, value)


class RelayedStore(StoreThread):
    """The store of a job whose TCP links go through `relay`."""

    def __init__(self, secret: bytes, relay: Relay, *, job: str) -> None:
        super().__init__(secret, job=job)
        self._relay = relay

    def _start(self, ready: threading.Event) -> None:
        self._server = _RelayedServer(self._sock, self._secret, self._job)
        self._server.relay = self._relay
        self._server.start()
        ready.set()
