"""The timeline without a job: clocks, events, merging, and who was slowest."""

import dataclasses
import errno
import itertools
import json
import os

import pytest

from tfdist.core.timeline import clocks, communication, events, merging, parts
from tfdist.core.timeline.slowest_rank import slowest
from tfdist.tools import cli
from tfdist.tools import timeline as tool

# ---- clocks ----


def trip(at_us, *, offset_us=0, there_us=50, back_us=50):
    """A round trip that begins at `at_us` of the rank's clock."""
    heard = at_us + there_us + offset_us
    return {
        "type": "clock",
        "asked": at_us,
        "heard": heard,
        "answered": heard + 3,
        "back": at_us + there_us + 3 + back_us,
    }


@pytest.mark.parametrize(("there_us", "back_us"), [(50, 50), (10, 400), (400, 10)])
def test_an_offset_is_wrong_by_half_of_the_round_trip_at_most(there_us, back_us):
    found = clocks.offset_of(
        trip(1000, offset_us=-7_000_000, there_us=there_us, back_us=back_us)
    )
    assert found.error_us == (there_us + back_us) / 2
    assert abs(found.offset_us + 7_000_000) <= found.error_us


def test_the_shortest_round_trip_of_each_window_counts():
    slow = trip(1_000, offset_us=500, there_us=4000, back_us=100)
    quick = trip(9_000_000, offset_us=500, there_us=20, back_us=30)
    later = trip(12_000_000, offset_us=900)
    for samples in itertools.permutations([later, slow, quick]):
        found = clocks.best_offsets(samples)
        assert [p.offset_us for p in found] == [495, 900]


def test_drift_is_a_straight_line_between_two_measurements():
    samples = [trip(0, offset_us=1000), trip(20_000_000, offset_us=1400)]
    convert, error_us = clocks.to_rank_zero(samples, same_host=False)
    assert error_us == 50
    assert convert(10_000_000) == pytest.approx(10_001_200, abs=1)
    assert convert(-5) == 995
    assert convert(30_000_000) == 30_001_400
    # Also where the clock has run for long before the first one.
    samples = [trip(at, offset_us=at // 10**6) for at in (10**12, 10**12 + 10**9)]
    convert, _ = clocks.to_rank_zero(samples, same_host=False)
    assert convert(10**12 + 5 * 10**8) == pytest.approx(10**12 + 501_000_500, abs=1)


def test_ranks_of_one_host_have_one_clock():
    noisy = [trip(0, there_us=10, back_us=90), trip(20_000_000)]
    convert, error_us = clocks.to_rank_zero(noisy, same_host=True)
    assert (convert(123), error_us) == (123, 0.0)
    # Unless it is not: a container may have a clock of its own.
    convert, _ = clocks.to_rank_zero([trip(0, offset_us=9000)], same_host=True)
    assert convert(0) == 9000
    # One measurement that says so is enough.
    apart = [trip(0), trip(20_000_000, offset_us=9000)]
    convert, _ = clocks.to_rank_zero(apart, same_host=True)
    assert convert(30_000_000) == 30_009_000


def test_without_a_round_trip_nothing_is_known():
    convert, error_us = clocks.to_rank_zero([], same_host=False)
    assert (convert(7), error_us) == (7, None)


# ---- slowest ----


def test_the_slowest_rank_is_the_one_that_waits_least():
    """Each step rank 2 is ready last, by 5; the others in turn before it."""
    for size in (2, 3, 5):
        late = size - 1
        ready = [[(r + step) % 3 for r in range(size)] for step in range(30)]
        for times in ready:
            times[late] = 8
        waited = {r: sum(max(t) - t[r] for t in ready) / 30 for r in range(size)}
        rank, cost = slowest(waited)
        assert rank == late
        assert cost == pytest.approx(7.0, abs=0.2)


def test_one_rank_alone_is_not_slow():
    assert slowest({0: 3.0}) == (None, 0.0)
    assert slowest({}) == (None, 0.0)


# ---- events ----


def operation(name, submitted, done, *, peer=1, first=None, **more):
    """One that ran at once; data of the peer began to come at `first`."""
    first = submitted + 2 if first is None else first
    row = {
        "type": "op",
        "name": name,
        "kind": "allreduce",
        "set": 0,
        "ticket": f"{name} {submitted}",
        "code": 0,
        "last_ready": -1,
        "bytes": 4096,
        "submitted": submitted,
        "agreed": submitted,
        "started": submitted + 1,
        "ended": done - 1,
        "done": done,
        "pack": [submitted + 1, submitted + 9, 5],
        "reduce": [first, done - 1, 7],
        "first_sent": submitted + 2,
        "last_sent": submitted + 9,
        "sent_bytes": 4096,
        "waited_for": peer if first > submitted + 2 else -1,
        "waited_since": submitted + 1,
        "waited_until": first,
        "peers": [[peer, first, done - 2, 4096]],
    }
    return {**row, **more}


def wait(rank, since, until):
    return {"type": "wait", "rank": rank, "since": since, "until": until}


def head(rank, **more):
    row = {
        "type": "rank",
        "version": parts.VERSION,
        "rank": rank,
        "size": 2,
        "host": f"n{rank}",
        "host_index": 0,
        "pid": 10 + rank,
        "run": "a",
        "generation": 1,
        "commit_gate": 0,
        "wall_us": 10**15,
        "monotonic_us": 0,
    }
    return {**row, **more}


def part(*operations, rank=0, **more):
    return parts.Part(head(rank), list(operations), **more)


def drawn(own):
    return list(events.events_of(own, lambda us: us))


def slices(found, name=None):
    return [e for e in found if e["ph"] == "X" and name in (None, e["name"])]


def test_a_step_has_its_backward_pass_and_what_is_exposed():
    group = "train/gradients.0123abcd"
    found = drawn(
        part(
            operation(f"{group}.0", 100, 160),
            operation(f"{group}.1", 150, 190),
            operation(f"{group}.0", 300, 330),
            operation(f"{group}.1", 320, 400),
            spans=[
                {"name": "step", "begin": 50, "end": 195},
                {"name": "step", "begin": 200, "end": 410},
            ],
        )
    )
    times = [(e["ts"], e["dur"]) for e in slices(found, "backward")]
    assert times == [(100, 50), (300, 20)]
    times = [(e["ts"], e["dur"]) for e in slices(found, "exposed")]
    assert times == [(150, 40), (320, 80)]
    exposed = [e for e in found if e["name"].startswith("exposed communication")]
    assert [(e["ts"], *e["args"].values()) for e in exposed] == [
        (195, 0.04),
        (410, 0.08),
    ]


def test_tracks_have_names_and_what_was_before_the_steps_is_of_none_of_them():
    gradients = "gradients.0123abcd"
    found = drawn(
        part(
            operation(f"{gradients}.0", 10, 20),
            operation(f"train/{gradients}.0", 100, 160),
            operation("x", 200, 300),
            spans=[{"name": "step", "begin": 50, "end": 195}],
        )
    )
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert list(tracks.values()) == [
        *("steps", "gradients", "gradients", "operations"),
        *("send", "receive", "reduce"),
    ]
    by_name = {name: tracks[slices(found, name)[0]["tid"]] for name in ("step", "x")}
    assert by_name == {"step": "steps", "x": "operations"}
    exposed = [e for e in found if e["name"].startswith("exposed communication")]
    assert [(e["ts"], *e["args"].values()) for e in exposed] == [(195, 0.06)]


def test_a_list_says_in_which_order_its_buckets_were_handed_over():
    group = "gradients.0123abcd"
    first = [operation(f"{group}.{i}", 100 + 10 * i, 160) for i in range(3)]
    then = [operation(f"{group}.{i}", 300 - 10 * i, 360) for i in range(3)]
    ready = [e["args"]["ready"] for e in slices(drawn(part(*first, *then)), group)]
    assert ready == ["0 1 2", "2 1 0"]


def test_slices_of_a_track_nest():
    """The format knows no others; the viewers draw them wrongly."""
    own = part(
        *(
            operation(f"gradients.0123abcd.{i % 4}", 10 * i, 10 * i + 45)
            for i in range(30)
        ),
        *(operation(f"x{i}", 13 * i, 13 * i + 80, last_ready=1) for i in range(20)),
    )
    found = slices(drawn(own))
    for _, group in itertools.groupby(
        sorted(found, key=lambda e: (e["tid"], e["ts"], -e["dur"])),
        key=lambda e: e["tid"],
    ):
        open_until = []
        for event in group:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def test_an_operation_says_for_whom_it_waited():
    own = part(
        operation("x", 100, 200, first=180),
        operation("y", 300, 400, agreed=350, started=351, last_ready=1),
        operation("z", 500, 600, agreed=550, started=551, last_ready=0),
    )
    own.waits = [wait(1, 101, 180), wait(1, 300, 350), wait(0, 500, 501)]
    found = drawn(own)
    assert [(e["ts"], e["dur"]) for e in slices(found, "wait for rank 1")] == [
        (101, 79)
    ]
    assert [(e["ts"], e["dur"]) for e in slices(found, "agree: rank 1 last")] == [
        (300, 50)
    ]
    assert [(e["ts"], e["dur"]) for e in slices(found, "agree: rank 0 last")] == [
        (500, 50)
    ]
    assert not slices(found, "wait for rank -1")
    totals = [e["args"] for e in found if e["name"].startswith("waited for")]
    assert totals == [
        {"rank 1": 0.079},
        {"rank 1": 0.129},
        {"rank 0": 0.001, "rank 1": 0.129},
    ]


def test_what_ran_as_one_moved_once():
    both = {"ticket": "7"}
    found = drawn(part(operation("a", 10, 90, **both), operation("b", 12, 91, **both)))
    assert len(slices(found, "send")) == len(slices(found, "reduce")) == 1
    assert len(slices(found, "a")) == len(slices(found, "b")) == 1


def test_a_failed_operation_that_never_ran_is_shown():
    none = dict.fromkeys(("agreed", "started", "ended", "first_sent", "last_sent"), 0)
    row = operation("x", 100, 200, code=10, peers=[], **none)
    row |= {"pack": [0, 0, 0], "reduce": [0, 0, 0]}
    found = slices(drawn(part(row)))
    assert [(e["name"], e["args"].get("error")) for e in found] == [("x", 10)]


@pytest.mark.parametrize(("gate", "shown"), [(0, []), (1, ["gradients.0123abcd.0"])])
def test_the_commit_gate_is_shown_where_it_is_on_and_only_of_gradients(gate, shown):
    own = part(
        operation("gradients.0123abcd.0", 100, 200, ended=150),
        operation("x", 100, 200, ended=150),
    )
    own.head["commit_gate"] = gate
    found = slices(drawn(own))
    of = {e["tid"]: e["name"] for e in found if e["dur"] == 100 and e["tid"] >= 1000}
    assert [of[e["tid"]] for e in found if e["name"] == "commit gate"] == shown


# ---- parts and merging ----


def write(folder, rank, *rows, ended=True, name="", **more):
    lines = [head(rank, **more), *rows, *([{"type": "end"}] if ended else [])]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in lines)
    path = folder / (name or f"rank-{rank}.jsonl")
    path.write_text(text)
    return path


def test_a_torn_line_and_a_file_that_was_turned_are_read(tmp_path):
    path = write(tmp_path, 1, operation("b", 30, 40))
    assert parts.has_ended(path)
    path = write(tmp_path, 1, operation("b", 30, 40), ended=False)
    assert not parts.has_ended(path)
    with path.open("a") as file:
        file.write('{"type":"op","na')
    write(tmp_path, 1, operation("a", 10, 20), ended=False, name="rank-1.jsonl.old")
    own = parts.read(path)
    assert [op["name"] for op in own.operations] == ["a", "b"]
    assert not own.complete
    assert not parts.has_ended(path)
    # The old file of another run is not ours.
    write(tmp_path, 1, operation("c", 1, 2), name="rank-1.jsonl.old", run="b")
    assert [op["name"] for op in parts.read(path).operations] == ["b"]


def test_clocks_of_two_hosts_are_aligned(tmp_path):
    """Rank 1's clock is 3 s ahead; its data is sent before it is received."""
    ahead = 3_000_000
    write(tmp_path, 0, operation("x", 1000, 1400, first=1200), wait(1, 1001, 1200))
    late = operation("x", 1150 + ahead, 1390 + ahead, peer=0)
    clock = trip(500 + ahead, offset_us=-ahead)
    write(tmp_path, 1, clock, late, host_index=1, monotonic_us=ahead)
    summary = merging.merge(tmp_path)
    assert (summary.ranks, summary.incomplete) == ([0, 1], [])
    assert summary.error_us == 50
    assert summary.slowest == (0, 0.0) or summary.slowest[0] == 1
    trace = json.loads(summary.path.read_text())
    ends = {
        e["pid"]: e["ts"] + e["dur"] for e in trace["traceEvents"] if e["name"] == "x"
    }
    assert abs(ends[0] - ends[1]) <= 60
    assert trace["otherData"]["slowest_rank"] == 1
    names = [
        e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    ]
    assert names == ["rank 0 (n0)", "rank 1 (n1), slowest: others waited 0.2 ms for it"]


def test_a_trace_begins_with_the_first_rank(tmp_path):
    """Whatever their clocks have counted before."""
    since = {0: 700_000_000, 1: 700_000_400}
    for rank, start in since.items():
        op = operation("x", start + 100, start + 300, peer=1 - rank)
        wall_us = 10**15 + start
        write(tmp_path, rank, op, monotonic_us=start, wall_us=wall_us)
    summary = merging.merge(tmp_path)
    trace = json.loads(summary.path.read_text())
    begins = {e["pid"]: e["ts"] for e in slices(trace["traceEvents"], "x")}
    assert begins == {0: 100, 1: 500}
    assert trace["otherData"]["started_wall_us"] == 10**15 + since[0]
    # Nobody has waited, so nobody is called slow.
    events_of_names = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    names = [e["args"]["name"] for e in events_of_names]
    assert names == ["rank 0 (n0)", "rank 1 (n1)"]


def test_of_three_hosts_the_two_worst_clocks_tell_how_far_two_are_apart(tmp_path):
    write(tmp_path, 0, size=5)
    for rank, way_us in ((1, 300), (2, 20), (3, 100)):
        clock = trip(500, there_us=way_us, back_us=way_us)
        write(tmp_path, rank, clock, host_index=rank, size=5)
    assert merging.merge(tmp_path).error_us == 300 + 100
    write(tmp_path, 4, host_index=4, size=5)  # nothing was measured
    assert merging.merge(tmp_path).error_us is None


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path, 0, operation("x", 10, 90))

    def full(*args, **named):
        raise OSError("no space left")

    monkeypatch.setattr(events, "events_of", full)
    with pytest.raises(OSError, match="no space left"):
        merging.merge(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line_and_keeps_the_trace_of_before(
    tmp_path, monkeypatch, capsys
):
    write(tmp_path, 0, operation("x", 10, 90))
    assert tool.main([str(tmp_path)]) == 0
    trace = tmp_path / "trace.json"
    before = trace.read_text()
    capsys.readouterr()

    def full(*args, **named):
        # As a write does: without the name of the file.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(events, "events_of", full)
    assert tool.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told == f"{trace} cannot be written: No space left on device\n"
    assert trace.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0.jsonl", trace.name]


def test_the_first_step_does_not_make_a_rank_slow(tmp_path):
    """It builds the graph, sometimes for seconds."""
    step = {"type": "span", "name": "step", "begin": 0, "end": 5000}
    write(
        tmp_path, 0, wait(1, 100, 4000), wait(1, 4500, 5010), wait(1, 6001, 6050), step
    )
    write(tmp_path, 1, operation("x", 5020, 5200, peer=0), step)
    summary = merging.merge(tmp_path)
    assert summary.waited_us == {0: {1: 10 + 49}, 1: {}}


def test_the_tool_says_what_is_missing(tmp_path, capsys):
    write(tmp_path, 0, operation("x", 10, 90), ended=False, size=3)
    write(tmp_path, 2, {"type": "dropped", "count": 4}, host_index=1, size=3)
    assert cli.main(["timeline", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path / 'trace.json'}: 2 of 3 ranks" in told
    assert "no files of ranks [1]: copy them here" in told
    assert "did not end normally, or still running: [0]" in told
    assert "clocks: not compared" in told
    assert "4 records were lost" in told
    json.loads((tmp_path / "trace.json").read_text())


def test_the_tool_refuses_what_is_no_timeline(tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 1
    assert "Expected files rank-N.jsonl" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "none")]) == 1
    assert f"got {tmp_path / 'none'}: no such folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert tool.main([str(tmp_path / "file")]) == 1
    assert f"got {tmp_path / 'file'}: a file" in capsys.readouterr().err
    (tmp_path / "rank-0.jsonl").write_text("hello\n")
    assert tool.main([str(tmp_path)]) == 1
    assert "to begin with a line about its rank" in capsys.readouterr().err
    write(tmp_path, 0)
    write(tmp_path, 1, run="b")
    assert tool.main([str(tmp_path)]) == 1
    assert (
        "of one job, got parts of 2 jobs: ranks [0] and [1]" in capsys.readouterr().err
    )
    assert not (tmp_path / "trace.json").exists()


def with_steps(rank, exposed_us, *, spans=True):
    """Lines of steps of 1 ms, each exposed for so long; the first one for 0.9 ms."""
    for number, us in enumerate([900, *exposed_us]):
        begin = 1000 * number
        name = "train/gradients.0123abcd.0"
        wait_us = us // 2 if rank == 0 else 2
        yield operation(
            f"{name}#{number}",
            *(begin + 50, begin + 50 + us),
            peer=1 - rank,
            first=begin + 50 + wait_us,
        )
        if spans:
            yield {"type": "span", "name": "step", "begin": begin, "end": begin + 1000}


def test_the_tool_tells_exposed_communication_and_the_longest_waits(tmp_path, capsys):
    write(tmp_path, 0, *with_steps(0, [100, 200, 600]), operation("x", 9000, 9040))
    write(tmp_path, 1, *with_steps(1, [50, 50, 50]))
    assert tool.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (
        "exposed communication per step, without the first step:\n"
        "  rank 0: mean 0.30 ms, median 0.20 ms, 30.0% of 1.00 ms (3 steps of fit)\n"
        "  rank 1: mean 0.05 ms, median 0.05 ms, 5.0% of 1.00 ms (3 steps of fit)\n"
        "longest waits, summed over all ranks and steps except the first:\n"
        "  0.4 ms for rank 1 in train/gradients.0123abcd.0\n"
    ) in told
    about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert about["exposed_communication"]["0"]["mean_ms"] == pytest.approx(0.3)
    assert [wait["rank"] for wait in about["longest_waits"]] == [1]


def test_a_loop_of_the_users_own_has_steps_from_reduction_to_reduction(
    tmp_path, capsys
):
    write(tmp_path, 0, *with_steps(0, [100, 100, 100], spans=False), size=1)
    assert tool.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    # From 950, where the first reduction ended, to 3150 in three steps.
    line = "mean 0.10 ms, median 0.10 ms, 13.6% of 0.73 ms (3 reductions of gradients)"
    assert line in told


def test_of_many_ranks_those_with_most_exposed_communication_have_a_line(tmp_path):
    exposed = {
        rank: communication.Exposure(9, float(rank), float(rank), 100.0, of_fit=True)
        for rank in range(12)
    }
    write(tmp_path, 0)
    summary = dataclasses.replace(merging.merge(tmp_path), exposed=exposed)
    told = tool.report(summary)
    assert "rank 4: mean 4.00 ms" in told and "rank 3:" not in told
    assert told.endswith("  4 other ranks have less\n")


# ---- damaged and foreign parts ----


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def test_lines_that_are_none_of_a_timeline_are_named_and_left_out(tmp_path, capsys):
    whole = operation("x", 10, 90)
    write(
        tmp_path,
        0,
        whole,
        without(whole, "done"),
        {**whole, "name": 7},
        {**whole, "pack": [1, 2]},
        {**whole, "pack": 7},
        {**whole, "peers": [[1, 2, 3]]},
        {**whole, "bytes": True},
        without(wait(1, 5, 9), "until"),
        {**trip(0), "back": 10**400},
        {"type": "span", "name": "step", "begin": 1.5, "end": 9},
        {"type": "dropped"},
        {"type": "new"},
        {"ph": "X"},
        [1],
        wait(1, 20, 30),
    )
    path = tmp_path / "rank-1.jsonl"
    path.write_bytes(
        json.dumps(head(1)).encode()
        + b'\n{"type":"op","na\n'
        + json.dumps(operation("y", 10, 90, peer=0))
        .encode()
        .replace(b'"y"', b'"y\xff"')
        + b'\n{"type":"op","na'
    )
    assert cli.main(["timeline", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path / 'trace.json'}: 2 of 2 ranks" in told
    assert "skipped: 14 files or lines of files" in told
    assert '  rank-0.jsonl, line 3: op without a number "done"\n' in told
    assert '  rank-0.jsonl, line 4: op without a text "name"\n' in told
    assert "  and 9 more\n" in told
    summary = merging.merge(tmp_path)
    lines = [int(one.split("line ")[1].split(":")[0]) for one in summary.left_out]
    assert lines == [*range(3, 16), 2]
    assert summary.left_out[-1] == "rank-1.jsonl, line 2: not JSON"
    assert summary.waited_us == {0: {1: 10}, 1: {}}
    found = slices(json.loads(summary.path.read_text())["traceEvents"])
    assert {(e["pid"], e["name"]) for e in found} >= {(0, "x"), (1, "y\ufffd")}


def test_a_head_that_lacks_something_is_none(tmp_path, capsys):
    for wrong in (
        *(without(head(0), name) for name in ("rank", "size", "run", "monotonic_us")),
        head(0, host_index="0"),
        {**head(0), "rank": 2},
        head(0, version=parts.VERSION + 1),
        [1],
    ):
        (tmp_path / "rank-0.jsonl").write_text(json.dumps(wrong) + "\n")
        assert tool.main([str(tmp_path)]) == 1
        assert "to begin with a line about its rank" in capsys.readouterr().err


def test_copies_are_no_ranks_of_their_own(tmp_path, capsys):
    for rank in (0, 1):
        write(tmp_path, rank, operation("x", 10, 90, peer=1 - rank))
    text = (tmp_path / "rank-1.jsonl").read_text()
    for name in ("rank-2.jsonl", "rank-01.jsonl", "rank-1 copy.jsonl"):
        (tmp_path / name).write_text(text)
    assert tool.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "2 of 2 ranks" in told and "skipped: 3 files" in told
    assert "rank-01.jsonl: not a name like rank-0.jsonl" in told
    assert "rank-1 copy.jsonl: not a name like rank-0.jsonl" in told
    assert "rank-2.jsonl: the part of rank 1; rename it to rank-1.jsonl, or" in told
    # A part alone, under another rank's name, is not lost in silence.
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    write(tmp_path, 1, name="rank-0.jsonl")
    assert tool.main([str(tmp_path)]) == 1
    assert "got none; rank-0.jsonl: the part of rank 1" in capsys.readouterr().err


def test_of_two_parts_in_one_file_the_first_counts(tmp_path, capsys):
    path = write(tmp_path, 0, wait(1, 10, 20), operation("x", 10, 90))
    other = write(tmp_path, 1, operation("y", 10, 90, peer=0), wait(0, 30, 90))
    path.write_text(path.read_text() + other.read_text())
    assert tool.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "rank-0.jsonl, line 5: another part begins here; ignored with all" in told
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [e["pid"] for e in slices(trace["traceEvents"], "y")] == [1]
    assert trace["otherData"]["waited_for_us"] == {"0": {"1": 10}, "1": {"0": 60}}
