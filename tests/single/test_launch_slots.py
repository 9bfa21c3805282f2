"""The hosts of the processes of an elastic job."""

from tfdist.launch.hosts import Host, places
from tfdist.launch.slots import Slots


def slots_of(*counts):
    """Slots of hosts, each of which has so many."""
    hosts = [Host(f"host-{index}", count) for index, count in enumerate(counts)]
    return Slots(places(hosts, sum(counts)))


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
    assert slots.take(4, running=[0, 1, 3]).rank == 2
    assert slots.take(5, running=[0, 3, 4]).rank == 1


def test_a_spare_shares_a_slot_of_the_host_with_the_fewest_processes():
    slots = slots_of(2, 2, 1)
    fill(slots, 5)
    assert slots.take(5, running=range(5)).host == 2
    assert slots.take(6, running=range(6)).host == 1
    assert slots.take(7, running=range(7)).host == 0


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
