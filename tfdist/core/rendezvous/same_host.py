"""Finds the ranks that share a host: each rank claims a host, a connection proves it.

A rank claims a host by the boot id of its kernel and its network namespace. The claim
alone proves nothing: virtual machines that were cloned while running make equal claims.
The proof is an authenticated connection to an abstract AF_UNIX name, which cannot be
reached from another kernel or network namespace. Shared memory has exactly the same
requirement (`links`). Each rank tries the lower ranks with the same claim, the nearest
first; the first rank that it reaches is on its host. TFDIST_TRANSPORT does not change
which ranks share a host, so reductions give the same bits with every transport.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from tfdist.core.rendezvous.auth import AuthenticationError, RefusedError
from tfdist.core.rendezvous.channel import Channel
from tfdist.core.rendezvous.errors import invalid, timeout
from tfdist.core.rendezvous.secret import boot_id

_RETRY_S = 0.05


def claim() -> str:
    """Returns an identifier that is equal for processes that can share memory.

    Example:
        >>> from tfdist.core.rendezvous import same_host
        >>> same_host.claim() == same_host.claim()
        True
    """
    try:
        status = os.stat("/proc/self/ns/net")
        namespace = f"{status.st_dev}:{status.st_ino}"
    except OSError:  # a sandbox may lack it; use the host name
        namespace = socket.gethostname()
    return f"{boot_id()}/{namespace}"


def candidates(rank: int, claims: Sequence[str]) -> list[int]:
    """Returns the lower ranks that claim the host of `rank`, in the order to try them.

    The nearest rank is first, so with many ranks on a host, each is tried about once.
    """
    return [other for other in reversed(range(rank)) if claims[other] == claims[rank]]


def number_hosts(reached: Sequence[int]) -> tuple[int, ...]:
    """Numbers the hosts by their lowest rank.

    Args:
        reached: for each rank, a lower rank on the same host, or the rank itself if it
            is the lowest there.

    Returns:
        For each rank, the index of its host.

    Example:
        >>> from tfdist.core.rendezvous import same_host
        >>> same_host.number_hosts([0, 1, 0, 1])
        (0, 1, 0, 1)
        >>> same_host.number_hosts([0, 0, 2, 1])
        (0, 0, 1, 0)
    """
    numbers: list[int] = []
    for rank, other in enumerate(reached):
        numbers.append(
            max(numbers, default=-1) + 1 if other == rank else numbers[other]
        )
    return tuple(numbers)


async def reaches(
    unix_name: str,
    *,
    secret: bytes,
    claims: dict[str, Any],
    description: str,
    deadline: float,
    size: int = 1,
) -> bool:
    """Returns whether the rank that listens on an abstract name is on this host.

    Args:
        unix_name: abstract name of the rank, from its record.
        secret: secret of the job.
        claims: claims of the handshake: both ranks, job, generation
            (`links.LinkCredentials`).
        description: description of the rank, for messages.
        deadline: time limit on the time.monotonic() clock, in seconds. The function
            waits this long for a busy rank, because the result must not depend on how
            fast the rank answers.
        size: number of ranks that connect at once.

    Raises:
        RendezvousError: a process listens on the name, but refuses these claims, or
            does not answer in time.
    """
    loop = asyncio.get_running_loop()
    while True:
        channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), size=size)
        try:
            await loop.sock_connect(channel.sock, "\0" + unix_name)
        except ConnectionRefusedError:  # the name does not exist in this namespace
            channel.close()
            return False
        except BaseException:
            channel.close()
            raise
        try:
            await channel.handshake_as_client(secret, claims)
            return True
        except RefusedError as error:
            raise invalid(
                f"cannot prove that {description} is on this host: {error}"
            ) from error
        except (OSError, AuthenticationError, TimeoutError) as error:
            if time.monotonic() + _RETRY_S >= deadline:
                raise timeout(
                    f"{description} is on this host but does not answer there: "
                    f"{error or 'no answer'}"
                ) from error
        finally:
            channel.close()
        await asyncio.sleep(_RETRY_S)
