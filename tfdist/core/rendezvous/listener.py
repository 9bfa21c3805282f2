"""A listening socket that unauthenticated connections cannot block or exhaust.

A separate task handles each connection, with a deadline of 2 s for the handshake. At
most 64 connections may be unauthenticated. Jobs of more than 64 ranks have a longer
deadline, and jobs of more than 32 ranks a higher limit. At the limit, a new connection
displaces the oldest unauthenticated connection of the address that has the most of
them, so that a flood from one host does not block other hosts. A connection without
proof of the job's secret is closed, and is counted in a warning that is logged at most
every 10 s. A client that has the secret but belongs to a different job or purpose is
sent the reason.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel, ChannelClosed

MAX_UNAUTHENTICATED = 64
_WARN_EVERY_S = 10.0
_BACKLOG = 512
_log = logging.getLogger("tfdist")


class Listener:
    """Accepts connections on one socket and passes authenticated channels to `serve`.

    Args:
        sock: bound stream socket, which the listener owns.
        secret: the job's secret.
        refusal: returns why a client with these claims is refused; "" if it is
            accepted.
        serve: called with each authenticated channel, which it then owns.
        size: number of ranks that may connect at once; a large number raises the
            deadline and the limit.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        secret: bytes,
        refusal: Callable[[dict[str, Any]], str],
        serve: Callable[[Channel], Awaitable[None]],
        size: int = 1,
    ) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._secret = secret
        self._refusal = refusal
        self._serve = serve
        self._size = size
        self._room = max(MAX_UNAUTHENTICATED, 2 * size)
        self._unauthenticated: dict[
            asyncio.Task[None], str
        ] = {}  # task → address; oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused_count = 0
        self._warned_at = -_WARN_EVERY_S
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to accept connections on the running loop."""
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stops accepting, and ends all connections that are still being served."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    def abandon(self) -> None:
        """Closes the socket in a forked child, where the loop does not run."""
        self._sock.close()

    @property
    def open_connections(self) -> int:
        """Returns the number of authenticated connections being served."""
        return len(self._tasks) - len(self._unauthenticated)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                # No descriptor is free, or the client is gone. Continue after a pause.
                self._refuse(error)
                await asyncio.sleep(0.02)
                continue
            if len(self._unauthenticated) >= self._room:
                self._drop_oldest()
            source = address[0] if sock.family != socket.AF_UNIX else "this host"
            channel = Channel(sock, size=self._size)
            task = asyncio.create_task(self._connection(channel, source))
            self._unauthenticated[task] = source
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _drop_oldest(self) -> None:
        busiest, _ = Counter(self._unauthenticated.values()).most_common(1)[0]
        oldest = next(
            t for t, address in self._unauthenticated.items() if address == busiest
        )
        del self._unauthenticated[oldest]
        oldest.cancel()
        self._refuse(
            AuthenticationError(
                f"more than {self._room} connections at once did not authenticate"
            ),
            busiest,
        )

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._unauthenticated.pop(task, None)

    async def _connection(self, channel: Channel, source: str) -> None:
        try:
            why = self._refusal(await channel.handshake_as_server(self._secret))
            if why:
                await channel.refuse(why)
                raise AuthenticationError(why)
            await channel.accept()
        except (AuthenticationError, OSError, TimeoutError) as error:
            channel.close()
            self._refuse(error, source)
            return
        except BaseException:
            channel.close()
            raise
        task = asyncio.current_task()
        if task is not None:
            self._unauthenticated.pop(task, None)
        try:
            await self._serve(channel)
        except (ChannelClosed, ConnectionError, AuthenticationError) as error:
            _log.debug("a connection ended: %s", error)

    def _refuse(self, error: BaseException, source: str = "") -> None:
        self._refused_count += 1
        if time.monotonic() - self._warned_at < _WARN_EVERY_S:
            return
        reason = str(error) or "no handshake within its deadline"
        _log.warning(
            "refused %d connection(s) at the rendezvous, the last one%s because: %s",
            self._refused_count,
            f" (from {source})" if source else "",
            reason,
        )
        self._warned_at = time.monotonic()
        self._refused_count = 0
