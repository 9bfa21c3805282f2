"""Reports to the launcher why a rank failed, before the rank's process ends.

The launcher needs the report to identify the root cause, because the process that
failed first may not be the first to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any

from tfdist.core.rendezvous import renewal
from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.environment import detect
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.secret import read_secret_file
from tfdist.core.rendezvous.store import StoreClient

PREFIX = "report/"
_COUNTS = "reports of/"  # prefix of counters of equal errors
_TIMEOUT_S = 3.0  # for each request; many ranks may fail at the same time
_MODULES = re.compile(
    r"(tensorflow\.python\.framework\.errors_impl|tfdist(\.[a-z_]+)+)\."
)
# Lines in messages of TensorFlow and Keras that give a source location, not a reason.
# The lines after "Arguments received by" are the arguments of a layer.
_PLACES = re.compile(
    r"\[\[|\[Op:|Detected at node|<stack traces|File \"|Traceback \(|"
    r"\d+ root error|\d+ successful operations|\d+ derived errors"
)
_ARGUMENTS = "Arguments received by"


def reason(error: BaseException) -> str:
    r"""Returns one line with the reason for an exception.

    An error inside a `tf.function` begins with a general line ("Graph execution
    error:", "in user code:"); the reason is at its end.

    Args:
        error: any exception.

    Returns:
        The type of the error and the first line of its message. If this line ends with
        a colon, also the last line of the message that is not a source location.

    Example:
        >>> from tfdist.core.rendezvous import failure_report
        >>> failure_report.reason(ValueError("in user code:\n\n  KeyError: 3\n"))
        'ValueError: in user code: KeyError: 3'
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    text = text.partition(_ARGUMENTS)[0] or text
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines[1:] if line and not _PLACES.match(line)]
    first = _MODULES.sub("", lines[0], count=1)
    return f"{first} {reasons[-1]}" if first.endswith(":") and reasons else first


def send(environ: Mapping[str, str], text: dict[str, Any]) -> int:
    """Sends a rank's report to tfdistrun's store.

    Args:
        environ: variables of the launcher.
        text: "error" and "blamed" (the rank at fault, or None), and optionally
            "traceback". The function adds rank and time; the time is time.monotonic(),
            which all processes of a host share.

    Returns:
        How many ranks have reported this error so far, including this rank. 0 if no
        launcher accepts reports, or if the report could not be sent.
    """
    try:
        placement = detect(environ)
        if not placement.launcher_runs_store or placement.rendezvous is None:
            return 0
        address = split_address(placement.rendezvous)
        secret = read_secret_file(environ.get("TFDIST_SECRET_FILE", ""))
        report = {key: _encodable(value) for key, value in text.items()}
        report |= {"rank": placement.rank, "time_s": time.monotonic()}
        # A newcomer of an elastic job that has not joined has another process's rank.
        member = renewal.member_of(environ)
        key = f"{PREFIX}{placement.rank if member is None else member}"
        return asyncio.run(_send(address, secret, placement.job or "", key, report))
    except (RendezvousError, OSError, RuntimeError):
        return 0  # the launcher has ended, or this is inside a running loop


def _encodable(value: Any) -> Any:
    r"""Replaces the characters of a text that UTF-8 cannot encode.

    Python decodes file names that are not UTF-8 to such characters.

    Example:
        >>> from tfdist.core.rendezvous.failure_report import _encodable
        >>> _encodable("caf\udce9"), _encodable(None)
        ('caf?', None)
    """
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "replace").decode()


async def _send(
    address: tuple[str, int], secret: bytes, job: str, key: str, text: dict[str, Any]
) -> int:
    deadline = time.monotonic() + _TIMEOUT_S
    store = await StoreClient.connect(address, secret, deadline=deadline, job=job)
    try:
        await store.set(key, text, timeout_s=_TIMEOUT_S)
        digest = hashlib.sha256(str(text.get("error")).encode()).hexdigest()[:16]
        return await store.add(f"{_COUNTS}{digest}", timeout_s=_TIMEOUT_S)
    finally:
        store.close()
