"""The exit code of tfdistrun, from the ends of its ranks."""

import signal

import pytest

from tfdist.launch.failure_summary import RankEnd
from tfdist.launch.outcome import Outcome

TERM = signal.SIGTERM


def outcome(*codes, **options):
    ends = [RankEnd(rank, code, float(rank)) for rank, code in enumerate(codes)]
    return Outcome(ends, **options)


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
        (outcome(signal=signal.SIGINT), 130, None),
        (outcome(143, 0, is_preempted=True, signal=TERM), 143, None),
        (outcome(143, 3, is_preempted=True, signal=TERM), 3, 1),
    ],
)
def test_exit_codes(ended, code, failed):
    assert ended.exit_code == code
    first = ended.first_failure
    assert (None if first is None else first.rank) == failed
