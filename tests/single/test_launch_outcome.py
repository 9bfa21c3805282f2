"""The exit code of tfdistrun, from the ends of its ranks."""

import signal

import pytest

from tfdist.launch.failure_summary import RankEnd
from tfdist.launch.outcome import Outcome, add_output, add_reports
from tfdist.launch.output import RankOutput, Screen, Sink

TERM = signal.SIGTERM


def outcome(*codes, **options):
    ends = [RankEnd(rank, code, float(rank)) for rank, code in enumerate(codes)]
    return Outcome(ends, **options)


def blaming(blamed, *codes, **options):
    """Ranks report that another one failed, by rank."""
    made = outcome(*codes, **options)
    for rank, other in blamed.items():
        made.ends[rank].told = {"error": "RankFailedError", "blamed": other}
    return made


@pytest.mark.parametrize(
    ("ended", "code", "failed"),
    [
        (outcome(0, 0), 0, None),
        (outcome(), 0, None),
        (outcome(0, 7), 7, 1),
        (outcome(0, -9), 137, 1),
        (outcome(0, 0, signal=TERM), 0, None),
        (outcome(0, -15, signal=TERM), 143, None),
        (outcome(143, 143, signal=TERM), 143, None),
        (outcome(0, 5, signal=TERM), 5, 1),
        (outcome(-15, 5, signal=TERM), 5, 1),
        (outcome(143, -15, 0, 6, 5, signal=TERM), 6, 3),
        (blaming({1: 0}, -15, 5, signal=TERM), 143, None),
        (blaming({1: 2, 2: 0}, -15, 5, 5, signal=TERM), 143, None),
        (blaming({1: 0, 3: 2}, -15, 5, 4, 3, signal=TERM), 4, 2),
        (outcome(signal=signal.SIGINT), 130, None),
        (outcome(143, 0, is_preempted=True, signal=TERM), 143, None),
        (outcome(143, 3, is_preempted=True, signal=TERM), 3, 1),
    ],
)
def test_exit_codes(ended, code, failed):
    assert ended.exit_code == code
    first = ended.first_failure
    assert (None if first is None else first.rank) == failed


def killed(*codes, **options):
    """Returns an outcome whose ranks tfdistrun has killed, if their code is not 0."""
    made = outcome(*codes, **options)
    for end in made.ends:
        end.ended_by_us = end.code != 0
    return made


@pytest.mark.parametrize(
    ("ended", "code", "failed"),
    [
        (killed(-9), 137, 0),  # it did not leave in time after SIGTERM
        (killed(0, -9), 137, 1),  # rank 0 has caught RankFailedError
        (killed(-9, -9, signal=TERM), 143, None),
        (killed(143, -9, is_preempted=True), 143, None),
    ],
)
def test_a_job_whose_last_ranks_tfdistrun_has_killed_fails(ended, code, failed):
    assert ended.exit_code == code
    first = ended.first_failure
    assert (None if first is None else first.rank) == failed


def test_the_log_is_that_of_the_process_and_not_that_of_the_number(tmp_path):
    """A replacement gets the rank of a lost process."""
    path = tmp_path / "replacement-3.log"
    end = RankEnd(1, 7, 0.0, told={"traceback": "Traceback: x"})
    with open(path, "wb", buffering=0) as log:
        output = RankOutput(3, 4, log)
        output.rank = 1
        add_output(end, output, Screen(Sink(None, is_terminal=False)))
    assert end.log == path and "Traceback: x" in path.read_text()
    output.close()
    assert output.log_path == path


def test_reports_are_found_by_member_and_have_the_time_of_this_host():
    ends = {5: RankEnd(1, 7, 9.0, host="a"), 1: RankEnd(0, 7, 9.0)}
    reports = {5: {"error": "x", "time_s": 3.0}, 0: {"error": "y"}}
    add_reports(ends, reports, {"a": 2.5})
    assert ends[5].told == {"error": "x", "time_s": 5.5}
    assert ends[1].told == {}
