"""Ranks over a bad network: right results, or an error on every rank that names one."""

import time

import pytest
from helpers.deadline import deadline
from helpers.relay import drop_some, flip_one_bit, once, repeat_some
from helpers.relayed import Fault, Relay, RelayedJob, set_faults

from tfdist.core import native

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
# A link that says nothing although it is open is found out by the missing heartbeats,
# long before the deadline of the operation that waits for it.
SILENT_S = 2.0  # TFDIST_PEER_TIMEOUT_S
LIMITS = {"TFDIST_TIMEOUT_S": "60", "TFDIST_STALL_WARNING_S": "60"}
CUT_S = 2.0  # from a reset connection to the last rank's error
MARGIN_S = 4.0  # for a busy machine


def job(size, seed=0, fault=None, **more):
    return RelayedJob(size, Relay(seed, fault), **{**LIMITS, **more})


def blamed(ends):
    """The ranks that are named; every rank must have got an error."""
    assert all(end["code"] != 0 and end["message"] for end in ends.values()), ends
    return {end["payload"].get("rank") for end in ends.values()}


# ---- slow, but right ----


@pytest.mark.parametrize(
    ("size", "steps", "fault"),
    [
        pytest.param(3, 4, Fault(delay_s=0.01, jitter_s=0.02), marks=pytest.mark.slow),
        (2, 3, Fault(piece_bytes=1)),
        pytest.param(3, 8, Fault(bytes_per_s=3e5), marks=pytest.mark.slow),
        pytest.param(3, 30, Fault(delay_s=0.05, jitter_s=0.1), marks=pytest.mark.slow),
        pytest.param(4, 6, Fault(piece_bytes=7, jitter_s=0.01), marks=pytest.mark.slow),
    ],
    ids=["late", "byte by byte", "narrow", "later", "all of it"],
)
@deadline(90)
def test_a_slow_network_changes_no_result(size, steps, fault):
    with job(size, 1, fault, steps=steps, TFDIST_TIMEOUT_S="60") as ranks:
        ends = ranks.ends(70.0)
        ways = ranks.relay.ways
    assert [(end["code"], end["applied"]) for end in ends.values()] == [
        (0, steps)
    ] * size, ends
    assert len(ways) == size * (size - 1)  # every link went through it
    assert all(way.passed > steps * 100 for way in ways.values())


# ---- cut ----


@pytest.mark.parametrize(
    ("size", "pair"),
    [
        (3, (1, 2)),
        pytest.param(2, (0, 1), marks=pytest.mark.slow),
        pytest.param(4, (0, 3), marks=pytest.mark.slow),
        pytest.param(4, (1, 2), marks=pytest.mark.slow),
    ],
)
@deadline(60)
def test_a_cut_connection_is_an_error_on_every_rank_at_once(size, pair):
    with job(size, TFDIST_TIMEOUT_S="60") as ranks:
        ranks.ready()
        before = time.monotonic()
        ranks.relay.cut(*pair)
        ends = ranks.ends(20.0)
    assert max(end["time_s"] for end in ends.values()) - before < CUT_S
    assert {end["code"] for end in ends.values()} == {native.ABORTED}
    assert blamed(ends) <= set(pair)
    for rank in pair:
        assert "rank" in ends[rank]["message"]
    if size == 2:
        assert [ends[rank]["payload"]["rank"] for rank in pair] == [1, 0]


# ---- silent ----


def silence(ranks, pair, how):
    """Makes a connection silent; returns what must have happened at the end."""
    relay = ranks.relay
    if how == "stalled":
        set_faults(relay, *pair, stalled=True)
        return lambda: True
    ways = relay.between(*pair)[: 1 if how == "one way" else 2]
    for way in ways:
        way.fault.swallowed = True
    return lambda: all(way.swallowed > 0 for way in ways)


@pytest.mark.parametrize(
    ("size", "pair", "how"),
    [
        (3, (2, 1), "half-open"),
        pytest.param(2, (0, 1), "half-open", marks=pytest.mark.slow),
        pytest.param(3, (2, 1), "one way", marks=pytest.mark.slow),
        pytest.param(3, (0, 2), "stalled", marks=pytest.mark.slow),
        pytest.param(3, (1, 2), "stalled", marks=pytest.mark.slow),
        pytest.param(2, (0, 1), "one way", marks=pytest.mark.slow),
        pytest.param(2, (1, 0), "one way", marks=pytest.mark.slow),
        pytest.param(4, (2, 3), "half-open", marks=pytest.mark.slow),
    ],
)
@deadline(90)
def test_a_silent_connection_is_an_error_on_every_rank_in_time(size, pair, how):
    with job(size) as ranks:
        ranks.ready()
        before = time.monotonic()
        took_effect = silence(ranks, pair, how)
        ends = ranks.ends(SILENT_S * 3 + 20.0)
        assert took_effect()
    last_s = max(end["time_s"] for end in ends.values()) - before
    assert last_s < SILENT_S + MARGIN_S, ends
    blamed(ends)


@pytest.mark.slow
@pytest.mark.parametrize("side", [{0, 1}, {0}, {1}, {3}])
@deadline(90)
def test_a_partition_leaves_no_side_that_goes_on(side):
    """Nobody is left that trains on without having noticed."""
    with job(4) as ranks:
        ranks.ready()
        before = time.monotonic()
        for one in side:
            for other in set(range(4)) - side:
                set_faults(ranks.relay, one, other, swallowed=True)
        ends = ranks.ends(SILENT_S * 3 + 20.0)
    last_s = max(end["time_s"] for end in ends.values()) - before
    assert last_s < SILENT_S + MARGIN_S, ends
    applied = [end["applied"] for end in ends.values()]
    assert max(applied) - min(applied) <= 1
    blamed(ends)


@pytest.mark.slow
@deadline(60)
def test_a_stall_that_heals_in_time_changes_nothing():
    with job(3, steps=400, TFDIST_TIMEOUT_S="30") as ranks:
        ranks.ready()
        set_faults(ranks.relay, 0, 2, stalled=True)
        time.sleep(1.0)
        assert all("end" not in told.said for told in ranks.ranks)
        set_faults(ranks.relay, 0, 2, stalled=False)
        ends = ranks.ends(40.0)
    assert [(end["code"], end["applied"]) for end in ends.values()] == [(0, 400)] * 3


# ---- changed ----


EDITS = {"flip": flip_one_bit, "repeat": repeat_some, "drop": drop_some}


@pytest.mark.parametrize(
    ("edit", "seed"),
    [
        ("flip", 1),
        pytest.param("drop", 1, marks=pytest.mark.slow),
        *(
            pytest.param(edit, seed, marks=pytest.mark.slow)
            for edit in EDITS
            for seed in range(2, 12)
        ),
    ],
)
@deadline(60)
def test_changed_bytes_are_never_a_wrong_result(edit, seed):
    """One part of the stream is changed once, anywhere in it."""
    with job(3, seed) as ranks:
        ranks.ready()
        for way in ranks.relay.between(0, 2):
            way.fault.edit = once(EDITS[edit])
        ends = ranks.ends(SILENT_S * 3 + 20.0)
        assert any(way.edited for way in ranks.relay.between(0, 2))
    blamed(ends)
