"""Purposes of a connection to the store, and keys that server and clients share."""

# Purpose of a connection, claimed in its handshake: requests, or presence of a rank.
PURPOSE = "store"
MEMBER = "member"
# Key of a random name of this store, which is part of every link's handshake.
SESSION = "session"


def failure_key(generation: int) -> str:
    """Returns the key of the first failure while a generation starts."""
    return f"{generation}/failed"
