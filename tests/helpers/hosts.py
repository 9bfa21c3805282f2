"""Several "hosts" on this machine, for tfdistrun's -H: with or without own networks."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers.one_at_a_time import one_at_a_time

FAKE_SSH = Path(__file__).with_name("fake_ssh.py")
_nets = itertools.count()
_PYTHON = [sys.executable, "-I", "-S"]


@dataclass
class Hosts:
    """Hosts that answer.

    Attributes:
        folder: of their sockets.
        names: of the hosts, for -H.
        address: of this machine, by which they reach it; for TFDIST_ADDRESS.
        servers: process ids, by name.
        cables: this machine's ends of the networks, by host.
    """

    folder: Path
    names: list[str]
    address: str
    servers: dict[str, int] = field(default_factory=dict)
    cables: list[str] = field(default_factory=list)

    @property
    def ssh(self) -> list[str]:
        """The options of tfdistrun."""
        words = [*_PYTHON, str(FAKE_SSH), "connect", str(self.folder)]
        return ["--ssh-command", " ".join(words)]

    def slots(self, *counts: int) -> list[str]:
        """E.g. ["-H", "host1:1,host2:3"] for 1, 3."""
        pairs = zip(self.names, counts, strict=False)
        return ["-H", ",".join(f"{name}:{count}" for name, count in pairs)]

    def cable(self, index: int, state: str) -> None:
        """Pulls ("down") or plugs in ("up") the cable of one host with a network."""
        _ip("link", "set", self.cables[index], state)

    def drop(self, index: int, other: int) -> None:
        """A firewall: what one host with a network sends to another is dropped."""
        space = self.cables[index].replace("to", "tn", 1)
        _ip("-n", space, "route", "add", "blackhole", f"{self.names[other]}/32")

    def clients(self, launcher: int) -> dict[str, psutil.Process]:
        """The "ssh" processes of a tfdistrun, by host."""
        found = {}
        for child in psutil.Process(launcher).children():
            command = child.cmdline()
            if str(FAKE_SSH) in command:
                found[command[command.index(str(self.folder)) + 1]] = child
        return found


@contextlib.contextmanager
def _server(command: list[str]) -> Iterator[int]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def plain_hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    """Hosts that share this machine's network; needs no privileges."""
    with contextlib.ExitStack() as stack:
        made = Hosts(folder, list(names), "127.0.0.1")
        for name in names:
            command = [*_PYTHON, str(FAKE_SSH), "serve", str(folder), name]
            made.servers[name] = stack.enter_context(_server(command))
        yield made


# ---- with a network each ----


def why_no_networks() -> str:
    """Why network namespaces cannot be made here, "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        probe = f"tfd-probe-{os.getpid()}"
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except FileNotFoundError:
        return "network namespaces need the program ip"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return ""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout


def _free_names(first: int) -> tuple[str, str]:
    """A tag and a network that nothing has: runs that were killed leave theirs."""
    taken = _ip("-o", "addr") + _ip("-o", "link") + _ip("netns")
    tags = (f"{(first + i) % 1000000}" for i in range(1000))
    tag = next(tag for tag in tags if not re.search(rf"\bt[bno]{tag}\b", taken))
    nets = (f"10.213.{(int(tag) * 7 + i) % 250}" for i in range(250))
    return tag, next(net for net in nets if f" {net}." not in taken)


@contextlib.contextmanager
def networked_hosts(
    folder: Path, count: int, prefixes: Mapping[int, list[str]] | None = None
) -> Iterator[Hosts]:
    """Hosts with a network namespace each, on one bridge of this machine.

    Their names for -H are their addresses. `prefixes` are commands that run the servers
    of some.
    """
    # Several at a time, also of several test runs.
    with contextlib.ExitStack() as stack:
        with one_at_a_time("networks"):
            tag, net = _free_names(os.getpid() * 10 + next(_nets))
            bridge = f"tb{tag}"
            _ip("link", "add", bridge, "type", "bridge")
            stack.callback(_ip, "link", "del", bridge)
            _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        made = Hosts(folder, [f"{net}.{i + 2}" for i in range(count)], f"{net}.1")
        for index, name in enumerate(made.names):
            space, outer, inner = (f"{c}{tag}-{index}" for c in ("tn", "to", "ti"))
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            stack.callback(_quietly, "link", "del", outer)
            made.cables.append(outer)
            _ip("link", "set", inner, "netns", space)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{name}/24", "dev", inner)
            _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            command = ["ip", "netns", "exec", space, *_PYTHON, str(FAKE_SSH)]
            command = [*(prefixes or {}).get(index, []), *command]
            server = _server([*command, "serve", str(folder), name])
            made.servers[name] = stack.enter_context(server)
        yield made


def _quietly(*words: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip(*words)
