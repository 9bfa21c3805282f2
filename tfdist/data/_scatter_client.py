"""Client of `tfdist.data.scatter`, which receives elements from this rank's reader.

Each iterator of the dataset opens a separate connection, with a thread that receives
elements in advance. Elements are sent in blocks (`_element_codec`), which TensorFlow
gets from a generator. While no block is available, the generator yields an empty block
every 20 ms, so that TensorFlow can discard the iterator if it is no longer used.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.core import native
from tfdist.core.rendezvous.auth import AuthenticationError, RefusedError
from tfdist.core.rendezvous.channel import Channel
from tfdist.core.rendezvous.links import SHM, TCP, LinkCredentials
from tfdist.core.rendezvous.stream import Stream
from tfdist.data import _element_codec
from tfdist.data._scatter_server import claims

_POLL_S = 0.02
_RETRY_S = 0.05
_CLOSE_S = 2.0
_VERDICT_S = 0.5  # time in which the ranks agree on the cause of a failure


@dataclass(frozen=True, kw_only=True)
class Source:
    """The reader of a dataset, and the settings of the connection to it.

    Attributes:
        credentials: this rank's credentials.
        reader: the rank that reads.
        same_host: whether to connect by a Unix socket on this host instead of by TCP.
        address: address on which the reader listens for ranks of different hosts.
        unix_name: name of the Unix socket on which the reader listens for ranks of the
            same host.
        dataset: number of the call of `scatter` that created the dataset.
        window: maximum number of bytes received in advance.
        timeout_s: seconds to wait for an element.
        generation: number of the generation that created the dataset.
    """

    credentials: LinkCredentials = field(repr=False)
    reader: int
    same_host: bool
    address: tuple[str, int]
    unix_name: str
    dataset: int
    window: int
    timeout_s: float
    generation: int

    @property
    def description(self) -> str:
        """Description of the reader, for messages."""
        return f"rank {self.reader}, which reads for rank {self.credentials.rank}"


class Receivers:
    """The open iterations of this process; `shutdown` closes them."""

    def __init__(self) -> None:
        self._iterations: weakref.WeakSet[Iteration] = weakref.WeakSet()

    def add(self, iteration: Iteration) -> None:
        """Registers an iteration, so that `close` closes it."""
        self._iterations.add(iteration)

    def close(self) -> None:
        """Closes all iterations; waits for at most 2 s."""
        deadline = time.monotonic() + _CLOSE_S
        iterations = list(self._iterations)
        for iteration in iterations:
            iteration.close()
        for iteration in iterations:
            iteration.join(max(0.0, deadline - time.monotonic()))


class Iteration:
    """One iteration over the elements that a reader sends, with its receiving thread.

    Args:
        source: the reader.
        number: function that returns how many iterators of the dataset were created
            before this one. It is called in the thread.
        dtypes: dtypes of the tensors in an element.
    """

    def __init__(
        self,
        source: Source,
        number: Callable[[], int],
        dtypes: Sequence[tf.DType],
    ) -> None:
        self._source = source
        self._number = number
        self._dtypes = dtypes
        self._blocks: collections.deque[list[np.ndarray]] = collections.deque()
        self._condition = (
            threading.Condition()
        )  # guards the blocks and the attributes below
        self._stream: Stream | None = None
        self._ended = False
        self._failure: str | None = None
        self._closed = False
        self._waiting_since: float | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="tfdist-receiving", daemon=True
        )
        self._thread.start()

    # ---- for the generator ----

    def next_block(self) -> list[np.ndarray] | None:
        """Returns the next block: one array per tensor, with the elements along axis 0.

        Waits for at most 20 ms.

        Returns:
            The block; an empty list if no block is available yet; None at the end of
            the dataset.

        Raises:
            RuntimeError: the reader or its dataset failed, a rank has failed, no
                element was received within `timeout_s`, or the iteration was closed.
        """
        with self._condition:
            if not self._blocks and not self._is_finished():
                self._condition.wait(_POLL_S)
            if self._blocks:
                self._waiting_since = None
                block = self._blocks.popleft()
            elif self._failure is not None:
                raise RuntimeError(self._failure)
            elif self._closed:
                raise RuntimeError(
                    _public("shutdown", "tfdist.shutdown() ended the iteration", None)
                )
            elif self._ended:
                return None
            else:
                self._check_waiting()
                return []
        if self._stream is not None:
            self._acknowledge(self._stream)
        return block

    def _is_finished(self) -> bool:
        return self._ended or self._closed or self._failure is not None

    def _acknowledge(self, stream: Stream) -> None:
        try:
            stream.send({"taken": 1})
        except OSError:
            pass  # the connection has ended; blocks received earlier are valid

    def _check_waiting(self) -> None:
        """Raises if a rank has failed or the next element is overdue."""
        failure = native.failure()
        if failure is not None:
            raise RuntimeError(_public_of(failure))
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        limit_s = self._source.timeout_s
        if now - self._waiting_since > limit_s:
            raise RuntimeError(
                _public(
                    "timeout",
                    f"{self._source.description}, sent no element within {limit_s:g} s "
                    "(TFDIST_TIMEOUT_S); check why its dataset is slow, or increase "
                    "TFDIST_TIMEOUT_S",
                    self._source.reader,
                )
            )

    def close(self) -> None:
        """Closes the connection and discards received blocks."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._closed = True
            self._blocks.clear()
            self._condition.notify_all()
            stream = self._stream
        if stream is not None:
            stream.hang_up()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended; call it after `close`."""
        self._thread.join(timeout_s)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            stream = asyncio.run(self._connect(self._number()))
            with self._condition:
                self._stream = stream
                closed = self._closed
            try:
                if not closed:
                    self._receive_all(stream)
            finally:
                stream.close()
        except Exception as error:
            self._fail(error)

    async def _connect(self, number: int) -> Stream:
        source = self._source
        transport = SHM if source.same_host else TCP
        own_claims = claims(
            source.credentials,
            transport,
            reader=source.reader,
            dataset=source.dataset,
            iteration=number,
        )
        deadline = time.monotonic() + min(
            source.timeout_s, source.credentials.timeout_s
        )
        while True:
            channel = Channel(_socket(source), size=source.credentials.size)
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    address: Any = source.address
                    if source.same_host:
                        address = "\0" + source.unix_name
                    await asyncio.get_running_loop().sock_connect(channel.sock, address)
                    await channel.handshake_as_client(
                        source.credentials.secret, own_claims
                    )
                return Stream(channel, send_timeout_s=source.timeout_s)
            except (RefusedError, ConnectionRefusedError):
                channel.close()
                raise
            except (OSError, AuthenticationError, TimeoutError):
                channel.close()
                if self._closed or time.monotonic() + _RETRY_S >= deadline:
                    raise
            except BaseException:
                channel.close()
                raise
            await asyncio.sleep(_RETRY_S)

    def _receive_all(self, stream: Stream) -> None:
        stream.send({"window": self._source.window})
        while True:
            message = stream.receive()
            if "end" in message:
                with self._condition:
                    self._ended = True
                    self._condition.notify_all()
                return
            if "error" in message:
                self._set_failure(
                    f"{self._source.description}, got an error while reading: "
                    f"{message.get('class')}: {message['error']}"
                )
                return
            room = _element_codec.room_for(message, len(self._dtypes))
            stream.receive_data(memoryview(room))
            block = _element_codec.decode(message, room, self._dtypes)
            with self._condition:
                if not self._closed:
                    self._blocks.append(block)
                    self._condition.notify_all()

    def _fail(self, error: Exception) -> None:
        """Stores the reason why the connection could not be opened or was lost.

        Waits for at most 0.5 s for the ranks' verdict, which names the actual cause.
        """
        until = time.monotonic() + _VERDICT_S
        while not self._closed and time.monotonic() < until:
            failure = native.failure()
            if failure is not None:
                self._set_failure(_public_of(failure))
                return
            time.sleep(_POLL_S)
        why = str(error) or type(error).__name__
        if isinstance(error, OSError):
            why = f"{why}; its process has ended or called tfdist.shutdown()"
        text = f"{self._source.description}, has stopped sending: {why}"
        self._set_failure(_public("rank_failed", text, self._source.reader))

    def _set_failure(self, text: str) -> None:
        with self._condition:
            self._failure = text
            self._condition.notify_all()


def _socket(source: Source) -> socket.socket:
    if source.same_host:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.AF_INET6 if ":" in source.address[0] else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM)


def _public(kind: str, message: str, rank: int | None) -> str:
    """Returns a message that `errors.from_tf` recognizes in a TensorFlow error."""
    record = {"kind": kind, "cause": message}
    if rank is not None:
        record["rank"] = rank  # type: ignore[assignment]
    return f"tfdist: {message} [tfdist.error {json.dumps(record)}]"


def _public_of(error: native.CoreError) -> str:
    return f"tfdist: {error.message} [tfdist.error {json.dumps(error.payload)}]"
