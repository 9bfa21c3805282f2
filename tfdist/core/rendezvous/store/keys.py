"""Purposes of a connection to the store, and keys shared by server and clients."""

# Purpose of a connection, claimed in its handshake: requests, or presence of a rank.
PURPOSE = "store"
MEMBER = "member"
# Key of this store's random name, which is part of every link's handshake.
SESSION = "session"


def failure_key(generation: int) -> str:
    """Returns the key for the first failure during the start of a generation."""
    return f"{generation}/failed"
