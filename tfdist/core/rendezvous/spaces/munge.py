"""The space of a plain `srun`, without PMI or PMIx: a port of rank 0, and MUNGE.

Slurm has no key-value space of its own. Rank 0 listens on its host at a port that all
ranks compute from the number of the job step. It sends its value to every client that
connects, encrypted as a MUNGE credential. Almost every Slurm cluster authenticates its
users with MUNGE. Only processes of the same user on hosts of the cluster can decode the
credential, and MUNGE tells them which user created it. (C. Dunlap, MUNGE; munge(7).)

A rank that has decoded the value proves this with an HMAC. Rank 0 answers with another
HMAC, which proves that it knows the value. Rank 0 listens until all ranks have
connected, or until the deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from tfdist.core.rendezvous.address import bind, is_loopback, reachable_address
from tfdist.core.rendezvous.errors import RendezvousError, invalid, numbers, timeout
from tfdist.core.rendezvous.placement import Placement

# Above the ports that Linux assigns to outgoing connections (32768 to 60999).
FIRST_PORT, LAST_PORT = 61000, 65535
_PORTS = 8  # candidates, of which rank 0 takes the first free one
_CONNECT_S, _CONNECTION_S = 2.0, 5.0  # limits to connect, and to exchange the value
_PROGRAM_S = 10.0  # limit for one run of munge, unmunge or scontrol
_RETRY_S = 0.1
_MAX_BYTES = 16384
_MAX_CONNECTIONS = 32


class MungeSpace:
    """The space of one job step; implements `spaces.Space`.

    Args:
        placement: the placement of this rank, with the name of the job step.
        host: name of the first host of the job step.
    """

    def __init__(self, placement: Placement, host: str) -> None:
        self._placement = placement
        self._host = host

    def exchange(self, key: str, value: str | None, deadline: float) -> str:
        """See `spaces.Space`."""
        name = f"{self._placement.job} {key}"
        if value is None:
            return self._take(name, deadline)
        self._give(name, value, deadline)
        return value

    def _address(self) -> str:
        """Returns the address of rank 0."""
        found = resolve(self._host)
        if is_loopback(found) and not is_loopback(self._host):
            # Many hosts resolve their own name to 127.0.1.1. So rank 0 is on this host.
            return reachable_address(os.environ)
        return found

    # ---- rank 0 ----

    def _give(self, name: str, value: str, deadline: float) -> None:
        address, text = self._address(), json.dumps({"name": name, "value": value})
        encode(text)  # raises if MUNGE does not work
        missing = set(range(1, self._placement.size))
        reasons = [""]
        slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)

        def serve(connection: socket.socket) -> None:
            try:
                # A client that is not a rank may send anything, or nothing.
                with connection, contextlib.suppress(OSError, ValueError):
                    rank = _answer(connection, name, text, value)
                    missing.discard(rank)
            except RendezvousError as error:  # MUNGE; the client tries again
                reasons[0] = f": {error.message}"
            finally:
                slots.release()

        with _listen(address, name) as listener:
            listener.settimeout(_RETRY_S)
            while missing and time.monotonic() < deadline:
                if not slots.acquire(timeout=_RETRY_S):
                    continue
                try:
                    arguments = (listener.accept()[0],)
                    threading.Thread(target=serve, args=arguments, daemon=True).start()
                except OSError:  # nobody has connected
                    slots.release()
        if missing:
            ranks = sorted(missing)
            raise timeout(
                f"{numbers(ranks)} did not call tfdist.init() within the deadline, or "
                f"could not connect to {address} (the ranks meet at the first host of "
                f"the job step){reasons[0]}",
                f"missing ranks: {', '.join(map(str, ranks))}",
            )

    # ---- the other ranks ----

    def _take(self, name: str, deadline: float) -> str:
        address, rank = self._address(), self._placement.rank
        reason = "it does not answer"
        for port in itertools.cycle(ports(name)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                return _ask((address, port), name, rank, min(_CONNECT_S, left_s))
            except LookupError:
                pass  # another job of this user
            except (ValueError, TypeError) as error:  # not rank 0
                reason = f"port {port}: {error}"
            except RendezvousError as error:  # MUNGE, for example on a busy host
                reason = error.message
            except OSError:
                pass
            if port == ports(name)[-1]:
                time.sleep(_RETRY_S)
        raise timeout(
            f"rank {rank} did not find rank 0 at {address}, the first host of the job "
            f"step, within the deadline: {reason}. If rank 0 is on another host or "
            "network, set TFDIST_RENDEZVOUS and TFDIST_SECRET_FILE (docs/launchers.md)",
            "missing ranks: 0",
        )


def _answer(connection: socket.socket, name: str, text: str, value: str) -> int:
    """Sends the value to a client; returns the client's rank.

    Raises:
        OSError, ValueError: the client is not a rank of this job, or has ended.
        RendezvousError: MUNGE failed.
    """
    deadline = time.monotonic() + _CONNECTION_S
    connection.settimeout(_CONNECTION_S)
    connection.sendall(encode(text).encode() + b"\n")
    number, _, shown = _read_line(connection, deadline).partition(" ")
    rank = int(number)
    if not hmac.compare_digest(shown.encode(), proof(name, value, f"{rank}").encode()):
        raise ValueError("a wrong proof")
    connection.sendall(proof(name, value, f"{rank} seen").encode() + b"\n")
    return rank


def _ask(
    address: tuple[str, int], name: str, rank: int, connect_timeout_s: float
) -> str:
    """Returns the value of rank 0, if rank 0 listens at this address.

    Raises:
        OSError: nothing answers.
        LookupError: another job of this user answers.
        ValueError, TypeError: a process that is not rank 0 answers.
        RendezvousError: MUNGE failed.
    """
    with socket.create_connection(address, connect_timeout_s) as connection:
        deadline = time.monotonic() + _CONNECTION_S
        text = decode(_read_line(connection, deadline))
        found = json.loads(text)
        if found["name"] != name:
            raise LookupError(found["name"])
        value = str(found["value"])
        answer = f"{rank} {proof(name, value, f'{rank}')}\n"
        connection.sendall(answer.encode())
        # A process that only relays the credential of rank 0 cannot compute this.
        shown = _read_line(connection, deadline)
        if not hmac.compare_digest(
            shown.encode(), proof(name, value, f"{rank} seen").encode()
        ):
            raise ValueError("a wrong proof")
        return value


def ports(name: str) -> list[int]:
    """Returns the ports at which rank 0 may listen, in the order to try them.

    Args:
        name: name of the job step, and the key of the value.
    """
    count = LAST_PORT - FIRST_PORT + 1
    hashed = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(_PORTS)]
    return [FIRST_PORT + int.from_bytes(h[:4], "big") % count for h in hashed]


def proof(name: str, value: str, what: str) -> str:
    """Returns an HMAC that proves knowledge of the value.

    Args:
        name: name of the job step, and the key of the value.
        value: value of rank 0, which is the key of the HMAC.
        what: text to include in the HMAC.
    """
    return hmac.new(value.encode(), f"{name} {what}".encode(), "sha256").hexdigest()


def _listen(address: str, name: str) -> socket.socket:
    reason = ""
    for port in ports(name):
        try:
            listener = bind(address, port)
            listener.listen(1024)
        except (RendezvousError, OSError) as error:
            reason = str(error)
        else:
            return listener
    raise invalid(
        f"rank 0 cannot listen at {address}, the address of the first host of the job "
        f"step: {reason}; set TFDIST_RENDEZVOUS and TFDIST_SECRET_FILE instead "
        "(docs/launchers.md)"
    )


def _read_line(connection: socket.socket, deadline: float) -> str:
    data = b""
    while b"\n" not in data and len(data) < _MAX_BYTES:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data.partition(b"\n")[0].decode("utf-8", "replace")


# ---- MUNGE ----


def encode(text: str) -> str:
    """Returns a credential that only processes of this user can decode, and only once.

    Raises:
        RendezvousError: MUNGE does not work on this host.
    """
    done = _run(["munge", "-u", str(os.geteuid())], text)
    if done.returncode != 0:
        raise invalid(f"munge failed: {done.stderr.strip()}; {_INSTEAD}")
    return done.stdout.strip()


def decode(credential: str) -> str:
    """Returns the text of a credential.

    Raises:
        ValueError: the credential is not valid, or another user created it.
    """
    if not credential:
        raise ValueError("it sent nothing")
    done = _run(["unmunge", "-N", "-k", "STATUS,UID"], credential)
    head, _, text = done.stdout.partition("\n\n")
    if done.returncode != 0:
        reason = done.stderr.strip() or head.replace("\n", ", ")
        raise ValueError(f"unmunge failed: {reason}")
    owner = re.search(r"^UID: *(\d+)$", head, re.MULTILINE)
    if owner is None or int(owner[1]) != os.geteuid():
        raise ValueError("the answer comes from a process of another user")
    return text


_INSTEAD = (
    "start the ranks with srun --mpi=pmi2 (or pmix), or set TFDIST_RENDEZVOUS and "
    "TFDIST_SECRET_FILE (docs/launchers.md)"
)


def _run(words: list[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603  the programs of MUNGE and Slurm, no shell
            words, input=text, capture_output=True, text=True, timeout=_PROGRAM_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise invalid(f"{words[0]} failed: {error}; {_INSTEAD}") from error


# ---- hosts ----


def first_host(hosts: str) -> str:
    """Returns the first host of a Slurm host list.

    Example:
        >>> from tfdist.core.rendezvous.spaces import munge
        >>> munge.first_host("node[07-09,12],login1")
        'node07'
    """
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", hosts)
    if found is None or hosts.count("[") != hosts.count("]"):
        raise invalid(f"SLURM_STEP_NODELIST={hosts!r} is not a list of hosts")
    return "".join(part or "" for part in found.groups())


def resolve(host: str) -> str:
    """Returns an IP address of a host.

    Raises:
        RendezvousError: neither the system nor Slurm knows an address of the host.
    """
    for name_of in (lambda: host, lambda: _slurm_address(host)):
        with contextlib.suppress(OSError, UnicodeError):
            if name := name_of():
                found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                return str(found[0][4][0])
    raise invalid(
        f"no address of {host}, the first host of the job step, is known; set "
        "TFDIST_RENDEZVOUS and TFDIST_SECRET_FILE (docs/launchers.md)"
    )


def _slurm_address(host: str) -> str | None:
    """Returns the address of a host in Slurm's configuration, or None."""
    try:
        done = _run(["scontrol", "--oneliner", "show", "node", host], "")
    except RendezvousError:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None


def opening(
    environ: Mapping[str, str], placement: Placement
) -> Callable[[float], MungeSpace] | None:
    """Returns a function that takes the deadline and opens the space, or None."""
    hosts = environ.get("SLURM_STEP_NODELIST")
    if placement.source != "slurm" or not hosts or not placement.job:
        return None
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return None
    host = first_host(hosts)
    return lambda deadline: MungeSpace(placement, host)
