"""Exchanges one value of each rank through the store."""

from __future__ import annotations

from typing import Any

from tfdist.core.rendezvous.errors import numbers, timeout
from tfdist.core.rendezvous.mesh_types import Settings
from tfdist.core.rendezvous.store import MissingKeysError, StoreClient


async def exchange(
    store: StoreClient,
    settings: Settings,
    key: str,
    value: Any,
    *,
    grace_s: float = 0.0,
    complaint: str,
) -> list[Any]:
    """Publishes a value of this rank; returns the values of all ranks, in order.

    Args:
        store: where the ranks meet.
        settings: of this start.
        key: name of the value, the same on all ranks.
        value: JSON value of this rank.
        grace_s: seconds to wait beyond the deadline of the start, so that a rank with
            a better explanation can report it first.
        complaint: predicate of the error message; its subject is the missing ranks.

    Raises:
        RendezvousError: some ranks did not publish theirs in time; names them.
    """
    prefix = f"{settings.generation}/{key}"
    placement = settings.placement
    await store.set(f"{prefix}/{placement.rank}", value)
    keys = [f"{prefix}/{rank}" for rank in range(placement.size)]
    try:
        return await store.wait(keys, settings.left_s + grace_s)
    except MissingKeysError as error:
        missing = [int(key.rpartition("/")[2]) for key in error.keys]
        raise timeout(
            f"{numbers(missing)} {complaint}",
            f"missing ranks: {', '.join(map(str, missing))}",
        ) from None
