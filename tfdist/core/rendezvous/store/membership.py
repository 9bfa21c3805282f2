"""Shows the store that a rank is alive while the ranks connect."""

from __future__ import annotations

import asyncio
from typing import Any

from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel
from tfdist.core.rendezvous.store.client import open_channel, store_lost
from tfdist.core.rendezvous.store.keys import MEMBER


class Membership:
    """The connection that shows the store that this rank is alive."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    async def join(
        cls,
        address: tuple[str, int],
        secret: bytes,
        *,
        member: dict[str, Any],
        deadline: float,
        generation: int,
        job: str = "",
        size: int = 1,
    ) -> Membership:
        """Joins as `member`, which has "rank", "host" and "pid"."""
        claims = {"purpose": MEMBER, "job": job, "generation": generation}
        channel = await open_channel(address, secret, claims, deadline, size)
        try:
            await channel.send(member)
        except OSError as error:
            channel.close()
            raise store_lost(str(error)) from error
        return cls(channel)

    async def first_failure(self) -> dict[str, Any]:
        """Waits until a rank fails or gives up.

        Returns:
            "rank", "host", "pid" and "cause". If the rank has reported the failure
            itself, also the "kind" of its error, and optionally "detail".
        """
        try:
            failed = (await self._channel.receive())["values"][0]
            return dict(failed)
        except (OSError, AuthenticationError, KeyError, IndexError) as error:
            raise store_lost(str(error)) from error

    async def leave(self) -> None:
        """Leaves; from then on, the end of this process is not a failure."""
        try:
            async with asyncio.timeout(2.0):
                await self._channel.send({"op": "leave"})
        except (OSError, TimeoutError):
            pass  # The store is gone.
        finally:
            self._channel.close()

    def close(self) -> None:
        """Closes the connection: the store then considers this rank failed."""
        self._channel.close()
