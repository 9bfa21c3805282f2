"""Exchanges one value from each rank through the store."""

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
    """Publishes a value of this rank; returns the values of all ranks in rank order.

    Args:
        store: store at which the ranks meet.
        settings: settings of this start.
        key: name of the value, equal on all ranks.
        value: JSON value of this rank.
        grace_s: seconds to wait after the deadline of the start, so that a rank with a
            more precise error can report it first.
        complaint: end of the error message, which begins with the missing ranks.

    Raises:
        RendezvousError: some ranks did not publish a value in time; the message names
            these ranks.
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
