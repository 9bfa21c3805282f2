"""Checks that an agent runs before it starts ranks, and the ranks' variables."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any

from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.store import StoreClient
from tfdist.launch import preflight

_STORE_S = 5.0


class PrepareError(Exception):
    """The ranks cannot be started on this host; `code` is tfdistrun's exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def rank_environ(
    own: Mapping[str, str], given: Mapping[str, str], path: str
) -> dict[str, str]:
    """Returns the environment variables of all ranks of this host.

    Args:
        own: environment variables of the agent. Its TFDIST_* variables are ignored.
        given: variables from tfdistrun, which take precedence.
        path: tfdistrun's PATH, which is put in front of this host's PATH.

    Example:
        >>> from tfdist.launch import agent_checks
        >>> own = {"PATH": "/bin", "TFDIST_RANK": "7"}
        >>> agent_checks.rank_environ(own, {"A": "b"}, "/x")
        {'PATH': '/x:/bin', 'A': 'b'}
    """
    kept = {k: v for k, v in own.items() if not k.startswith("TFDIST_")}
    folders = [*path.split(os.pathsep), *own.get("PATH", "").split(os.pathsep)]
    kept["PATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    return {**kept, **given}


def prepare(job: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Enters the job's folder, and checks everything that the ranks will need.

    Returns:
        Warnings.

    Raises:
        PrepareError: something is missing on this host.
    """
    folder, command = job["cwd"], job["command"][0]
    try:
        os.chdir(folder)
    except OSError as error:
        raise PrepareError(
            f"the working directory {folder} cannot be entered there: "
            f"{error.strerror}; tfdistrun starts all ranks in its own working "
            "directory: create it on all hosts, or use a shared file system"
        ) from None
    if shutil.which(command, path=environ["PATH"]) is None:
        raise PrepareError(
            f"{command}: command not found there (PATH={environ['PATH']}); install the "
            "same programs on all hosts, or give the path",
            127,
        )
    own = min(int(job["slots"]), int(job["size"]))
    found = preflight.check(
        own,
        shm_bytes=job["shm_bytes"],
        world=job["size"],
        served=own,
        at_start=len(job["ranks"]),
    )
    if found.errors:
        raise PrepareError("; ".join(found.errors))
    try:
        asyncio.run(_reach_store(job))
    except RendezvousError as error:
        raise PrepareError(
            f"tfdistrun cannot be reached from there at {job['store']}: "
            f"{error.message}; choose the network with TFDIST_ADDRESS (an address, a "
            "network or an interface), and make sure that no firewall blocks it"
        ) from None
    return found.warnings


async def _reach_store(job: Mapping[str, Any]) -> None:
    client = await StoreClient.connect(
        split_address(job["store"]),
        bytes.fromhex(job["secret"]),
        deadline=time.monotonic() + _STORE_S,
        job=job["environ"]["TFDIST_JOB_ID"],
    )
    client.close()
