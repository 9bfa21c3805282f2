"""Several "hosts" on this machine, for tfdistrun's -H: with or without own networks."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def networked_hosts(
    folder: Path, count: int, prefixes: Mapping[int, list[str]] | None = None
) -> Iterator[Hosts]:
    """Hosts with a network namespace each, on one bridge of this machine.

    Their names for -H are their addresses. `prefixes` are commands that run the servers
    of some.
    """
    # Several at a time, also of several test runs.
    tag = f"{os.getpid() % 100000}{next(_nets) % 10}"
    net = (int(tag) * 7) % 250
    bridge = f"tb{tag}"
    made = Hosts(folder, [f"10.213.{net}.{i + 2}" for i in range(count)], "")
    made.address = f"10.213.{net}.1"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{made.address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
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
