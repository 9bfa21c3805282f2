"""Allreduce between hosts whose lines are shaped, beside gloo; needs root.

    sudo python benchmarks/networks.py scaling          # the ring at 2, 4, 8 hosts
    sudo python benchmarks/networks.py placement        # two hosts with two ranks each
    sudo python benchmarks/networks.py sweep            # all algorithms and sizes
    sudo python benchmarks/networks.py sockets          # lines of several lanes

Each host is a network namespace (shaped_hosts.py). All contenders of a network live at
the same time and take turns within each round; a round's time is that of the slowest
rank. Reported are medians over the rounds, and medians of the rounds' ratios. Rates:
algbw = bytes / time, busbw = algbw * 2 (K - 1) / K for K ranks (nccl-tests,
doc/PERFORMANCE.md). The rate of a line includes the headers of its packets. The first
row of each network tells which share of it a program can use, and which share a plain
socket gets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shaped_hosts import PAYLOAD_SHARE, ShapedHosts, shaped_hosts, why_not

_HERE = Path(__file__).resolve().parent
_GLOO_PYTHON = Path("~/.cache/tfdist-peers/torch/bin/python").expanduser()
_MIB = 1 << 20
_ports = iter(range(29600, 30600))
TUNED = "tuned"  # selected by the file that `tfdist bench --tune` wrote there
TABLE = "table"  # selected without a file
ALGORITHMS = (
    "ring",
    "pairwise",
    "two_level",
    "two_level_ring",
    "halving_doubling",
    "butterfly",
    "tree",
    "double_tree",
    "torus",
    "star",
)


@dataclass(frozen=True)
class Contender:
    """A library with its settings and the placement of its ranks.

    Attributes:
        name: name in the tables.
        hosts: host of each rank, as an index of the network's hosts.
        environ: TFDIST_* variables.
        peer: "tfdist" or "gloo".
    """

    name: str
    hosts: tuple[int, ...]
    environ: dict[str, str] = field(default_factory=dict)
    peer: str = "tfdist"


class Fleet:
    """The processes of a contender, one a rank, waiting for requests."""

    def __init__(self, network: ShapedHosts, contender: Contender, secret: str) -> None:
        self.contender = contender
        worlds = environments(network, contender, secret)
        self._processes = [
            _start(network, host, contender.peer, environ)
            for host, environ in zip(contender.hosts, worlds, strict=True)
        ]

    def wait(self) -> None:
        """Waits until all ranks are connected."""
        for process in self._processes:
            _expect(process, "ready")

    def measure(self, size: int, repeats: int) -> dict[str, float]:
        """One round."""
        request = json.dumps({"bytes": size, "repeats": repeats})
        told = _ask_all(self._processes, request)
        return {
            "seconds": max(x["seconds"] for x in told) / repeats,
            "cpu_seconds": sum(x["cpu_seconds"] for x in told) / repeats,
            "bytes_sent": sum(x["bytes_sent"] for x in told) / repeats,
        }

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
            process.wait()


def _environment(peer: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TFDIST_")}
    if peer == "tfdist":
        environ["PYTHONPATH"] = f"{_HERE.parent}:{_HERE.parent / 'tests'}"
    # numpy's own threads have nothing to do here.
    return environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def environments(
    network: ShapedHosts, contender: Contender, secret: str
) -> list[dict[str, str]]:
    """The environment of each rank."""
    hosts, port = contender.hosts, str(next(_ports))
    master = network.addresses[hosts[0]]
    common = _environment(contender.peer)
    if contender.peer == "gloo":
        common |= {
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "cable",
        }
        return [common | {"RANK": str(rank)} for rank in range(len(hosts))]
    common |= {
        "TFDIST_SIZE": str(len(hosts)),
        "TFDIST_JOB_ID": f"networks-{port}",
        "TFDIST_RENDEZVOUS": f"{master}:{port}",
        "TFDIST_SECRET_FILE": secret,
        # Contenders that wait for their turn should send little.
        "TFDIST_HEARTBEAT_S": "1",
        "TFDIST_PEER_TIMEOUT_S": "30",
        **contender.environ,
    }
    return [common | {"TFDIST_RANK": str(rank)} for rank in range(len(hosts))]


def _start(
    network: ShapedHosts, host: int, role: str, environ: dict[str, str]
) -> subprocess.Popen[str]:
    python = str(_GLOO_PYTHON) if role == "gloo" else sys.executable
    return subprocess.Popen(
        [*network.inside(host), python, str(_HERE / "network_rank.py"), role],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == f"{word}\n":
            return
    raise RuntimeError(f"a rank ended with {process.wait()} before it was {word}")


def _ask_all(
    processes: Sequence[subprocess.Popen[str]], request: str
) -> list[dict[str, float]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
    told = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with {process.wait()}")
        told.append(json.loads(line))
    return told


@contextlib.contextmanager
def fleets(
    network: ShapedHosts, contenders: Sequence[Contender]
) -> Iterator[list[Fleet]]:
    """All contenders, connected."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret = secret_file(folder)
        started = []
        for contender in contenders:
            fleet = Fleet(network, contender, secret)
            stack.callback(fleet.close)
            fleet.wait()
            started.append(fleet)
        yield started


def secret_file(folder: Path) -> str:
    file = folder / "secret"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32))
    return str(file)


def tune(
    network: ShapedHosts, hosts: tuple[int, ...], sizes: Sequence[int], file: Path
) -> None:
    """Writes the tuning file of these ranks, as a user would: `tfdist bench --tune`."""
    command = [sys.executable, "-m", "tfdist.tools", "bench", "--tune", str(file)]
    command += ["--sizes", ",".join(map(str, sizes))]
    worlds = environments(network, Contender("", hosts), secret_file(file.parent))
    ranks = [
        subprocess.Popen([*network.inside(host), *command], env=environ, stdout=2)
        for host, environ in zip(hosts, worlds, strict=True)
    ]
    try:
        codes = [rank.wait(timeout=600.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes) or not file.exists():
        raise RuntimeError(f"tfdist bench --tune ended with {codes}")


def plain_streams(network: ShapedHosts, size: int = 64 * _MIB) -> float:
    """What plain sockets get in Mbit/s, every host sending to the next at once."""
    count = len(network.spaces)
    ends: list[subprocess.Popen[str]] = []
    try:
        for host in range(count):
            where = {
                "MASTER_ADDR": network.addresses[(host + 1) % count],
                "MASTER_PORT": str(next(_ports)),
            }
            environ = _environment("") | where
            ends.append(_start(network, (host + 1) % count, "receive", environ))
            _expect(ends[-1], "listening")
            ends.append(_start(network, host, "send", environ))
            for end in ends[-2:]:
                _expect(end, "ready")
        request = json.dumps({"bytes": size, "repeats": 1})
        seconds = []
        for _ in range(3):
            told = _ask_all(ends, request)
            seconds.append(max(one["seconds"] for one in told))
    finally:
        for end in ends:
            end.kill()
            end.wait()
    return size * 8e-6 / statistics.median(seconds)


def repeats_for(size: int, mbit_s: float) -> int:
    """How many repeats take about 0.3 s of the line: at least 2, at most 200."""
    seconds = max(2 * size * 8e-6 / mbit_s, 1e-3)
    return max(2, min(200, round(0.3 / seconds)))


def measure(
    network: ShapedHosts,
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """One row per contender and size; the ratios are to the first contender."""
    rows = []
    with fleets(network, contenders) as started:
        for size in sizes:
            repeats = repeats_for(size, network.mbit_s)
            found: dict[str, list[dict[str, float]]] = {}
            for fleet in started:
                fleet.measure(size, 2)  # warms up
            for turn in range(rounds):
                # Each round begins with a different contender.
                shift = turn % len(started)
                for fleet in started[shift:] + started[:shift]:
                    one = fleet.measure(size, repeats)
                    found.setdefault(fleet.contender.name, []).append(one)
            base = [one["seconds"] for one in found[contenders[0].name]]
            for contender in contenders:
                row = _row(network, contender, size, found[contender.name], base)
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def _row(
    network: ShapedHosts,
    contender: Contender,
    size: int,
    found: Sequence[dict[str, float]],
    base: Sequence[float],
) -> dict[str, Any]:
    ranks = len(contender.hosts)
    seconds = sorted(one["seconds"] for one in found)
    median_s = statistics.median(seconds)
    busbw = size / median_s * 2 * (ranks - 1) / ranks
    ratios = [a["seconds"] / b for a, b in zip(found, base, strict=True)]
    wire = statistics.median(one["bytes_sent"] for one in found)
    cpu_s = statistics.median(one["cpu_seconds"] for one in found)
    return {
        "contender": contender.name,
        "mbit_s": network.mbit_s,
        "hosts": len(network.spaces),
        "ranks": ranks,
        "placement": list(contender.hosts),
        "bytes": size,
        "ms": round(median_s * 1e3, 3),
        "ms_min_max": [round(seconds[0] * 1e3, 3), round(seconds[-1] * 1e3, 3)],
        "busbw_mb_s": round(busbw / 1e6, 2),
        "busbw_percent_of_line": round(busbw * 8e-4 / network.mbit_s, 1),
        "time_over_first": round(statistics.median(ratios), 3),
        "tcp_bytes_sent": round(wire),
        "cpu_ms": round(cpu_s * 1e3, 2),
    }


def announce(network: ShapedHosts) -> None:
    """Prints which share of the line's rate reaches a program."""
    row = {
        "line": "plain sockets, each host to the next",
        "mbit_s": network.mbit_s,
        "hosts": len(network.spaces),
        "payload_percent_at_most": round(100 * PAYLOAD_SHARE, 1),
        "payload_percent": round(100 * plain_streams(network) / network.mbit_s, 1),
    }
    print(json.dumps(row), flush=True)


def gloo(hosts: tuple[int, ...]) -> list[Contender]:
    """PyTorch's gloo, where it is installed."""
    if not _GLOO_PYTHON.exists():
        print(json.dumps({"left out": f"gloo: there is no {_GLOO_PYTHON}"}), flush=True)
        return []
    return [Contender("gloo", hosts, peer="gloo")]


def algorithm(name: str, **more: str) -> dict[str, str]:
    """The variables that select an algorithm."""
    return {"TFDIST_ALLREDUCE_ALGORITHM": name, **more}


def scaling(arguments: argparse.Namespace) -> None:
    """The ring and gloo on 2, 4, 8 hosts."""
    times = {}
    for count in arguments.hosts:
        hosts = tuple(range(count))
        with shaped_hosts(count, arguments.mbit) as network:
            announce(network)
            ours = Contender("ring", hosts, algorithm("ring"))
            for row in measure(
                network, [ours, *gloo(hosts)], arguments.sizes, arguments.rounds
            ):
                times[row["contender"], row["bytes"], count] = row["ms"]
    first, last = arguments.hosts[0], arguments.hosts[-1]
    for (name, size, count), ms in times.items():
        if count == last != first:
            row = {"contender": name, "bytes": size, "hosts": [first, last]}
            ratio = ms / times[name, size, first]
            model = (1 - 1 / last) / (1 - 1 / first)
            row |= {"time_ratio": round(ratio, 3), "model": round(model, 3)}
            print(json.dumps(row), flush=True)


def placement(arguments: argparse.Namespace) -> None:
    """Two levels, and the flat ring placed well and badly."""
    well, badly = (0, 0, 1, 1), (0, 1, 0, 1)
    with shaped_hosts(2, arguments.mbit) as network:
        announce(network)
        contenders = [
            Contender("two_level", well, algorithm("two_level")),
            Contender("two_level, numbered badly", badly, algorithm("two_level")),
            Contender("ring placed well", well, algorithm("ring")),
            Contender(
                "ring placed badly", badly, algorithm("ring", TFDIST_RING_ORDER="rank")
            ),
            Contender("ring, numbered badly", badly, algorithm("ring")),
            *gloo(well),
        ]
        measure(network, contenders, arguments.sizes, arguments.rounds)


def sockets(arguments: argparse.Namespace) -> None:
    """The ring over more and more sockets, on lines that give each of them a part."""
    hosts = (0, 1)
    with shaped_hosts(2, arguments.mbit, bundled=True) as network:
        announce(network)
        contenders = [
            Contender(f"{n} sockets", hosts, algorithm("ring", TFDIST_TCP_SOCKETS=n))
            for n in ("1", "2", "4", "8")
        ]
        contenders += gloo(hosts)
        measure(network, contenders, arguments.sizes, arguments.rounds)


def sweep(arguments: argparse.Namespace) -> None:
    """The selected algorithm beside all of them, at all sizes.

    On networks of 4 hosts and of 2 hosts x 2 ranks, each tuned before.
    """
    sizes = [1 << power for power in range(10, 25, 2)]
    for mbit in (1000.0, 100.0):
        for hosts in ((0, 1, 2, 3), (0, 0, 1, 1)):
            few = [x for x in sizes if x <= mbit * 17e3]
            with (
                shaped_hosts(max(hosts) + 1, mbit) as network,
                tempfile.TemporaryDirectory() as folder,
            ):
                announce(network)
                file = Path(folder, "tuning.json")
                tune(network, hosts, few, file)
                contenders = [
                    Contender(TUNED, hosts, {"TFDIST_TUNING_FILE": str(file)}),
                    Contender(TABLE, hosts),
                    *(Contender(x, hosts, algorithm(x)) for x in ALGORITHMS),
                ]
                rows = measure(network, contenders, few, arguments.rounds)
            for row in selection(rows):
                print(
                    json.dumps({"mbit_s": mbit, "placement": hosts} | row), flush=True
                )


def selection(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size how the selected algorithms compare with the fastest.

    Example:
        >>> rows = [{"contender": "tuned", "bytes": 64, "ms": 3.0}]
        >>> rows += [{"contender": "table", "bytes": 64, "ms": 5.0}]
        >>> rows += [{"contender": "ring", "bytes": 64, "ms": 2.0}]
        >>> selection(rows)
        [{'bytes': 64, 'fastest': 'ring', 'tuned': 1.5, 'table': 2.5}]
    """
    found = []
    for size in sorted({row["bytes"] for row in rows}):
        times = {row["contender"]: row["ms"] for row in rows if row["bytes"] == size}
        ours = {name: times.pop(name) for name in (TUNED, TABLE)}
        fastest = min(times, key=lambda name: times[name])
        over = {name: round(ms / times[fastest], 3) for name, ms in ours.items()}
        found.append({"bytes": size, "fastest": fastest, **over})
    return found


def _sizes(text: str) -> list[int]:
    units = {"K": 1 << 10, "M": _MIB}
    return [
        int(x[:-1]) * units[x[-1]] if x[-1] in units else int(x)
        for x in text.split(",")
    ]


def main() -> None:
    """Measures and prints one line of JSON a result."""
    made = (scaling, placement, sweep, sockets)
    commands = {command.__name__: command for command in made}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=commands)
    parser.add_argument(
        "--mbit", type=float, default=1000.0, help="Mbit/s of each line, each way"
    )
    parser.add_argument(
        "--hosts", type=_sizes, default=[2, 4, 8], help="scaling: numbers of hosts"
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=[16 * _MIB], help="e.g. 64K,16M"
    )
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    # The networks must be removed when SIGTERM ends this process, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if reason := why_not():
        print(json.dumps({"skipped": reason}))
        return
    commands[arguments.what](arguments)


if __name__ == "__main__":
    main()
