"""Who knows the job's secret? Pure functions of the handshake, no sockets.

Both sides prove that they hold the 32-byte secret without showing it:

    client → server   hello: protocol, purpose, own nonce
    server → client   own nonce, HMAC(secret, "server" | transcript)
    client → server   HMAC(secret, "client" | transcript)

The transcript holds the protocol's version, the purpose (store, or which two ranks
of which generation), and both fresh nonces, so that no message can be replayed in
another connection, reflected to its sender, or used for another purpose. Every later
message carries an HMAC under a key of this connection and direction, and a counter.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Any

PROTOCOL = 1
SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32


class AuthenticationError(Exception):
    """The other side did not prove that it belongs to this job."""


def new_secret() -> bytes:
    """A fresh secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """A number that is used once, in one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def transcript(purpose: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """All that both sides must have seen alike, as a hash."""
    text = purpose.encode()
    parts = (
        b"tfdist handshake",
        PROTOCOL.to_bytes(4, "big"),
        len(text).to_bytes(4, "big"),
        text,
        client_nonce,
        server_nonce,
    )
    return hashlib.sha256(b"".join(parts)).digest()


def proof(secret: bytes, role: str, seen: bytes) -> bytes:
    """What `role` ("client" or "server") sends to prove that it has the secret."""
    return hmac.digest(secret, b"proof " + role.encode() + b" " + seen, "sha256")


def check_proof(secret: bytes, role: str, seen: bytes, received: bytes) -> None:
    """Raises AuthenticationError unless `received` is `role`'s proof."""
    if not hmac.compare_digest(proof(secret, role, seen), received):
        raise AuthenticationError(f"the {role} does not know the secret of this job")


@dataclass
class Sealer:
    """One direction of an authenticated connection: MACs with a counter."""

    key: bytes
    count: int = 0

    def mac(self, body: bytes) -> bytes:
        """The MAC of the next message."""
        value = hmac.digest(self.key, self.count.to_bytes(8, "big") + body, "sha256")
        self.count += 1
        return value

    def seal(self, body: bytes) -> bytes:
        """The next message as it goes over the wire."""
        return self.mac(body) + body

    def open(self, message: bytes) -> bytes:
        """The body of the next message.

        Raises:
            AuthenticationError: it was changed, dropped, repeated or reordered.
        """
        received, body = message[:MAC_BYTES], message[MAC_BYTES:]
        if not hmac.compare_digest(self.mac(body), received):
            raise AuthenticationError("a message is forged, repeated or out of order")
        return body


def sealers(secret: bytes, seen: bytes) -> tuple[Sealer, Sealer]:
    """The two directions of a connection: (client to server, server to client)."""
    to_server = hmac.digest(secret, b"key client-server " + seen, "sha256")
    to_client = hmac.digest(secret, b"key server-client " + seen, "sha256")
    return Sealer(to_server), Sealer(to_client)


def encode(message: dict[str, Any]) -> bytes:
    """A message as compact JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> dict[str, Any]:
    """A message from JSON; AuthenticationError when it is not an object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AuthenticationError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise AuthenticationError("a message is not a JSON object")
    return message


def decode_bytes(message: dict[str, Any], name: str, length: int) -> bytes:
    """A field of `length` bytes, given in hexadecimal."""
    text = message.get(name)
    if not isinstance(text, str) or len(text) != 2 * length:
        raise AuthenticationError(f"the field {name!r} of a handshake is malformed")
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise AuthenticationError(f"the field {name!r} is not hexadecimal") from error
