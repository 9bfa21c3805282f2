"""The server of the store, on an asyncio loop or on a separate thread."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import bind, join_address
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel, ChannelClosed
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.store.keys import MEMBER, PURPOSE, SESSION, failure_key

MAX_KEYS = 1 << 18
_MAX_WAIT_S = 86400.0
_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Waiter:
    """A client that waits for keys, with the keys that are still missing."""

    missing: set[str]
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class StoreServer:
    """The server of the store; runs on one asyncio loop.

    Args:
        sock: bound TCP socket, which the server owns.
        secret: the job's secret.
        job: name of the job; ranks must claim the same name.
        size: number of ranks that will connect.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, job: str = "", size: int = 1
    ) -> None:
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self.values: dict[str, Any] = {SESSION: secrets.token_hex(8)}
        self.joined = False  # whether any rank has ever connected
        # Called with each key that a client sets, and its value.
        self.on_set: Callable[[str, Any], None] | None = None
        self._job = job
        self._newest_generation = 0
        self._waiting: dict[str, list[_Waiter]] = {}
        self._answers: dict[tuple[str, ...], bytes] = {}
        self._listener = Listener(
            sock,
            secret=secret,
            refusal=self._refusal,
            serve=self._serve,
            size=size,
        )

    def start(self) -> None:
        """Starts to serve on the running loop."""
        self._listener.start()

    def _refusal(self, claims: dict[str, Any]) -> str:
        """Returns why an authenticated client is refused; "" if it is accepted."""
        purpose, generation = claims.get("purpose"), claims.get("generation")
        if purpose not in (PURPOSE, MEMBER) or type(generation) is not int:
            return f"the store does not serve {claims!r:.100}"
        found = auth.difference({"job": self._job}, claims, {})
        # A rank may still be in an earlier generation than the job.
        if not found and purpose == MEMBER and generation < self._newest_generation:
            expected = {"generation": self._newest_generation}
            found = auth.difference(expected, claims, {})
        return found and f"the rendezvous refused this rank: {found}"

    async def close(self, drain_s: float = 0.0) -> None:
        """Closes the server; first gives clients at most `drain_s` seconds to leave."""
        deadline = time.monotonic() + drain_s
        while self._listener.open_connections and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        await self._listener.close()

    def set(self, key: str, value: Any) -> None:
        """Sets a key and wakes the clients that wait for it."""
        if len(self.values) >= MAX_KEYS and key not in self.values:
            raise ValueError(f"the store already holds {MAX_KEYS} keys")
        if key in self.values:
            self._answers.clear()
        self.values[key] = value
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.complete.set()

    def remove(self, key: str) -> None:
        """Removes a key, if it is set."""
        if self.values.pop(key, None) is not None:
            self._answers.clear()

    def remove_prefix(self, prefix: str) -> None:
        """Removes the keys that start with `prefix`."""
        for key in [key for key in self.values if key.startswith(prefix)]:
            del self.values[key]
        self._answers.clear()

    async def _wait(self, keys: list[str], timeout_s: float) -> list[str]:
        """Waits until all keys are set; returns the keys that are not set in time."""
        missing = {key for key in keys if key not in self.values}
        if not missing:
            return []
        waiter = _Waiter(missing)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiter)
        try:
            async with asyncio.timeout(min(max(timeout_s, 0.0), _MAX_WAIT_S)):
                await waiter.complete.wait()
        except TimeoutError:
            pass
        finally:
            for key in missing & self._waiting.keys():
                self._waiting[key].remove(waiter)
                if not self._waiting[key]:
                    del self._waiting[key]
        return [key for key in keys if key in missing]

    def _values_of(self, keys: list[str]) -> bytes:
        """Returns the encoded values; cached, as all ranks wait for the same keys."""
        name = tuple(keys)
        if name not in self._answers:
            values = [self.values[key] for key in keys]
            self._answers[name] = auth.encode({"values": values})
        return self._answers[name]

    async def _serve(self, channel: Channel) -> None:
        try:
            if channel.claims["purpose"] == MEMBER:
                await self._serve_member(channel)
            else:
                while True:
                    request = await channel.receive()
                    answer = await self._answer(request, channel)
                    await channel.send_encoded(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise AuthenticationError(f"a malformed request: {error!r:.80}") from error
        finally:
            channel.close()

    async def _answer(self, request: dict[str, Any], channel: Channel) -> bytes:
        operation = request["op"]
        if operation == "set":
            self.set(str(request["key"]), request["value"])
            if self.on_set is not None:
                self.on_set(str(request["key"]), request["value"])
            return auth.encode({})
        if operation == "add":
            key = str(request["key"])
            total = int(self.values.get(key, 0)) + int(request["amount"])
            self.set(key, total)
            return auth.encode({"value": total})
        if operation == "wait":
            keys = [str(key) for key in request["keys"]]
            waiting = self._wait(keys, float(request["timeout_s"]))
            missing = await _while_connected(channel, waiting)
            return (
                auth.encode({"missing": missing}) if missing else self._values_of(keys)
            )
        raise ValueError(f"unknown operation {operation!r:.40}")

    async def _serve_member(self, channel: Channel) -> None:
        """Watches one rank while the ranks connect; sends the first failure to it."""
        member = await channel.receive()
        self.joined = True
        generation = int(channel.claims["generation"])
        self._newest_generation = max(self._newest_generation, generation)
        key = failure_key(generation)
        pushing = asyncio.create_task(self._push(channel, key))
        left = False
        try:
            left = (await channel.receive()).get("op") == "leave"
        finally:
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            if not left and key not in self.values:
                cause = "its process ended while the ranks were connecting"
                who = {name: member[name] for name in ("rank", "host", "pid")}
                self.set(key, {**who, "cause": cause})

    async def _push(self, channel: Channel, key: str) -> None:
        await self._wait([key], _MAX_WAIT_S)
        await channel.send({"values": [self.values[key]]})


async def _while_connected(
    channel: Channel, waiting: Coroutine[Any, Any, _Result]
) -> _Result:
    """Waits on behalf of a client, which must not send anything until it is answered.

    Raises:
        ChannelClosed: the client has closed its connection.
    """
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    closed = None if task.done() else asyncio.ensure_future(channel.until_readable())
    try:
        if closed is not None:
            await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ChannelClosed("the client no longer waits for its answer")
        return task.result()
    finally:
        tasks = [one for one in (task, closed) if one is not None]
        for one in tasks:
            one.cancel()
        # Both must end before the channel is read again: they use the same socket.
        await asyncio.gather(*tasks, return_exceptions=True)


class StoreThread:
    """A server on a separate thread, for a process without a loop (tfdistrun).

    Args:
        secret: the job's secret.
        host: address on which to listen.
        job: name of the job; ranks must claim the same name.
        size: number of ranks that will connect.
        on_set: function that is called on the server's thread with each key that a
            rank sets, and its value.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        job: str = "",
        size: int = 1,
        on_set: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._sock = bind(host, 0)
        self._secret = secret
        self._job = job
        self._size = size
        self._on_set = on_set
        self._loop = asyncio.new_event_loop()
        self._server: StoreServer | None = None
        self._thread = threading.Thread(
            target=self._run, name="tfdist-store", daemon=True
        )
        self.address = join_address(*self._sock.getsockname()[:2])

    def start(self) -> None:
        """Starts to serve; returns when the server is listening."""
        ready = threading.Event()
        self._loop.call_soon(self._start, ready)
        self._thread.start()
        if not ready.wait(10.0):
            raise RendezvousError(13, "the rendezvous store did not start in 10 s")

    def _start(self, ready: threading.Event) -> None:
        self._server = StoreServer(self._sock, self._secret, self._job, self._size)
        self._server.on_set = self._on_set
        self._server.start()
        ready.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def set(self, key: str, value: Any) -> None:
        """Schedules the setting of a key, which wakes the ranks that wait for it."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.set, key, value)

    def remove_prefix(self, prefix: str) -> None:
        """Schedules the removal of the keys that start with `prefix`."""
        self._loop.call_soon_threadsafe(self._remove_prefix, prefix)

    def remove(self, key: str) -> None:
        """Schedules the removal of a key."""
        self._loop.call_soon_threadsafe(self._remove, key)

    def _remove(self, key: str) -> None:
        if self._server is not None:
            self._server.remove(key)

    def _remove_prefix(self, prefix: str) -> None:
        if self._server is not None:
            self._server.remove_prefix(prefix)

    def values(self, prefix: str) -> dict[str, Any]:
        """Returns a copy of the keys that start with `prefix`."""
        if self._server is None:
            return {}
        return {
            key: value
            for key, value in self._server.values.copy().items()
            if key.startswith(prefix)
        }

    @property
    def joined(self) -> bool:
        """Returns whether any rank has called `tfdist.init()`."""
        return self._server is not None and self._server.joined

    def close(self) -> None:
        """Ends the server and its thread; takes at most 4 s."""
        if not self._thread.is_alive() or self._server is None:
            return
        closing = asyncio.run_coroutine_threadsafe(self._server.close(), self._loop)
        try:
            closing.result(2.0)
        except TimeoutError:
            closing.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)
