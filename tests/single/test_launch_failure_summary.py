"""Which rank is said to have failed first, how, and what to look at. Pure."""

import signal

import pytest

from tfdist.launch.failure_summary import (
    RankEnd,
    describe_code,
    exit_code,
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
        ({0: 1, 1: 2, 2: 0}, 1),  # each names another one: it is the first who knows
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
        "other ranks: 0: killed by SIGKILL, 2: ended by tfdistrun, 3: exit code 0",
        f"all output: {tmp_path}",
        "reason: OSError: No space left",
        "hint: a disk is full: see `df -h`",
    ]
    alone = end(0, 3)
    assert explain(alone, [alone], started_s=10.0, log=None) == [
        "rank 0 on n0 failed first: exit code 3 after 0.0 s"
    ]


def test_last_lines_are_shown_of_a_rank_that_said_no_reason_and_is_far_up():
    lines = [b"step 7", b"step 8 \xff"]
    told = explain(end(1, -9, tail=lines), [], started_s=10.0, log=None)
    shown = ["last lines of rank 1:", "  | step 7", "  | step 8 \ufffd"]
    assert told[1:4] == shown
    near = end(1, -9, tail=lines, tail_is_shown=True)
    assert not set(explain(near, [], started_s=10.0, log=None)) & set(shown)


def test_a_rank_that_could_say_nothing_has_the_reason_of_who_blames_it():
    killed = end(1, -9, time_s=11.0)
    victims = [
        end(0, time_s=13.0, told={"blamed": 1, "error": "it came later"}),
        end(2, time_s=12.0, told={"blamed": 1, "error": "its process was killed"}),
        end(3, time_s=10.0, told={"blamed": 0, "error": "another matter"}),
    ]
    told = explain(killed, [killed, *victims], started_s=10.0, log=None)
    assert "reason (as rank 2 saw it): its process was killed" in told
    assert len([line for line in told if line.startswith("reason")]) == 1


def test_of_two_that_blame_each_other_the_one_that_is_blamed_first_is_out():
    """A link broke: rank 0 went on as the majority, then rank 1 saw it end."""
    cut = "rank 1 failed: the connection to it ended, although its process is there"
    ends = [
        end(0, time_s=10.0, told={"blamed": 1, "error": cut}),
        end(1, time_s=11.0, told={"blamed": 0, "error": "rank 0 was killed"}),
    ]
    assert first_failure(ends) is ends[1]
    told = explain(ends[1], ends, started_s=10.0, log=None)
    assert told[-2] == f"reason (as rank 0 saw it): {cut}"
    assert told[-1].startswith("hint: a connection between two ranks was cut")


def test_a_rank_that_was_ended_is_the_first_when_all_others_blame_it():
    slow = end(0, -15, time_s=20.0, ended_by_us=True)  # in a `finally` block
    victims = [end(rank, 7, told={"blamed": 0, "error": "full"}) for rank in (1, 2)]
    ends = [*victims, slow]
    assert first_failure(ends) is slow
    assert exit_code(slow, ends) == 7
    told = explain(slow, ends, started_s=10.0, log=None)
    assert "failed first: ended by tfdistrun" in told[0]
    assert told[-1] == "reason (as rank 1 saw it): full"
    # One that fails by itself is the cause, whatever else was ended.
    own = end(3, 5, time_s=12.0, told={"blamed": None})
    assert first_failure([*ends, own]) is own
    assert exit_code(own, [*ends, own]) == 5


def test_who_ends_in_silence_is_no_cause_when_others_name_one():
    silent = end(1, time_s=9.0)  # it caught the error, and called os._exit(1)
    cause = end(0, time_s=12.0, told={"blamed": None, "error": "full"})
    victim = end(2, time_s=10.0, told={"blamed": 0})
    assert first(silent, cause, victim) == 0
    assert first(silent, cause) == 1
    killed = end(0, -9, time_s=12.0)
    assert first(silent, killed, victim) == 0


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
    assert "batch system" in hint(end(0, -signal.SIGTERM), [])
    assert hint(end(0, -signal.SIGTERM, told={"error": "a child of a rank"}), []) == ""
