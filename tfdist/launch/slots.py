"""Chooses the host of each new process of an elastic job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from tfdist.launch.hosts import Place


class Slots:
    """The slots of all hosts, and the slot that each process of the job was given.

    A slot is the place of a rank on a host. Its number is the rank that the place has
    if all slots are used. A spare, or the replacement of a slow rank, shares a
    slot with another process if none is free.

    Args:
        places: all slots; the first ones are those of the ranks at the start.

    Example:
        >>> from tfdist.launch.hosts import places_of
        >>> from tfdist.launch.slots import Slots
        >>> slots = Slots(places_of([0, 0, 1]))
        >>> [slots.take(member, running=range(member)).host for member in range(3)]
        [0, 0, 1]
        >>> slots.lose(1)
        >>> slots.room, slots.take(3, running=[0]).rank
        (2, 1)
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._taken: dict[int, Place] = {}

    @property
    def room(self) -> int:
        """Number of slots on the hosts that were not lost."""
        return len(self._places)

    def lose(self, host: int) -> None:
        """Removes the slots of a host."""
        self._places = [place for place in self._places if place.host != host]

    def host_of(self, member: int) -> int:
        """Returns the host of a process, which may have ended."""
        return self._taken[member].host

    def take(self, member: int, running: Collection[int]) -> Place | None:
        """Chooses a slot for a new process: the first one that is free.

        If none is free, it is the last slot of the host that has the fewest processes
        beyond its slots.

        Args:
            member: number of the new process.
            running: numbers of the processes that have not ended.

        Returns:
            The slot; None if all hosts were lost.
        """
        used = [self._taken[one] for one in running if one in self._taken]
        ranks = {place.rank for place in used}
        free = [place for place in self._places if place.rank not in ranks]
        if free:
            self._taken[member] = free[0]
        elif self._places:
            more = Counter(place.host for place in used)
            more.subtract(place.host for place in self._places)
            # The last slot, because rank 0, in the first slot, has the most work.
            last = min(reversed(self._places), key=lambda place: more[place.host])
            self._taken[member] = last
        else:
            return None
        return self._taken[member]
