"""Ports for who must name one before anybody listens on it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST, _MOST = 4096, 65535


def free_ports(count: int) -> list[int]:
    """TCP ports of loopback on which nobody listens, each another one.

    None of those that the kernel hands out by itself, if it leaves enough: such a one
    may go to any socket of any process between this call and the use of the number.
    """
    first, last = map(int, _EPHEMERAL.read_text().split())
    ports = [*range(_LEAST, first), *range(last + 1, _MOST + 1)]
    if len(ports) < 1000:
        ports = list(range(_LEAST, _MOST + 1))
    random.SystemRandom().shuffle(ports)  # tests set the seed of the other one
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            port = ports.pop()
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
