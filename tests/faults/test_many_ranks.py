"""Worlds above TFDIST_MESH_RANKS, as processes: late links, deaths, descriptors."""

import os
import signal
import time

import pytest
from campaign import rank as rank_program
from campaign.trial import Job
from helpers.alone import alone
from helpers.deadline import deadline

from tfdist.core.rendezvous.overlay import neighbours

ENVIRON = {
    "TFDIST_MESH_RANKS": "8",
    "TFDIST_SHM_SLOTS": "2",
    "TFDIST_SEGMENT_BYTES": "4096",
}
END_S = 40.0


def descriptors(pid):
    """Those of a rank, without the pipes that it has inherited from the test."""
    folder = f"/proc/{pid}/fd"
    found = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    return sum(not name.startswith("pipe:") for name in found)


def until_told(go):
    """Ranks stand still after their first steps until there is this file."""

    def enter(rank):
        del rank
        step = rank_program.Rank._step

        def held(self, group):
            while self.applied == rank_program.WARM_STEPS and not go.exists():
                time.sleep(0.01)
            step(self, group)

        rank_program.Rank._step = held  # of this process, which is the rank's

    return enter


def ends_of(job):
    late = job.wait("end", range(len(job.children)), END_S)
    assert not late
    return [child.word("end") for child in job.children]


@pytest.mark.parametrize("size", [16, pytest.param(32, marks=pytest.mark.slow)])
@alone(120)
@deadline(90)
def test_data_opens_the_links_that_it_needs_and_no_other(size):
    everyone = size - 1
    with Job(
        size, 1, {**ENVIRON, "TFDIST_ALLREDUCE_ALGORITHM": "pairwise"}, steps=8
    ) as job:
        job.ready()
        ends = ends_of(job)
    assert [end["message"] for end in ends if end["code"]] == []
    for rank, end in enumerate(ends):
        overlay = end["counters"]["overlay"]
        first = len(neighbours(rank, size))
        assert overlay["neighbours"] == first
        assert overlay["adopted"] == everyone - first
        sent = [link for link in end["counters"]["links"] if link["data_frames_sent"]]
        assert {link["transport"] for link in sent} == {"shm"}


@alone(90)
@deadline(60)
def test_a_world_above_the_limit_may_be_all_neighbours():
    with Job(3, 1, {**ENVIRON, "TFDIST_MESH_RANKS": "2"}, steps=8) as job:
        job.ready()
        ends = ends_of(job)
    assert [end["message"] for end in ends if end["code"]] == []


# In `make test`: only the links that are needed, above.
@pytest.mark.slow
@alone(120)
@deadline(90)
def test_a_rank_has_a_constant_and_one_descriptor_a_link(tmp_path):
    found = {}
    for size in (12, 24):
        go = tmp_path / str(size)
        with Job(size, 1, ENVIRON, steps=8, enter=until_told(go)) as job:
            job.ready()
            found[size] = max(descriptors(child.pid) for child in job.children)
            go.touch()
            ends = ends_of(job)
        assert [end["message"] for end in ends if end["code"]] == []
        assert {end["counters"]["overlay"]["adopted"] for end in ends} == {0}
    links = {size: len(neighbours(0, size)) for size in found}
    assert found[24] - found[12] == links[24] - links[12]
    assert found[24] <= links[24] + 24


# The leader, a relay to it, a leaf.
@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (8, 13))]
)
@alone(120)
@deadline(90)
def test_every_rank_names_the_one_that_was_killed(victim):
    size = 24
    with Job(size, victim, ENVIRON) as job:
        job.ready()
        killed_s = job.kill(victim, signal.SIGKILL)
        late = job.wait("end", set(range(size)) - {victim}, END_S)
        assert not late
        for rank, child in enumerate(job.children):
            if rank == victim:
                continue
            end = child.word("end")
            assert end["payload"]["kind"] == "rank_failed"
            assert end["payload"]["rank"] == victim
            assert end["payload"]["pid"] == job.children[victim].pid
            assert end["time_s"] - killed_s < 30.0


@alone(120)
@deadline(90)
def test_a_link_that_does_not_come_names_the_peer():
    # Rank 5 listens no more after the start; rank 0 is no neighbour of it.
    def enter(rank):
        if rank != 5:
            return
        from tfdist.core.rendezvous import on_demand_links

        async def never(self, peer):
            raise OSError("out of order")

        on_demand_links.OnDemandLinks._make = never

    environ = {**ENVIRON, "TFDIST_ALLREDUCE_ALGORITHM": "pairwise"}
    begin_s = time.monotonic()
    with Job(12, 1, environ, enter=enter) as job:
        ends = ends_of(job)
    for end in ends:
        assert end["code"] != 0
        assert "no link for data to rank" in end["message"]
        assert "out of order" in end["message"]
    assert time.monotonic() - begin_s < 60.0
