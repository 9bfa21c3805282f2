"""Pickles objects that ranks send to each other if TFDIST_OBJECTS=pickle.

This is the only module of tfdist that unpickles. Unpickling runs code from the bytes,
so the MAC of the bytes is checked first. The MAC proves that a process with the job's
secret created the bytes, as the object of the expected rank for this call. The MAC is
end to end, on every kind of link: shared-memory links have no MAC of their own, and TCP
links have a MAC over all contents only with TFDIST_TCP_MAC=all.

References:
    Krawczyk, Bellare & Canetti, HMAC: Keyed-Hashing for Message Authentication, RFC
    2104, 1997, section 2.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import importlib.util
import pickle
import secrets
from typing import Any

from tfdist.core import runtime
from tfdist.core.rendezvous import auth

VARIABLE = "TFDIST_OBJECTS"
MAC_BYTES = 32
_PROTOCOL = 5  # supported by every Python version that tfdist supports
_own_key = secrets.token_bytes(auth.SECRET_BYTES)  # for a process without links


class NotLoadedError(ValueError):
    """A pickled object was not loaded; the text is the reason."""


def is_enabled() -> bool:
    """Returns whether this job unpickles objects; equal on all ranks after `init()`.

    Raises:
        RuntimeError: unpickling is enabled, but the ranks have no common secret.
    """
    enabled = runtime.setting(VARIABLE) == "pickle"
    credentials, _ = runtime.credentials()
    has_no_key = enabled and credentials is None and runtime.size() > 1
    if has_no_key and not runtime.is_rehearsing():
        raise RuntimeError(
            f"{VARIABLE}=pickle needs ranks that authenticate each other, but these "
            "ranks have no common secret, because they were not connected by tfdist. "
            "Send plain data, or start the ranks with tfdistrun."
        )
    return enabled


def key() -> bytes:
    """Returns the key for objects of this world, equal on all ranks."""
    credentials, _ = runtime.credentials()
    if credentials is None:
        return _own_key
    world = hashlib.sha256(
        f"{credentials.generation}\n{credentials.job}".encode()
    ).digest()
    return auth.expand(
        auth.extract(credentials.secret, world), b"tfdist objects", MAC_BYTES
    )


def can_pickle_by_value() -> bool:
    """Returns whether functions and classes that the program defines can be sent."""
    return importlib.util.find_spec("cloudpickle") is not None


def seal(obj: Any, about: str, key: bytes, *, max_bytes: int) -> bytes:
    """Pickles an object, with cloudpickle if it is installed, and prepends a MAC.

    Args:
        obj: any object that can be pickled.
        about: identity of the object: its rank and call.
        key: key of this world.
        max_bytes: largest size of the result, in bytes.

    Raises:
        TypeError: the object cannot be pickled, or cloudpickle cannot be imported.
        ValueError: the result has too many bytes.
    """
    pickler = _pickler()
    try:
        body = pickler.dumps(obj, protocol=_PROTOCOL)
    except Exception as error:  # methods of the object may raise anything
        kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
        advice = _without_cloudpickle(error) if pickler is pickle else ""
        raise TypeError(
            f"Expected an object that can be pickled, got {kind}: {error}{advice}"
        ) from error
    if len(body) + MAC_BYTES > max_bytes:
        raise ValueError(
            f"Expected an object of at most {max_bytes} bytes, got "
            f"{len(body) + MAC_BYTES} bytes, pickled. Raise max_bytes on all ranks, or "
            "send arrays with tfdist.broadcast() or tfdist.allgather()."
        )
    return _mac(body, about, key) + body


def unseal(data: bytes, about: str, key: bytes) -> Any:
    """Unpickles the result of `seal` with the same `about` and `key`.

    Raises:
        NotLoadedError: the MAC is wrong, and nothing was unpickled; or unpickling
            raised an error, for example because a module is not installed on this rank.
    """
    body = data[MAC_BYTES:]
    if not hmac.compare_digest(_mac(body, about, key), data[:MAC_BYTES]):
        raise NotLoadedError(
            "its MAC is wrong: the bytes do not match an object that a rank of this "
            "job has sent. Nothing was unpickled."
        )
    try:
        return pickle.loads(body)  # noqa: S301
    except Exception as error:  # methods of the object may raise anything
        raise NotLoadedError(f"{type(error).__name__}: {error}") from error


def _pickler() -> Any:
    if not can_pickle_by_value():
        return pickle
    try:
        return importlib.import_module("cloudpickle")
    except Exception as error:  # the user's installation may be broken in any way
        raise TypeError(
            "cloudpickle is installed, but cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or remove it."
        ) from error


def _mac(body: bytes, about: str, key: bytes) -> bytes:
    label = about.encode()
    value = hmac.new(key, len(label).to_bytes(8, "big") + label, "sha256")
    value.update(body)
    return value.digest()


def _without_cloudpickle(error: Exception) -> str:
    text = str(error)
    # This does not match "'_thread._local' object", which no pickler supports.
    if any(word in text for word in ("local object", "lambda", "<locals>")):
        return ". Lambdas and local functions or classes need: pip install cloudpickle"
    return ""
