"""The client of the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import join_address
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel, connect_channel
from tfdist.core.rendezvous.errors import RendezvousError, invalid, timeout
from tfdist.core.rendezvous.store.keys import PURPOSE

_KEYS_A_WAIT = 64


async def open_channel(
    address: tuple[str, int],
    secret: bytes,
    claims: dict[str, Any],
    deadline: float,
    size: int,
) -> Channel:
    """Connects to the store; see `connect_channel`.

    Raises:
        RendezvousError: there was no server before the deadline, or the server refused
            the connection.
    """
    where = join_address(*address)
    try:
        return await connect_channel(address, secret, claims, deadline, size)
    except auth.RefusedError as error:
        raise invalid(
            f"{error}; give all ranks of a job the same TFDIST_JOB_ID, and start "
            "all of them again"
        ) from error
    except AuthenticationError as error:
        raise invalid(
            f"the rendezvous {where} and this rank do not belong together: "
            f"{error}; give all ranks of a job the same TFDIST_SECRET_FILE"
        ) from error
    except (OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise timeout(
            f"no rendezvous at {where} within the deadline: {reason}; is the "
            "process that serves it (tfdistrun, or rank 0) running there, and "
            "does every rank have the job's secret?"
        ) from error


class StoreClient:
    """Client of the store; sends one request at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        secret: bytes,
        *,
        deadline: float,
        job: str = "",
        generation: int = 0,
        size: int = 1,
    ) -> StoreClient:
        """Connects to the store.

        Args:
            address: host and port of the server.
            secret: the job's secret.
            deadline: time limit on the time.monotonic() clock, in seconds.
            job: name of the job, equal to the server's.
            generation: number of the initialization; 0 outside an initialization.
            size: number of ranks that connect at once.

        Raises:
            RendezvousError: there was no server before the deadline, or it serves a
                different job.
        """
        claims = {"purpose": PURPOSE, "job": job, "generation": generation}
        return cls(await open_channel(address, secret, claims, deadline, size))

    @property
    def own_host(self) -> str:
        """Returns the address of this machine from which the store is reached."""
        return str(self._channel.sock.getsockname()[0])

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    async def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            async with self._lock, asyncio.timeout(limit_s):
                return await self._exchange(request)
        except (OSError, AuthenticationError, TimeoutError) as error:
            reason = str(error) or f"no answer within {limit_s:g} s"
            raise store_lost(reason) from error

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            await self._channel.send(request)
            return await self._channel.receive()
        except ValueError:  # the request is too long, and nothing was sent
            raise
        except BaseException:
            # Otherwise a late answer would be taken for the answer to a later request.
            self._channel.close()
            raise

    async def set(self, key: str, value: Any, *, timeout_s: float = 10.0) -> None:
        """Sets a key to a JSON value."""
        await self._ask({"op": "set", "key": key, "value": value}, timeout_s)

    async def add(self, key: str, amount: int = 1, *, timeout_s: float = 10.0) -> int:
        """Adds to a counter, which starts at 0; returns the sum."""
        request = {"op": "add", "key": key, "amount": amount}
        return int((await self._ask(request, timeout_s))["value"])

    async def wait(self, keys: list[str], timeout_s: float) -> list[Any]:
        """Waits until all keys are set; returns their values.

        Raises:
            MissingKeysError: some keys were not set in time.
            RendezvousError: the store has ended or does not answer.
        """
        deadline = time.monotonic() + timeout_s
        values: list[Any] = []
        missing: list[str] = []
        for first in range(0, len(keys), _KEYS_A_WAIT):
            left_s = max(0.0, deadline - time.monotonic())
            request = {
                "op": "wait",
                "keys": keys[first : first + _KEYS_A_WAIT],
                "timeout_s": left_s,
            }
            answer = await self._ask(request, left_s + 5.0)
            missing += answer.get("missing", [])
            values += answer.get("values", [])
        if missing:
            raise MissingKeysError(missing)
        return values


class StoreLostError(RendezvousError):
    """The store has ended, or does not answer."""


def store_lost(reason: str) -> StoreLostError:
    """Returns the error for a store that has ended or does not answer."""
    error = timeout(f"lost the rendezvous store: {reason}")
    return StoreLostError(error.code, error.message, error.payload)


class MissingKeysError(Exception):
    """No rank has set the keys in time; `keys` lists them."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"not set in time: {keys}")
        self.keys = keys
