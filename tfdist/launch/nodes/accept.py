"""The first host of `--nnodes`: waits for tfdistrun on all other hosts.

Every other host proves that it knows the secret (`core.rendezvous.auth`), and sends the
options that it was given. It then waits for a message from the first host: that all
hosts have connected, or why the job does not start. After this message, an agent uses
the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.core.rendezvous.address import bind, is_loopback
from tfdist.core.rendezvous.channel import Channel
from tfdist.core.rendezvous.errors import RendezvousError, invalid, numbers
from tfdist.core.rendezvous.listener import Listener
from tfdist.launch.connection import SealedConnection, watch_for_loss
from tfdist.launch.nodes.place import (
    PURPOSE,
    NodePlace,
    NodesError,
    claims,
    differences,
)
from tfdist.launch.output import complain
from tfdist.launch.signals import PASSED_ON, Signals

NOTICE_S = 10.0  # of waiting, after which a message is printed
_SEND_S = 2.0
_LOOKUP_S = 0.5  # between two attempts to resolve a host name


@dataclass(frozen=True)
class Nodes:
    """The other hosts of `--nnodes`.

    Attributes:
        address: address at which they have reached this host.
        connections: connection to each other host, by the number of the host.
        names: name of each other host, by the number of the host.
    """

    address: str
    connections: Mapping[int, SealedConnection]
    names: Mapping[int, str]


def accept_nodes(
    options: argparse.Namespace,
    place: NodePlace,
    secret: bytes,
    signals: Signals,
    timeout_s: float,
) -> Nodes | int:
    """Waits until all other hosts have connected.

    Args:
        options: options of the command line.
        place: place of this host.
        secret: the secret that all hosts share.
        signals: signals of this process, which end the wait.
        timeout_s: time limit in seconds.

    Returns:
        The hosts, or the number of the signal that ended the wait.

    Raises:
        NodesError: a host has different options, or is missing after the time limit.
        RendezvousError: this host cannot listen at the address.
    """
    return asyncio.run(_accept(options, place, secret, signals, timeout_s))


async def _accept(
    options: argparse.Namespace,
    place: NodePlace,
    secret: bytes,
    signals: Signals,
    timeout_s: float,
) -> Nodes | int:
    meeting = _Meeting(claims(options, place, socket.gethostname()), place)
    address = ""
    loop = asyncio.get_running_loop()
    loop.add_reader(signals.fileno(), lambda: meeting.on_signals(signals.take()))
    try:
        sock = await _bind(place, time.monotonic() + timeout_s, meeting)
        if sock is not None:
            address = str(sock.getsockname()[0])
            await _listen(sock, secret, meeting, timeout_s)
    finally:
        loop.remove_reader(signals.fileno())
    if meeting.signal is not None:
        why = "tfdistrun was terminated by a signal on the first host"
        await meeting.refuse_all(why, 128 + meeting.signal)
        return meeting.signal
    if why := meeting.why_not(timeout_s):
        code = 2 if meeting.wrong else 1
        await meeting.refuse_all(why, code)
        raise NodesError(why, code)
    await meeting.begin()
    channels = meeting.channels
    names = {n: node_name(n, one.claims["host"]) for n, one in channels.items()}
    connections = {n: SealedConnection(*one.release()) for n, one in channels.items()}
    return Nodes(address, connections, names)


async def _listen(
    sock: socket.socket, secret: bytes, meeting: _Meeting, timeout_s: float
) -> None:
    """Listens until all hosts have connected, or the job cannot start any more."""
    listener = Listener(
        sock,
        secret=secret,
        refusal=meeting.refusal,
        serve=meeting.serve,
        size=meeting.place.count,
    )
    listener.start()
    try:
        await meeting.wait(timeout_s)
    finally:
        await listener.close()


async def _bind(
    place: NodePlace, deadline: float, meeting: _Meeting
) -> socket.socket | None:
    """Binds a socket to the address of --rdzv, once its host name can be resolved.

    Returns:
        The socket; None after a signal.

    Raises:
        RendezvousError: this host cannot listen there, or other hosts cannot reach the
            address.
    """
    loop = asyncio.get_running_loop()
    host, port = place.address
    while True:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if meeting.signal is not None:
                return None
            if time.monotonic() >= deadline:
                raise invalid(
                    f"--rdzv {place.where}: {host} is not known on this host: {error}; "
                    "give an IP address of this host"
                ) from error
        await asyncio.sleep(_LOOKUP_S)
    own = [str(address[0]) for *_, address in found]
    if all(map(is_loopback, own)) and not is_loopback(host):
        raise invalid(
            f"--rdzv {place.where}: on this host, {host} is {own[0]}, which the other "
            "hosts cannot reach; give an IP address of this host"
        )
    for address in own[:-1]:
        with contextlib.suppress(RendezvousError):
            return bind(address, port)
    return bind(own[-1], port)


def node_name(number: int, host: str) -> str:
    """Returns the name of a host in messages.

    Example:
        >>> from tfdist.launch.nodes.accept import node_name
        >>> node_name(1, "gpu-b")
        'node 1 (gpu-b)'
    """
    return f"node {number} ({host})"


class _Meeting:
    """The hosts that have connected so far.

    Args:
        own: claims of this host.
        place: place of this host, the first one.

    Attributes:
        channels: connection to each other host, by the number of the host.
        place: place of this host.
        signal: signal that ends the wait; None if none came.
        wrong: why the job cannot start, even if all hosts connect; "" if it can.
    """

    def __init__(self, own: dict[str, Any], place: NodePlace) -> None:
        self.channels: dict[int, Channel] = {}
        self.signal: int | None = None
        self._own = own
        self.place = place
        self.wrong = ""
        self._changed = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        """Numbers of the hosts that have not connected."""
        return [n for n in range(1, self.place.count) if n not in self.channels]

    def why_not(self, timeout_s: float) -> str:
        """Returns why the job cannot start; "" if it can."""
        if self.wrong or not self.missing:
            return self.wrong
        return (
            f"{numbers(self.missing, 'node')} did not connect to {self.place.where} "
            f"within {timeout_s:g} s (--host-timeout-s): start tfdistrun on every host "
            "with its --node-rank, and make sure that no firewall blocks the connection"
        )

    async def wait(self, timeout_s: float) -> None:
        """Waits until all hosts have connected, or the job cannot start any more."""
        begin_s = time.monotonic()
        notice_s = begin_s + NOTICE_S
        while self.missing and not self.wrong and self.signal is None:
            until_s = min(notice_s, begin_s + timeout_s)
            left_s = until_s - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, left_s))
            except TimeoutError:
                if time.monotonic() >= begin_s + timeout_s:
                    return
                names = numbers(self.missing, "node")
                complain(f"waiting for {names} at {self.place.where}")
                notice_s = float("inf")
            self._changed.clear()

    def on_signals(self, received: list[int]) -> None:
        """Handles signals: one that ends the job also ends the wait."""
        for number in received:
            if number not in PASSED_ON:
                self.signal = number
                self._changed.set()

    def refusal(self, other: dict[str, Any]) -> str:
        """Returns why a host with these claims cannot take part; "" if it can."""
        if other.get("purpose") != PURPOSE:
            return (
                f"tfdistrun --nnodes {self.place.count} waits here for the tfdistrun "
                "of the other hosts: start the ranks with `tfdistrun --nnodes` there"
            )
        number, host = other.get("node"), f"{other.get('host')!s:.255}"
        if wrong := differences(self._own, other, f"on node {number!s:.20}"):
            self.wrong = (
                f"node {number!s:.20} ({host}) was started with other options: "
                f"{wrong}; give the same options on every host, and install the same "
                "version of tfdist"
            )
            self._changed.set()
            return self.wrong
        if not isinstance(number, int) or not 0 < number < self.place.count:
            return (
                f"expected --node-rank from 1 to {self.place.count - 1}, got "
                f"{number!s:.20}"
            )
        return ""

    async def serve(self, channel: Channel) -> None:
        """Keeps a host's connection until that host closes it.

        The connection replaces an earlier connection with the same host number:
        tfdistrun may have been restarted on that host.
        """
        number = channel.claims["node"]
        watch_for_loss(channel.sock)
        earlier = self.channels.get(number)
        self.channels[number] = channel
        self._changed.set()
        if earlier is not None:
            why = (
                f"{channel.claims['host']} has also connected as node {number}; give "
                "each host its own --node-rank"
            )
            await _tell(earlier, begin=False, why=why, code=2)
        # The other side sends nothing before the job begins, so the connection has
        # ended when it becomes readable.
        await channel.until_readable()
        if self.channels.get(number) is channel:
            del self.channels[number]
        channel.close()

    async def begin(self) -> None:
        """Tells all hosts that the job begins."""
        for channel in self.channels.values():
            await _tell(channel, begin=True)

    async def refuse_all(self, why: str, code: int) -> None:
        """Tells all hosts why the job does not begin, and the exit code."""
        for channel in self.channels.values():
            await _tell(channel, begin=False, why=why, code=code)


async def _tell(channel: Channel, **fields: Any) -> None:
    try:
        async with asyncio.timeout(_SEND_S):
            await channel.send(fields)
    except (OSError, TimeoutError):
        return  # `serve` notices the end of the connection
