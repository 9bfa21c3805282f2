"""Parses, chooses and binds addresses of stores and ranks."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from tfdist.core.rendezvous.errors import invalid


def split_address(text: str, variable: str = "TFDIST_RENDEZVOUS") -> tuple[str, int]:
    """Splits "host:port" or "[ipv6]:port" into (host, port).

    Raises:
        RendezvousError: `text` has neither form; the message names `variable`.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise invalid(f"{variable}={text!r} is not host:port with a port of 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Joins host and port; the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether `host` is a loopback address or "localhost"; no name lookup."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Returns a TCP socket bound to one address; port 0 selects a free port.

    Raises:
        RendezvousError: `host` is not an address of this machine or stands for all
            interfaces, or the port is in use.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise invalid(
                f"{host!r} means all network interfaces; give the address of the "
                "interface that the ranks should use (TFDIST_ADDRESS)"
            )
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise invalid(f"cannot listen on {host!r}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise invalid(
            f"cannot listen on {join_address(host, port)}: {error}; give an address "
            "of this machine and a free port"
        ) from error
    return sock


def connected_to_itself(sock: socket.socket) -> bool:
    """Returns whether a TCP socket is connected to itself.

    A client that keeps trying a port of its own machine on which no process listens yet
    may be assigned this port as its own. TCP then connects the socket to itself (RFC
    9293, section 3.5, simultaneous open), and the server finds the port in use.
    """
    return bool(sock.getsockname() == sock.getpeername())


def _own_addresses() -> dict[str, list[str]]:
    """Returns this machine's addresses by interface, IPv4 first, without fe80::/16."""
    import psutil  # imported here: most ranks do not need it

    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ours = [
            one.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in addresses
            if one.family == family and not one.address.lower().startswith("fe80:")
        ]
        if ours:
            found[name] = ours
    return found


def reachable_address(environ: Mapping[str, str]) -> str:
    """Returns an address of this machine at which other hosts should reach it.

    These are tried in order, without loopback addresses:

    1. the address of the host name that the launcher has set (`PMI_HOSTNAME`)
    2. the address of the host name of this machine
    3. the address from which the default route sends
    4. the first address of any interface

    Raises:
        RendezvousError: this machine has loopback addresses only.
    """
    own = [ip for ips in _own_addresses().values() for ip in ips if not is_loopback(ip)]
    for name in (environ.get("PMI_HOSTNAME"), socket.gethostname()):
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue  # not set, unknown or too long
        for *_, address in found:
            if address[0] in own:
                return str(address[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses a route, and sends nothing
            if (address := probe.getsockname()[0]) in own:
                return str(address)
        except OSError:
            pass  # no default route
    if own:
        return own[0]
    raise invalid(
        "this machine has no address that other hosts could reach; set TFDIST_ADDRESS"
    )


def own_address(choice: str, variable: str = "TFDIST_ADDRESS") -> str:
    """Returns the address of this machine that a user selected.

    Args:
        choice: an IP address, a network ("10.1.0.0/16") or an interface ("eth1"). The
            same network or interface may be given on all hosts.
        variable: name of the variable that holds `choice`, for messages.

    Raises:
        RendezvousError: `choice` has none of these forms or means all interfaces, or
            this machine has no address in the network. Whether a single IP address
            belongs to this machine is checked only by `bind`.

    Example:
        >>> from tfdist.core.rendezvous.address import own_address
        >>> own_address("127.0.0.0/8")
        '127.0.0.1'
    """
    own = _own_addresses()
    listed = "; ".join(f"{name}: {', '.join(ips)}" for name, ips in own.items())
    try:
        network = ipaddress.ip_network(choice, strict=False)
    except ValueError:
        if choice not in own:
            raise invalid(
                f"{variable}={choice!r} is not an IP address, a network (10.1.0.0/16) "
                f"or an interface of this machine ({listed})"
            ) from None
        return own[choice][0]
    if network.network_address.is_unspecified:
        raise invalid(
            f"{variable}={choice!r} means all network interfaces; give the address, "
            "network or interface that leads to the other hosts"
        )
    if "/" not in choice:
        return choice
    for ips in own.values():
        for ip in ips:
            if ipaddress.ip_address(ip) in network:
                return ip
    raise invalid(
        f"{variable}={choice}: this machine has no address in that network ({listed})"
    )


def route_to(host: str) -> str | None:
    """Returns the address of this machine from which packets to `host` are sent.

    Sends nothing. Returns None if the name cannot be resolved, if there is no route, or
    if packets are sent from loopback addresses only.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as sock:
                sock.connect(address)
                own = str(sock.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(own):
            return own
    return None
