"""How a process of an elastic job goes from one generation to the next."""

import pytest

import tfdist
from tfdist.core import generations, native, runtime, world
from tfdist.core.generations import Generations
from tfdist.core.rendezvous import renewal

ON_ONE_HOST = {"local_rank": 3, "local_size": 4, "cross_rank": 0, "cross_size": 1}


def lost(rank, kind="rank_failed"):
    """The error of a collective operation of which this rank was lost."""
    payload = {"kind": kind, "rank": rank, "cause": "killed"}
    return native.CoreError(native.ABORTED, f"rank {rank} was lost", payload)


class Job:
    """tfdistrun and the other ranks, of which the test decides what they do.

    Attributes:
        requests: what the process has sent.
        failures: what its next attempts to connect raise; None: they connect.
    """

    def __init__(self):
        self.requests, self.failures = [], []
        self.generation = 1

    def ask_for_place(self, environ, number, request):
        self.requests.append(dict(request))
        self.generation += 1
        return renewal.Place(generation=self.generation, rank=3, size=4, **ON_ONE_HOST)

    def reconnect(self, place, timeout_s):
        runtime.state.generation = place.generation
        if self.failures and (failure := self.failures.pop(0)):
            raise failure


@pytest.fixture
def job(monkeypatch):
    made = Job()
    monkeypatch.setattr(runtime, "state", runtime.State(generation=1))
    monkeypatch.setattr(renewal, "ask_for_place", made.ask_for_place)
    monkeypatch.setattr(world, "reconnect", made.reconnect)
    monkeypatch.setattr(native, "failure", lambda: None)
    monkeypatch.setattr(Generations, "begin", lambda self: None)
    monkeypatch.setenv("TFDIST_MEMBER", "9")
    monkeypatch.setenv("TFDIST_RANK", "3")
    monkeypatch.setenv("TFDIST_SIZE", "4")
    return made


def test_a_newcomer_that_does_not_connect_asks_as_a_member_from_then_on(job):
    """tfdistrun has given it a place, and ignores what a newcomer asks for."""
    job.failures = [lost(0), None]
    process = Generations()
    assert process.is_newcomer
    process.enter_next(-1, "", lambda: None)
    assert [one["generation"] for one in job.requests] == [0, 2]
    assert [one["failed"] for one in job.requests] == [[], [0]]
    assert not process.is_newcomer


@pytest.mark.parametrize(("kind", "failed"), [("no_majority", [0]), ("evicted", [])])
def test_tfdistrun_decides_who_goes_on_if_the_ranks_cannot(
    job, monkeypatch, kind, failed
):
    """One of two hosts is cut off: the ranks of the other one name a silent rank."""
    monkeypatch.setenv("TFDIST_MEMBER", "3")
    monkeypatch.setattr(native, "failure", lambda: lost(0, kind))
    Generations().enter_next(5, "", lambda: None)
    assert [one["failed"] for one in job.requests] == [failed]


@pytest.mark.parametrize(
    ("rank", "message", "expected"),
    [
        (0, "lost", True),
        (1, "lost", False),
        (0, "a rank leaves after a step", False),
    ],
)
def test_a_rank_0_that_is_lost_is_told_from_one_that_leaves(
    job, monkeypatch, rank, message, expected
):
    monkeypatch.setenv("TFDIST_MEMBER", "3")
    error = native.CoreError(
        native.ABORTED, message, {"kind": "rank_failed", "rank": rank}
    )
    monkeypatch.setattr(native, "failure", lambda: error)
    process = Generations()
    process.enter_next(5, "", lambda: None)
    assert process.has_lost_first == expected


def test_other_errors_of_the_ranks_end_the_program(job, monkeypatch):
    monkeypatch.setattr(native, "failure", lambda: lost(0, "mismatch"))
    with pytest.raises(native.CoreError):
        Generations().enter_next(5, "", lambda: None)
    assert not job.requests


# ---- SIGTERM ----


class Notice(renewal.EndNotice):
    """Stands for the notice of tfdistrun: nothing, to wait, or the last step."""

    def __init__(self, was_asked, end=None):
        self.asked, self.end = was_asked, end

    @property
    def was_asked(self):
        return self.asked

    def wait_for_end(self, timeout_s):
        return self.end


def process_at(committed, notice):
    runtime.state.resources["end notice"] = notice
    return Generations(progress=lambda: (committed, 10))


def test_the_generation_ends_at_the_step_of_which_the_ranks_are_told(job):
    assert not process_at(5, Notice(False)).ends_after_commit()
    assert not process_at(5, Notice(True, 6)).ends_after_commit()
    assert process_at(6, Notice(True, 6)).ends_after_commit()


def test_work_between_two_commits_ends_if_a_rank_wants_to_leave(job, monkeypatch):
    aborted = []
    monkeypatch.setattr(native, "abort", aborted.append)
    monkeypatch.setattr(native, "failure", lambda: lost(0) if aborted else None)
    process_at(5, Notice(False)).check_between_commits()
    for _ in range(2):
        with pytest.raises(tfdist.RankFailedError):
            process_at(5, Notice(True, 6)).check_between_commits()
    assert len(aborted) == 1


def test_a_rank_that_is_not_told_the_last_step_ends_the_generation(job, monkeypatch):
    """Otherwise the others would wait for it in the next generation."""
    aborted = []
    monkeypatch.setattr(generations, "_AGREE_S", 0.05)
    monkeypatch.setattr(native, "abort", aborted.append)
    monkeypatch.setattr(native, "failure", lambda: lost(0) if aborted else None)
    assert process_at(5, Notice(True)).ends_after_commit()
    assert len(aborted) == 1


def test_a_rank_that_has_left_ends_with_the_code_of_sigterm(job, monkeypatch):
    def dismiss(*_):
        raise renewal.DismissedError

    monkeypatch.setattr(renewal, "ask_for_place", dismiss)
    with pytest.raises(SystemExit) as ending:
        Generations(progress=lambda: (5, 10)).enter_next(5, "", lambda: None)
    assert ending.value.code == 143


def test_a_last_generation_is_for_programs_that_can_save(job, monkeypatch):
    monkeypatch.setenv("TFDIST_MEMBER", "3")
    place = renewal.Place(generation=2, rank=3, size=4, is_last=True, **ON_ONE_HOST)
    monkeypatch.setattr(renewal, "ask_for_place", lambda *_: place)
    process = Generations(progress=lambda: (5, 10))
    process.enter_next(5, "", lambda: None)
    assert process.is_last
    with pytest.raises(native.CoreError, match="SIGTERM"):
        Generations().enter_next(5, "", lambda: None)
