"""Server of `tfdist.data.scatter`, which reads for other ranks and sends the elements.

A connection serves one iteration of one rank over one dataset. One thread with an event
loop accepts connections and does the handshakes. Each authenticated connection has a
thread, which reads and sends elements while the receiver's buffer has room. The
iteration ends when the connection ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import bind
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel
from tfdist.core.rendezvous.links import SHM, TCP, LinkCredentials, unix_listener
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.stream import Stream
from tfdist.data._scatter_stream import describe_error, send_all

PURPOSE = "read"

_log = logging.getLogger("tfdist")
_START_S = 10.0
_CLOSE_S = 2.0
_MAX_UNREAD = 16  # maximum number of unread iterators that are kept
_MAX_SKIPPED = 10_000  # maximum number of consecutive unread iterators
_running: weakref.WeakSet[ReadingService] = weakref.WeakSet()


def claims(
    credentials: LinkCredentials,
    transport: str,
    *,
    reader: int,
    dataset: int,
    iteration: int,
) -> dict[str, Any]:
    """Returns the claims with which a rank authenticates a connection to its reader.

    Args:
        credentials: the credentials of the rank.
        transport: "tcp", or "shm" for a Unix socket on the same host.
        reader: the rank to connect to.
        dataset: number of the call of `scatter` that created the dataset.
        iteration: number of iterators of the dataset that the rank created earlier.
    """
    common = credentials.claims(transport, reader, PURPOSE)
    return {**common, "dataset": dataset, "iteration": iteration}


class Share:
    """The dataset of one rank, which a different rank, the reader, reads.

    The reader creates one iterator for each iterator that the rank creates, in the same
    order. This includes iterators that the rank never reads from, because a dataset
    that is reshuffled in every iteration draws a seed whenever an iterator is created.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()
        self._created = 0
        self._unread: dict[int, Any] = {}

    def iterator(self, number: int) -> Any:
        """Returns the reader's iterator for iterator `number` of the rank.

        Raises:
            ValueError: the iterator is already being read or was discarded, or too many
                iterators before it were never read from.
        """
        with self._lock, tf.device("CPU:0"):
            if number - self._created > _MAX_SKIPPED:
                raise ValueError(
                    f"iterator {number} follows iterator {self._created}, and more "
                    f"than {_MAX_SKIPPED} iterators between them were never read "
                    "from; create an iterator only when you read from it"
                )
            while self._created <= number:
                self._unread[self._created] = iter(self._dataset)
                self._created += 1
            found = self._unread.pop(number, None)
            while len(self._unread) > _MAX_UNREAD:
                del self._unread[min(self._unread)]
        if found is None:
            raise ValueError(
                f"iterator {number} is already being read, or was discarded because "
                f"the reader keeps only the newest {_MAX_UNREAD} iterators that have "
                "not been read from; read from an iterator before you create that many "
                "newer iterators, or create a new iterator"
            )
        return found


class ReadingService:
    """Service of a reader, which sends elements to the ranks that it reads for.

    Args:
        credentials: this rank's credentials.
        address: IP address to listen on.
        timeout_s: seconds after which sending fails if a rank receives nothing.
    """

    def __init__(
        self, credentials: LinkCredentials, address: str, timeout_s: float
    ) -> None:
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._shares: dict[tuple[int, int], Share] = {}  # by dataset and rank
        self._streams: set[Stream] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()  # guards the three attributes above
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._listeners: list[Listener] = []
        tcp = bind(address, 0)
        local, unix_name = unix_listener()
        self._sockets = {TCP: tcp, SHM: local}
        self.listening = {
            "address": list(tcp.getsockname()[:2]),
            "unix_name": unix_name,
        }
        self._thread = threading.Thread(
            target=self._run, name="tfdist-reading", daemon=True
        )
        self._pid = os.getpid()
        _running.add(self)
        ready = threading.Event()
        self._loop.call_soon(self._listen, ready)
        self._thread.start()
        if not ready.wait(_START_S):
            raise RuntimeError(f"the reading service did not start in {_START_S:g} s")

    def add(self, dataset: int, rank: int, share: Share) -> None:
        """Registers a dataset, which is read when `rank` connects.

        Args:
            dataset: number of the call of `scatter` that created the dataset.
            rank: the rank to which the dataset belongs.
            share: the dataset.
        """
        with self._lock:
            self._shares[dataset, rank] = share

    def remove(self, keys: set[tuple[int, int]]) -> None:
        """Removes datasets; iterations that have begun continue.

        Args:
            keys: dataset and rank, as passed to `add`; others are ignored.
        """
        with self._lock:
            for key in keys:
                self._shares.pop(key, None)

    def close(self) -> None:
        """Ends all connections and threads; waits for at most 2 s."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            streams, threads = list(self._streams), list(self._threads)
            self._shares.clear()
        for stream in streams:
            stream.hang_up()
        self._loop.call_soon_threadsafe(self._loop.stop)
        deadline = time.monotonic() + _CLOSE_S
        for thread in [self._thread, *threads]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        """Closes the listening sockets in a forked child, which has inherited them."""
        for listener in self._listeners:
            listener.abandon()

    # ---- the loop ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            ending = [listener.close() for listener in self._listeners]
            self._loop.run_until_complete(asyncio.gather(*ending))
        finally:
            self._loop.close()

    def _listen(self, ready: threading.Event) -> None:
        for transport, sock in self._sockets.items():
            listener = Listener(
                sock,
                secret=self._credentials.secret,
                refusal=functools.partial(self._refusal, transport),
                serve=self._serve,
                size=self._credentials.size,
            )
            self._listeners.append(listener)
        self._loop.create_task(self._start(ready))

    async def _start(self, ready: threading.Event) -> None:
        for listener in self._listeners:
            listener.start()
        ready.set()

    def _refusal(self, transport: str, found: dict[str, Any]) -> str:
        """Returns the reason to refuse a connection with these claims; "" to accept."""
        rank = self._credentials.rank
        expected = {**self._credentials.claims(transport, rank, PURPOSE), "to": rank}
        del expected["from"]
        wrong = auth.difference(expected, found, {"to": "rank that is called"})
        key = (found.get("dataset"), found.get("from"))
        if not wrong and not all(type(one) is int for one in key):
            wrong = f"no dataset {key[0]!r:.20} for rank {key[1]!r:.20}"
        with self._lock:
            if not wrong and key not in self._shares:
                wrong = f"this rank does not read dataset {key[0]} for rank {key[1]}"
        number = found.get("iteration")
        if not wrong and (type(number) is not int or not 0 <= number < 1 << 53):
            wrong = f"no iteration {number!r:.20}"
        return wrong and f"rank {rank} refused to read: {wrong}"

    async def _serve(self, channel: Channel) -> None:
        """Starts a thread that reads and sends elements over the connection."""
        stream = Stream(channel, send_timeout_s=self._timeout_s)
        found = channel.claims
        thread = threading.Thread(
            target=self._read_for,
            args=(stream, found["dataset"], found["from"], found["iteration"]),
            name=f"tfdist-reading-for-{found['from']}",
            daemon=True,
        )
        with self._lock:
            if self._closing:
                stream.close()
                return
            self._streams.add(stream)
            self._threads = {one for one in self._threads if one.is_alive()}
            thread.start()
            self._threads.add(thread)

    # ---- the thread of a connection ----

    def _read_for(self, stream: Stream, dataset: int, rank: int, number: int) -> None:
        try:
            window = stream.receive().get("window")
            with self._lock:
                share = self._shares.get((dataset, rank))
            if share is not None and type(window) is int:
                send_all(stream, share.iterator(number), window)
        except (OSError, AuthenticationError) as error:
            _log.debug("reading for rank %d ended: %s", rank, error)
        except Exception as error:
            _send_error(stream, error)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)


def _send_error(stream: Stream, error: Exception) -> None:
    """Sends an error to the receiving rank, which raises it."""
    try:
        stream.send(describe_error(error))
        while True:
            stream.receive()
    except (OSError, AuthenticationError) as lost:
        _log.debug("the connection ended after an error was sent: %s", lost)


def _abandon_all() -> None:
    for service in list(_running):
        service.abandon()


os.register_at_fork(after_in_child=_abandon_all)
