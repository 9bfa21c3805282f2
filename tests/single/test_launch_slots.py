"""The slots of the processes of an elastic job, and their hosts."""

from tfdist.launch.hosts import Host, Slot
from tfdist.launch.hosts import slots_of as slots_of_hosts
from tfdist.launch.slots import Slots


def listed(*counts):
    """Slots of hosts, each of which has so many."""
    hosts = [Host(f"host-{index}", count) for index, count in enumerate(counts)]
    return slots_of_hosts(hosts, 9)


def slots_of(*counts, least=0):
    return Slots(listed(*counts), least)


def fill(slots, count):
    for member in range(count):
        slots.take(member, running=range(member))


def test_the_first_processes_fill_the_hosts_in_order():
    slots = slots_of(2, 1)
    fill(slots, 3)
    assert [slots.host_of(member) for member in range(3)] == [0, 0, 1]


def test_a_replacement_gets_the_slot_of_the_lost_process():
    slots = slots_of(2, 2)
    fill(slots, 4)
    assert slots.take(4, running=[0, 1, 3]) == Slot(1, 0)
    assert slots.take(5, running=[0, 3, 4]) == Slot(0, 1)


def test_a_spare_shares_a_slot_of_the_host_with_the_fewest_processes():
    slots = slots_of(2, 2, 1)
    fill(slots, 5)
    assert slots.take(5, running=range(5)) == Slot(2, 0)
    assert slots.take(6, running=range(6)) == Slot(1, 1)
    assert slots.take(7, running=range(7)) == Slot(0, 1)


def test_when_a_spare_has_taken_a_place_the_next_one_gets_the_free_slot():
    slots = slots_of(1, 1)
    fill(slots, 2)
    spare = slots.take(2, running=[0, 1])
    assert spare.host == 1
    assert slots.take(3, running=[1, 2]).host == 0


def test_no_process_is_started_on_a_lost_host():
    slots = slots_of(1, 2)
    fill(slots, 3)
    slots.lose(1)
    assert slots.room == 1
    assert slots.take(3, running=[0]).host == 0
    slots.lose(0)
    assert slots.room == 0 and slots.take(4, running=[]) is None


# ---- changes ----


def test_processes_on_removed_slots_are_unwanted():
    slots = slots_of(2, 2)
    fill(slots, 4)
    slots.change([Slot(0, 0), Slot(2, 0), Slot(2, 1)], running=range(4))
    assert slots.room == 3 and slots.unwanted(range(4)) == {1, 2, 3}
    assert slots.unwanted([0, 2]) == {2}  # the others have ended
    assert slots.take(4, range(4)) == Slot(2, 0)
    slots.change(listed(2), running=range(5))
    assert slots.unwanted(range(5)) == {2, 3, 4}


def test_the_position_of_a_slot_follows_the_list():
    slots = slots_of(1, 2)
    assert slots.position(Slot(1, 1)) == 2
    slots.change([Slot(1, 0), Slot(1, 1), Slot(2, 0)], running=[])
    assert [slots.position(slot) for slot in (Slot(1, 1), Slot(2, 0))] == [1, 2]


def test_as_many_slots_are_kept_as_the_job_needs_those_in_use_first():
    slots = slots_of(2, 2, least=3)
    fill(slots, 4)
    slots.change([Slot(2, 0)], running=[1, 3])
    assert slots.room == 3 and not slots.unwanted([1, 3])
    slots.change([Slot(2, 0), Slot(2, 1)], running=[1, 3])
    assert slots.room == 3 and len(slots.unwanted([1, 3])) == 1
    slots.change([Slot(2, 0), Slot(2, 1), Slot(3, 0)], running=[1, 3])
    assert slots.unwanted([1, 3]) == {1, 3}


def test_a_lost_host_keeps_no_slots():
    slots = slots_of(1, 2, least=3)
    fill(slots, 3)
    slots.lose(1)
    slots.change([Slot(2, 0)], running=[0])
    assert slots.room == 2 and not slots.unwanted([0])
