"""Addresses of stores and ranks: parsing, and sockets bound to one interface."""

from __future__ import annotations

import ipaddress
import socket

from tfdist.rendezvous.errors import invalid


def split_address(text: str, variable: str = "TFDIST_RENDEZVOUS") -> tuple[str, int]:
    """("host", port) of "host:port" or "[ipv6]:port".

    Raises:
        RendezvousError: it is neither; names `variable`.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise invalid(f"{variable}={text!r} is not host:port with a port of 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or "localhost"; asks no name server."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to one address; port 0 takes a free one.

    Raises:
        RendezvousError: the address is no address of this machine, is the address of
            all interfaces, or the port is taken.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise invalid(
                f"{host!r} means all network interfaces; name the address of the one "
                "that the ranks shall use (TFDIST_ADDRESS)"
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
