"""Chooses the host of each new process of an elastic job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from tfdist.launch.hosts import Slot


class Slots:
    """The slots of all hosts, and the slot of each process of the job.

    If all slots are used, the index of a slot in the list is the rank of its process.
    This index changes when slots are added or removed; a `Slot` itself does not change.
    If no slot is free, a spare, or the replacement of a slow rank, shares a slot with
    another process.

    Args:
        slots: all slots; the ranks at the start of the job use the first ones.
        least: number of slots below which `change` does not go, unless there were fewer
            slots before.

    Example:
        >>> from tfdist.launch.hosts import Slot
        >>> from tfdist.launch.slots import Slots
        >>> slots = Slots([Slot(0, 0), Slot(0, 1), Slot(1, 0)])
        >>> [slots.take(member, running=range(member)).host for member in range(3)]
        [0, 0, 1]
        >>> slots.change([Slot(0, 0), Slot(1, 0)], running=range(3))
        >>> slots.room, slots.unwanted(running=range(3))
        (2, {1})
    """

    def __init__(self, slots: Sequence[Slot], least: int = 0) -> None:
        self._slots = list(slots)
        self._least = least
        self._taken: dict[int, Slot] = {}

    @property
    def room(self) -> int:
        """Number of slots."""
        return len(self._slots)

    @property
    def hosts(self) -> set[int]:
        """Hosts that have slots."""
        return {slot.host for slot in self._slots}

    def change(self, slots: Sequence[Slot], running: Collection[int]) -> None:
        """Replaces the slots with new ones.

        If there are fewer than `least` new slots, some previous slots are kept; slots
        of running processes are kept first.

        Args:
            slots: the new slots.
            running: numbers of the processes that have not exited.
        """
        used, new = {*self._used_by(running)}, {*slots}
        previous = [slot for slot in self._slots if slot not in new]
        previous.sort(key=lambda slot: slot not in used)
        kept = previous[: max(0, self._least - len(slots))]
        self._slots = [*slots, *kept]

    def lose(self, host: int) -> None:
        """Removes the slots of a host."""
        self._slots = [slot for slot in self._slots if slot.host != host]

    def unwanted(self, running: Collection[int]) -> set[int]:
        """Returns the running processes whose slots were removed."""
        known, slots = self._taken.keys() & {*running}, {*self._slots}
        return {one for one in known if self._taken[one] not in slots}

    def host_of(self, member: int) -> int:
        """Returns the host of a process, even if the process has exited."""
        return self._taken[member].host

    def position(self, slot: Slot) -> int:
        """Returns the rank that a process in the slot has if all slots are used."""
        return self._slots.index(slot)

    def take(self, member: int, running: Collection[int]) -> Slot | None:
        """Chooses a slot for a new process: the first free slot.

        If no slot is free, it is the last slot of the host whose number of processes
        exceeds its number of slots by the least.

        Args:
            member: number of the new process.
            running: numbers of the processes that have not exited.

        Returns:
            The slot; None if there are no slots.
        """
        if not self._slots:
            return None
        used = self._used_by(running)
        taken = {*used}
        free = next((slot for slot in self._slots if slot not in taken), None)
        if free is not None:
            self._taken[member] = free
        else:
            more = Counter(slot.host for slot in used)
            more.subtract(slot.host for slot in self._slots)
            # The last slot, because rank 0, in the first slot, has the most work.
            last = min(reversed(self._slots), key=lambda slot: more[slot.host])
            self._taken[member] = last
        return self._taken[member]

    def _used_by(self, running: Collection[int]) -> list[Slot]:
        return [self._taken[one] for one in running if one in self._taken]
