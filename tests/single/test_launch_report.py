"""Which rank is said to have failed first, how, and what to look at. Pure."""

import signal

import pytest

from tfdist.launch.report import (
    RankEnd,
    describe_code,
    explain,
    first_failure,
    hint,
)


def end(rank, code=1, time_s=10.0, **more):
    return RankEnd(rank, code, time_s, host="n0", **more)


def first(*ends):
    found = first_failure(ends)
    return None if found is None else found.rank


def test_the_earliest_failure_is_the_first():
    assert first(end(0, time_s=3.0), end(1, time_s=2.0), end(2, 0, time_s=1.0)) == 1
    assert first(end(0, 0), end(1, 0)) is None
    assert first() is None


def test_a_report_tells_when_a_rank_failed_whenever_it_ended():
    slow = end(0, time_s=9.0, told={"time_s": 2.0})  # it saved something, then ended
    assert slow.failed_at_s == 2.0
    assert first(slow, end(1, time_s=3.0)) == 0
    assert end(0, time_s=1.0, told={"time_s": 2.0}).failed_at_s == 1.0


def test_who_was_ended_by_the_launcher_has_not_failed():
    assert first(end(0, -15, time_s=1.0, ended_by_us=True), end(1, time_s=2.0)) == 1


@pytest.mark.parametrize(
    ("blamed", "expected"),
    [
        ({0: 2, 1: 2}, 2),  # the one that both name, though it ended last
        ({0: 1, 1: 2}, 2),
        ({0: 0, 1: 0}, 0),  # its own fault
        ({0: 7, 1: 2}, 0),  # of one that has not failed nobody knows more
        ({0: 1, 1: 2, 2: 0}, 0),  # each names another one
    ],
)
def test_who_names_another_one_is_not_the_cause(blamed, expected):
    ends = [
        end(rank, time_s=rank + 1.0, told={"blamed": blamed.get(rank)})
        for rank in range(3)
    ]
    assert first(*ends) == expected


def test_the_exit_code_is_that_of_a_shell():
    assert [end(0, code).exit_code for code in (0, 3, -9)] == [0, 3, 137]
    assert describe_code(3) == "exit code 3"
    assert describe_code(-9) == "killed by SIGKILL"
    assert describe_code(-50) == "killed by signal 50"


def test_a_report_names_cause_reason_advice_and_the_others(tmp_path):
    cause = end(
        1,
        time_s=14.26,
        told={"error": "OSError: No space left\nmore", "blamed": None},
        tail=[b"step 7", b"OSError: No space left on device \xff"],
    )
    others = [end(0, -9), end(2, -15, ended_by_us=True), end(3, 0)]
    ends = [others[0], cause, *others[1:]]
    assert explain(cause, ends, started_s=12.0, log=tmp_path) == [
        "rank 1 on n0 failed first: exit code 1 after 2.3 s",
        "reason: OSError: No space left",
        "hint: a disk is full: see `df -h`",
        "last lines of rank 1:",
        "  | step 7",
        "  | OSError: No space left on device \ufffd",
        "other ranks: 0: killed by SIGKILL, 2: ended by tfdistrun, 3: exit code 0",
        f"all output: {tmp_path}",
    ]
    alone = end(0, 3)
    assert explain(alone, [alone], started_s=10.0, log=None) == [
        "rank 0 on n0 failed first: exit code 3 after 0.0 s"
    ]


def test_a_host_that_was_lost_is_the_cause_and_its_second_line_the_advice():
    lost = end(1, lost="host n1 was lost\nlook at its network\n")
    told = explain(lost, [lost], started_s=10.0, log=None)
    assert told[0].startswith("rank 1 on n0 failed first: host n1 was lost after")
    assert told[1] == "hint: look at its network"


def test_advice_fits_the_way_it_failed():
    finished = [end(0, 0), end(1, told={"blamed": 0})]
    assert "rank 0 had ended without an error" in hint(finished[1], finished)
    failed = [end(0, 1), end(1, told={"blamed": 0})]
    assert hint(failed[1], failed) == ""
    itself = end(1, told={"blamed": 1})
    assert hint(itself, [end(0, 0), itself]) == ""
    assert "ulimit -n" in hint(end(0, tail=[b"x", b"OSError: Too many open files"]), [])
    assert hint(end(0, tail=[b"nothing that is known"]), []) == ""
    assert "python FILE" in hint(end(0, 126), [])
    assert "dmesg" in hint(end(0, -signal.SIGKILL, tail=[b"MemoryError"]), [])
    assert hint(end(0, -50), []) == ""
