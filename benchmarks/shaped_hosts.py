"""Hosts with slow networks on this machine: namespaces, one bridge, `tc tbf`.

A host is a network namespace with one cable (a veth pair) to a bridge, which has a
namespace of its own. Both ends of a cable are shaped: what a host sends at its end,
what it receives at the bridge's. So a host has a full-duplex line of the given rate. At
the host's end, the line can also be a bundle of lanes (`tc htb`): the ports of a
connection choose its lane, as where switches spread connections over cables, or where
a cloud limits each connection.

The rate includes Ethernet, IP and TCP headers: 1448 of the 1514 bytes of a packet
(95.6 %) carry data of the program.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

# How much a line may send at once after a pause, to make up for packets that this
# machine sent late. With 1 ms, or with less than two of the 64 KiB packets in which the
# kernel hands over a stream, plain sockets of 8 hosts on 2 busy cores lose 5 to 60 % of
# the rate of their lines. With 4 ms they lose nothing, and none exceeds its rate.
# Messages smaller than a burst are slowed down only when many follow each other.
_BURST_S = 4e-3
_LEAST_BURST_BYTES = 128 << 10
_LIMIT_BYTES = 4 << 20
LANES = 4  # of a bundle
PAYLOAD_SHARE = 1448 / 1514
_made = itertools.count()


@dataclass(frozen=True)
class ShapedHosts:
    """Hosts whose network is up.

    Attributes:
        spaces: names of their network namespaces.
        addresses: their IP addresses.
        mbit_s: rate of each line in Mbit/s, each way.
    """

    spaces: tuple[str, ...]
    addresses: tuple[str, ...]
    mbit_s: float

    def inside(self, host: int) -> list[str]:
        """The words in front of a command that runs on that host."""
        return ["ip", "netns", "exec", self.spaces[host]]


def why_not() -> str:
    """Why such hosts cannot be made here, "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with shaped_hosts(1, 1000):
            return ""
    except FileNotFoundError as error:
        return f"the program {error.filename} is missing"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def shaped_hosts(
    count: int, mbit_s: float, *, bundled: bool = False
) -> Iterator[ShapedHosts]:
    """Makes `count` hosts with a line of `mbit_s` each; removes them at the end.

    Args:
        count: how many.
        mbit_s: rate of each line, each way.
        bundled: whether a line consists of `LANES` lanes; a connection uses one.
    """
    tag = f"{os.getpid() % 100000}{next(_made) % 10}"
    middle = f"bm{tag}"
    hosts = ShapedHosts(
        tuple(f"bh{tag}-{i}" for i in range(count)),
        tuple(f"10.214.{int(tag) % 250}.{i + 1}" for i in range(count)),
        mbit_s,
    )
    with contextlib.ExitStack() as stack:

        def space(name: str) -> None:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)  # and all that is in it

        space(middle)
        _run("ip", "-n", middle, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", middle, "link", "set", "bridge", "up")
        for index, name in enumerate(hosts.spaces):
            space(name)
            port = f"port{index}"
            cable = ["link", "add", "cable", "netns", name, "type", "veth"]
            _run("ip", *cable, "peer", "name", port, "netns", middle)
            _run("ip", "-n", middle, "link", "set", port, "master", "bridge", "up")
            address = f"{hosts.addresses[index]}/24"
            _run("ip", "-n", name, "addr", "add", address, "dev", "cable")
            for device in ("cable", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            (_bundle if bundled else _shape)(name, "cable", mbit_s)
            _shape(middle, port, mbit_s)
        yield hosts


def _burst(mbit_s: float) -> int:
    return max(_LEAST_BURST_BYTES, round(mbit_s * 1e6 / 8 * _BURST_S))


def _shape(space: str, device: str, mbit_s: float) -> None:
    words = f"root tbf rate {mbit_s:g}mbit burst {_burst(mbit_s)} limit {_LIMIT_BYTES}"
    _run("tc", "-n", space, "qdisc", "add", "dev", device, *words.split())


def _bundle(space: str, device: str, mbit_s: float) -> None:
    def tc(what: str, words: str) -> None:
        _run("tc", "-n", space, what, "add", "dev", device, *words.split())

    tc("qdisc", "root handle 1: htb default 10 r2q 1000")
    rate = mbit_s / LANES
    for lane in range(LANES):
        most = f"burst {_burst(rate)} cburst {_burst(rate)}"
        tc("class", f"parent 1: classid 1:1{lane} htb rate {rate:g}mbit {most}")
        tc("qdisc", f"parent 1:1{lane} bfifo limit {_LIMIT_BYTES}")
    # Bits 1 and 2 of both ports (bytes 20 to 23 of a packet without IP options), so
    # that both ways of a connection are on the same lane. Linux gives out ports in
    # steps of two.
    for source, target in itertools.product(range(LANES), repeat=2):
        ports = f"match u32 {source << 17 | target << 1:#x} 0x00060006 at 20"
        lane = (source + target) % LANES
        tc("filter", f"parent 1: protocol ip prio 1 u32 {ports} flowid 1:1{lane}")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
