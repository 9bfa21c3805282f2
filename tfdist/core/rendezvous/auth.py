"""Handshake that proves knowledge of the job's secret. Pure functions, no sockets.

Both sides prove that they have the 32-byte secret without revealing it:

    client → server   hello: preamble, own nonce, claims
    server → client   answer: preamble, own nonce, proof
    client → server   proof

The preamble (magic, protocol, version of tfdist) has the same form in all versions, so
that two different versions can report the difference. The claims (JSON: job,
generation, purpose, the two ranks, frame authentication) are not parsed before the
client has proved its identity.

All keys are derived from the secret by HKDF-SHA-256 (RFC 5869), salted with the hash of
the whole hello and answer: keys for the two proofs, one key for each direction of the
channel, and two keys for the frames of a link. So a message cannot be replayed in
another connection, reflected to its sender, or used for another purpose. A change of a
version, a claim or a nonce in transit changes every key.

References:
    Bellare & Rogaway, Entity Authentication and Key Distribution, CRYPTO 1993 (mutual
    proofs over both nonces).
    Krawczyk & Eronen, HMAC-based Extract-and-Expand Key Derivation Function (HKDF), RFC
    5869, 2010, sections 2.2 and 2.3.
    Rescorla, The Transport Layer Security (TLS) Protocol Version 1.3, RFC 8446, 2018,
    section 7.1 (keys that depend on a hash of the handshake).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROTOCOL = 3
SECRET_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 32
LINK_KEY_BYTES = 64  # kLinkKeyBytes of tfdist_ops/transport/frame_mac.h

MAGIC = b"tfdist\r\n"
_VERSION_BYTES = 20
PREAMBLE_BYTES = len(MAGIC) + 4 + _VERSION_BYTES
HELLO_BYTES = PREAMBLE_BYTES + NONCE_BYTES + 2  # everything before the claims
ANSWER_BYTES = PREAMBLE_BYTES + NONCE_BYTES + MAC_BYTES
MAX_CLAIMS_BYTES = 1024


class AuthenticationError(Exception):
    """The other side did not prove that it belongs to this job."""


class RefusedError(AuthenticationError):
    """The other side has the secret, but refuses the connection with a reason."""


def new_secret() -> bytes:
    """Returns a new random secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    """Returns a random number for use in one handshake only."""
    return secrets.token_bytes(NONCE_BYTES)


# ---- hello and answer ----


def preamble(version: str) -> bytes:
    """Returns the bytes that both sides send first: magic, protocol and version."""
    text = version.encode("ascii", "replace")[:_VERSION_BYTES]
    return MAGIC + PROTOCOL.to_bytes(4, "big") + text.ljust(_VERSION_BYTES, b"\0")


def check_preamble(received: bytes, version: str) -> None:
    """Raises AuthenticationError unless the other side uses this protocol.

    Args:
        received: PREAMBLE_BYTES received from the other side.
        version: version of this tfdist, for the message.
    """
    if received[: len(MAGIC)] != MAGIC:
        raise AuthenticationError("the received bytes are not a tfdist hello")
    end = len(MAGIC) + 4
    protocol = int.from_bytes(received[len(MAGIC) : end], "big")
    if protocol != PROTOCOL:
        text = received[end:].rstrip(b"\0").decode("ascii", "replace")
        printable = "".join(c if c.isprintable() else "?" for c in text)
        raise AuthenticationError(
            f"the other side runs tfdist {printable!r} with protocol {protocol}, this "
            f"one tfdist {version!r} with protocol {PROTOCOL}; install the same "
            "version on all hosts"
        )


def hello(version: str, nonce: bytes, claims: dict[str, Any]) -> bytes:
    """Returns the client's first message.

    Raises:
        ValueError: the claims are too long.
    """
    body = encode(claims)
    if len(body) > MAX_CLAIMS_BYTES:
        raise ValueError(
            f"the claims of a handshake have {len(body)} bytes, at most "
            f"{MAX_CLAIMS_BYTES} are allowed"
        )
    return preamble(version) + nonce + len(body).to_bytes(2, "big") + body


# ---- keys ----


def extract(secret: bytes, salt: bytes) -> bytes:
    """Returns the key from which others are derived: HKDF-Extract with SHA-256."""
    return hmac.digest(salt, secret, "sha256")


def expand(key: bytes, info: bytes, length: int) -> bytes:
    """Returns `length` bytes for the purpose `info`: HKDF-Expand with SHA-256."""
    blocks = [b""]
    while sum(map(len, blocks)) < length:
        count = len(blocks).to_bytes(1, "big")
        blocks.append(hmac.digest(key, blocks[-1] + info + count, "sha256"))
    return b"".join(blocks)[:length]


@dataclass(frozen=True)
class Session:
    """The keys of one connection; both sides derive the same keys."""

    client_proof: bytes
    server_proof: bytes
    client_key: bytes  # for messages from client to server
    server_key: bytes
    link_key: bytes  # for frames of the core: client to server, then server to client

    @classmethod
    def derive(cls, secret: bytes, hello: bytes, answer: bytes) -> Session:
        """Derives the keys.

        Args:
            secret: secret of the job.
            hello: the complete first message of the client.
            answer: preamble and nonce of the server.
        """
        transcript = hashlib.sha256(
            b"tfdist handshake" + len(hello).to_bytes(4, "big") + hello + answer
        ).digest()
        key = extract(secret, transcript)
        return cls(
            client_proof=expand(key, b"tfdist proof of the client", MAC_BYTES),
            server_proof=expand(key, b"tfdist proof of the server", MAC_BYTES),
            client_key=expand(key, b"tfdist channel client to server", MAC_BYTES),
            server_key=expand(key, b"tfdist channel server to client", MAC_BYTES),
            link_key=expand(key, b"tfdist frames of a link", LINK_KEY_BYTES),
        )


def check_proof(role: str, expected: bytes, received: bytes) -> None:
    """Raises AuthenticationError unless the proof of `role` is the expected one."""
    if not hmac.compare_digest(expected, received):
        raise AuthenticationError(f"the {role} does not know the secret of this job")


# ---- messages after the handshake ----


@dataclass
class Sealer:
    """One direction of an authenticated connection: MACs with a counter.

    References:
        Krawczyk, Bellare & Canetti, HMAC: Keyed-Hashing for Message Authentication, RFC
        2104, 1997, section 2.
    """

    key: bytes
    count: int = 0

    def mac(self, body: bytes) -> bytes:
        """Returns the MAC of the next message."""
        return self.mac_of([body])

    def mac_of(self, parts: Sequence[bytes] | Sequence[memoryview]) -> bytes:
        """Returns the MAC of a message in several parts, which are not copied."""
        value = hmac.new(self.key, self.count.to_bytes(8, "big"), "sha256")
        for part in parts:
            value.update(part)
        self.count += 1
        return value.digest()

    def seal(self, body: bytes) -> bytes:
        """Returns the next message in the form in which it is sent."""
        return self.mac(body) + body

    def open(self, message: bytes) -> bytes:
        """Returns the body of the next message.

        Raises:
            AuthenticationError: a message was changed, dropped, repeated or reordered.
        """
        received, body = message[:MAC_BYTES], message[MAC_BYTES:]
        if not hmac.compare_digest(self.mac(body), received):
            raise AuthenticationError("a message is forged, repeated or out of order")
        return body


def encode(message: dict[str, Any]) -> bytes:
    """Returns a message as compact JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> dict[str, Any]:
    """Decodes a JSON message; raises AuthenticationError if it is not an object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AuthenticationError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise AuthenticationError("a message is not a JSON object")
    return message


def decode_bytes(message: dict[str, Any], name: str, length: int) -> bytes:
    """Decodes a hexadecimal field of `length` bytes."""
    text = message.get(name)
    if not isinstance(text, str) or len(text) != 2 * length:
        raise AuthenticationError(f"the field {name!r} of a message is malformed")
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise AuthenticationError(f"the field {name!r} is not hexadecimal") from error


# ---- claims ----


def difference(
    expected: dict[str, Any], claims: dict[str, Any], names: dict[str, str]
) -> str:
    """Describes the claims of the other side that differ; returns "" if none do.

    Args:
        expected: name → value on this side.
        claims: claims of the other side. A missing claim is shown as None.
        names: name → description for the message.

    Example:
        >>> from tfdist.core.rendezvous import auth
        >>> auth.difference({"generation": 2}, {"generation": 1}, {})
        'generation 2 here, 1 at the side that connects'
    """
    return "; ".join(
        f"{names.get(name, name)} {value!r} here, {claims.get(name)!r:.100} at the "
        "side that connects"
        for name, value in expected.items()
        if claims.get(name) != value
    )
