"""Which processors each rank may use: --bind-to, from the topology to the warnings."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launch import binding, topology
from tfdist.launch.binding import BindingError, divide
from tfdist.launch.topology import Processor


def machine(sockets, cores, threads, nodes=1):
    """Numbered as Linux does: all first threads, then all second ones.

    Args:
        sockets: of the machine.
        cores: of each socket.
        threads: of each core.
        nodes: of each socket.
    """
    every = sockets * cores
    return sorted(
        Processor(
            socket=core // cores,
            node=core * nodes // cores,
            core=core,
            number=core + thread * every,
        )
        for core in range(every)
        for thread in range(threads)
    )


def only(processors, *numbers):
    return [one for one in processors if one.number in numbers]


TWO_SOCKETS = machine(2, 4, 2)  # 0-3 and 8-11 in the first one, 4-7 and 12-15


@pytest.mark.parametrize(
    ("processors", "ranks", "kind", "expected"),
    [
        (TWO_SOCKETS, 2, "none", ["0-15", "0-15"]),
        (TWO_SOCKETS, 3, "core", ["0,8", "1,9", "2,10"]),
        (TWO_SOCKETS, 1, "socket", ["0-3,8-11"]),
        (TWO_SOCKETS, 2, "socket", ["0-3,8-11", "4-7,12-15"]),
        (TWO_SOCKETS, 3, "socket", ["0-3,8-11", "0-3,8-11", "4-7,12-15"]),
        (TWO_SOCKETS, 20, "socket", ["0-3,8-11"] * 10 + ["4-7,12-15"] * 10),
        (TWO_SOCKETS, 2, "slice", ["0-3,8-11", "4-7,12-15"]),
        (TWO_SOCKETS, 4, "slice", ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        # 16 / 3 = 5, more than two whole cores; one is idle.
        (TWO_SOCKETS, 3, "slice", ["0-2,8-9", "3-4,10-12", "5-7,13-14"]),
        # 8 / 3 = 2, as many as whole cores give.
        (machine(1, 4, 2), 3, "slice", ["0,4", "1,5", "2,6"]),
        (machine(1, 4, 1), 3, "slice", ["0", "1", "2"]),
        (machine(1, 4, 2), 8, "slice", ["0", "4", "1", "5", "2", "6", "3", "7"]),
        # Two NUMA nodes in each socket.
        (machine(2, 4, 1, nodes=2), 4, "numa", ["0-1", "2-3", "4-5", "6-7"]),
        (machine(2, 4, 1, nodes=2), 2, "numa", ["0-1", "4-5"]),
        (machine(2, 4, 1, nodes=2), 2, "socket", ["0-3", "4-7"]),
        # Processors left by a control group: one thread of core 0, both of 5 and 6.
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 3, "core", ["0", "5,13", "6,14"]),
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 2, "slice", ["0,5", "6,13"]),
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 3, "slice", ["0", "5", "6"]),
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 5, "slice", ["0", "5", "13", "6", "14"]),
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 2, "socket", ["0", "5-6,13-14"]),
        (only(TWO_SOCKETS, 0, 5, 6, 13, 14), 5, "numa", ["0"] + ["5-6,13-14"] * 4),
        (only(TWO_SOCKETS, 7), 1, "slice", ["7"]),
    ],
)  # fmt: skip
def test_processors_are_dealt_out(processors, ranks, kind, expected):
    found = divide(processors, ranks, kind)
    assert [topology.ranges(one) for one in found] == expected


def test_a_host_without_ranks_has_nothing_to_deal_out():
    assert binding.here(0, "slice") == []


@pytest.mark.parametrize(
    ("ranks", "kind", "says"),
    [
        (5, "core", "one rank for each core, got 5 ranks for 4 cores .*0-7"),
        (9, "slice", "one rank for each processor, got 9 ranks for 8 processors"),
    ],
)
def test_more_ranks_than_places_are_refused(ranks, kind, says):
    with pytest.raises(BindingError, match=says) as caught:
        divide(machine(1, 4, 2), ranks, kind)
    assert "--bind-to none" in str(caught.value)


@given(
    sockets=st.integers(1, 3),
    cores=st.integers(1, 5),
    threads=st.integers(1, 2),
    kept=st.sets(st.integers(0, 29), min_size=1),
    ranks=st.integers(1, 40),
    kind=st.sampled_from(binding.KINDS),
)
def test_whatever_is_allowed(sockets, cores, threads, kept, ranks, kind):
    everything = machine(sockets, cores, threads)
    there = only(everything, *kept) or everything
    try:
        found = divide(there, ranks, kind)
    except BindingError:
        cores_there = {(one.socket, one.core) for one in there}
        assert ranks > {"core": len(cores_there), "slice": len(there)}[kind]
        return
    numbers = {one.number for one in there}
    assert len(found) == ranks
    for one in found:
        assert one and list(one) == sorted(set(one)) and numbers.issuperset(one)
    if kind in ("core", "slice"):  # nobody shares one
        assert len(set().union(*found)) == sum(len(one) for one in found)
    if kind == "slice":
        assert {len(one) for one in found} == {len(there) // ranks}


# ---- what the kernel tells ----


def tree(folder, processors, *, nodes=True):
    """A /sys/devices/system like that of a machine."""
    for one in processors:
        siblings = [p.number for p in processors if p.core == one.core]
        place = folder / "cpu" / f"cpu{one.number}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{one.socket}\n")
        (place / "core_cpus_list").write_text(f"{topology.ranges(siblings)}\n")
    for node in {one.node for one in processors} if nodes else ():
        here = [one.number for one in processors if one.node == node]
        place = folder / "node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{topology.ranges(here)}\n")
    (folder / "node").mkdir(exist_ok=True)
    (folder / "node" / "online").write_text("0\n")
    return folder


def test_the_topology_is_read(tmp_path):
    made = machine(2, 4, 2, nodes=2)
    assert topology.read(range(16), tree(tmp_path, made)) == made
    assert topology.read({9, 4}, tmp_path) == only(made, 4, 9)


def test_an_old_kernel_without_numa_nodes_is_read(tmp_path):
    made = machine(2, 2, 2)
    tree(tmp_path, made, nodes=False)
    for path in tmp_path.glob("cpu/*/topology/core_cpus_list"):
        path.rename(path.with_name("thread_siblings_list"))
    found = topology.read(range(8), tmp_path)
    assert [(p.socket, p.core, p.number) for p in found] == [
        (p.socket, p.core, p.number) for p in made
    ]
    assert {p.node for p in found} == {0}


def test_where_nothing_is_told_each_processor_is_a_core(tmp_path):
    assert topology.read([2, 0], tmp_path) == [
        Processor(socket=0, node=0, core=0, number=0),
        Processor(socket=0, node=0, core=2, number=2),
    ]


def test_this_machine_is_read():
    assert {one.number for one in topology.own()} == os.sched_getaffinity(0)
    assert topology.own() == sorted(topology.own())


@given(st.sets(st.integers(0, 300)))
def test_lists_are_written_as_they_are_read(numbers):
    assert topology.parse_ranges(topology.ranges(numbers) + "\n") == numbers


# ---- what the user is told ----


def test_equal_shares_need_no_words():
    assert binding.warnings({0: (0, 1), 1: (2, 3)}, {0: "", 1: ""}) == []
    assert binding.warnings({}, {}) == []


def test_more_threads_than_processors_are_told():
    (told,) = binding.warnings({0: (0, 1), 1: (2, 3)}, {0: "8", 1: "8"})
    assert told.startswith("TF_NUM_INTRAOP_THREADS=8, but rank 0 may use 2 of")


@pytest.mark.parametrize("value", ["", "0", "many"])
def test_unequal_numbers_of_threads_are_told(value):
    bound = {0: (0, 1), 1: (2,), 2: (3, 4, 5)}
    (told,) = binding.warnings(bound, dict.fromkeys(bound, value))
    assert told.startswith(
        "rank 1 will have 1 TensorFlow threads, rank 2 will have 3: "
    )
    assert "-x TF_NUM_INTRAOP_THREADS=1" in told


def test_a_variable_makes_them_equal_and_on_one_rank_alone_unequal():
    assert binding.warnings({0: (0, 1), 1: (2,)}, {0: "1", 1: "1"}) == []
    (told,) = binding.warnings({0: (0, 1), 1: (0, 1)}, {0: "", 1: "1"})
    assert "rank 1 will have 1 TensorFlow threads" in told
