"""How the marks of benchmarks/peers are read, on made-up rounds."""

import pytest

from benchmarks.peers import marks, report, required
from benchmarks.peers.marks import Mark, Round
from benchmarks.peers.text import milliseconds, parsed_sizes, size_text

MIB = 1 << 20


def rounds_with(ratios):
    """Rounds in which `own` takes a second, and the other `ratio` times as long."""
    return [Round({("other", "x"): r, ("own", "x"): 1.0}, 1.0, 1.0) for r in ratios]


def mark(required_ratio):
    return Mark("m", required_ratio, lambda r: r.ratio([("other", "x")], ("own", "x")))


def test_a_mark_is_met_by_the_median_with_one_worse_round_at_most():
    assert marks.read(mark(1.3), rounds_with([0.9, 1.3, 1.5, 1.4, 1.6])).met
    two_worse = marks.read(mark(1.3), rounds_with([0.9, 0.8, 1.5, 1.4, 1.6]))
    assert (two_worse.median, two_worse.worse, two_worse.met) == (1.4, 2, False)
    assert not marks.read(mark(1.3), rounds_with([1.2, 1.2, 1.2])).met


def test_a_mark_below_one_counts_rounds_that_miss_it():
    found = marks.read(mark(0.5), rounds_with([0.6, 0.7, 0.4]))
    assert (found.worse, found.met) == (1, True)
    assert not marks.read(mark(0.5), rounds_with([0.6, 0.45, 0.4, 0.7, 0.8])).met


def test_rounds_without_the_peer_do_not_count():
    rounds = [*rounds_with([2.0]), Round({("own", "x"): 1.0}, 1.0, 1.0)]
    assert marks.read(mark(1.0), rounds).rounds == 1
    assert marks.read(mark(1.0), rounds[1:]) is None


def test_the_fastest_of_the_others_counts():
    one = Round({("a", "x"): 3.0, ("b", "x"): 2.0, ("own", "x"): 1.0}, 1.0, 1.0)
    assert one.ratio([("a", "x"), ("b", "x"), ("c", "x")], ("own", "x")) == 2.0


def test_quantiles_lie_between_neighbours():
    assert marks.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert marks.quantile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert marks.quantile([5.0], 0.9) == 5.0


def test_the_limit_of_many_ranks_counts_what_each_reads_and_writes():
    assert marks.limit_gb_s(2.0, 4.0) == pytest.approx(1 / (0.5 / 2 + 0.5 / 4))
    # Of four parts one is reduced, four read and one written, and three are copied.
    assert marks.limit_gb_s(2.0, 4.0, 4) == pytest.approx(
        1 / (5 / 3 / 4 / 2 + 3 / 4 / 4)
    )


def test_the_report_says_how_much_faster_than_the_peers_memory_lets_anybody_be():
    case = f"allreduce/{64 * MIB}"
    limit_s = 64 * MIB * 1e-9 / marks.limit_gb_s(2.0, 4.0, 4)
    one = Round({("impi", case): 1.5 * limit_s, (required.CORE, case): 2.0}, 2.0, 4.0)
    found = required.marks("sizes", [case], 4)
    bound = next(m for m in found if m.title.endswith("limit (the most)"))
    assert (bound.required, bound.ratio(one)) == (2.0, pytest.approx(1.5))


def test_the_round_in_which_the_machine_was_another_is_discarded():
    controls = {0: [10.0, 10.1], 1: [10.0, 7.9], 2: [9.9, 12.1], 3: [10.2, 10.0]}
    assert marks.discarded(controls) == {1, 2}
    assert marks.discarded({}) == set()


def test_the_core_is_compared_with_what_the_memory_allows():
    times = {("tfdist-core", f"allreduce/{16 * MIB}"): 16 * MIB / 2e9}
    one = Round(times, add_gb_s=2.0, copy_gb_s=4.0)
    found = required.marks("sizes", [f"allreduce/{16 * MIB}"], 2)
    limit = next(m for m in found if m.title.endswith("limit of the memory"))
    assert limit.required == 0.65
    assert limit.ratio(one) == pytest.approx(2.0 / (8.0 / 3.0))


def test_small_messages_are_compared_above_their_floors():
    cases = ["allreduce/1024", "floor/1024"]
    times = {
        ("hvd-gloo", "allreduce/1024"): 1.3e-3,
        ("hvd-gloo", "floor/1024"): 0.3e-3,
        ("tfdist", "allreduce/1024"): 0.35e-3,
        ("tfdist", "floor/1024"): 0.25e-3,
    }
    above = next(m for m in required.marks("sizes", cases, 2) if "floor" in m.title)
    assert above.ratio(Round(times, 1.0, 1.0)) == pytest.approx(10.0)
    times["tfdist", "floor/1024"] = 0.4e-3  # noise: never better than a microsecond
    assert above.ratio(Round(times, 1.0, 1.0)) == pytest.approx(1000.0)


def test_a_list_of_gradients_pays_for_the_call_of_its_function_too():
    times = {("tfdist", "flat/4096"): 3.0, ("tfdist", "floor/4096"): 1.0}
    found = required.marks("gradients", ["flat/4096", "floor/4096"], 2)
    most = next(m for m in found if m.title.endswith("(the most)"))
    assert (most.required, most.ratio(Round(times, 1.0, 1.0))) == (1 / 1.3, 0.75)
    older = Round({("tfdist", "flat/4096"): 3.0}, 1.0, 1.0)
    assert most.ratio(older) is None


def test_of_a_list_that_is_made_what_the_reduction_adds_is_compared():
    times = {
        ("tfdist", "buckets, made/4096"): 5.0,
        ("tfdist", "buckets, made floor/4096"): 3.0,
        ("hvd-mpi", "grouped, made/4096"): 9.0,
        ("hvd-mpi", "grouped, made floor/4096"): 2.0,
        ("ompi5", "one by one, in place/4096"): 3.0,
    }
    found = required.marks("gradients", [case for _, case in times], 2)
    added = [m for m in found if "making of the list" in m.title]
    one = Round(times, 1.0, 1.0)
    assert [m.ratio(one) for m in added] == [pytest.approx(3.5), pytest.approx(1.5)]
    del times["tfdist", "buckets, made floor/4096"]
    assert [m.ratio(Round(times, 1.0, 1.0)) for m in added] == [None, None]


@pytest.mark.parametrize(
    ("size_bytes", "ranks", "wanted"),
    [(1024, 2, 0.5), (256 << 10, 2, 1.0), (4 * MIB, 2, 1.3), (16 * MIB, 4, 2.0)],
)
def test_what_is_required_of_the_core_depends_on_size_and_ranks(
    size_bytes, ranks, wanted
):
    found = required.marks("sizes", [f"allreduce/{size_bytes}"], ranks)
    core = [m for m in found if m.title.endswith("/ tfdist-core")]
    assert [m.required for m in core] == [wanted]


def test_training_is_compared_with_every_peer_and_with_ranks_alone():
    one = Round(
        {
            ("tfdist", "mlp/32"): 1.0,
            ("hvd-gloo", "mlp/32"): 1.5,
            ("torch-gloo", "mlp/32"): 1.2,
            ("alone", "mlp/32"): 0.9,
            ("in-step", "mlp/32"): 0.95,
        },
        1.0,
        1.0,
    )
    ratios = {m.title: m.ratio(one) for m in required.marks("training", ["mlp/32"], 2)}
    assert ratios["mlp: fastest peer / tfdist"] == 1.2
    assert ratios["mlp: alone / tfdist"] == 0.9
    assert ratios["mlp: alone / in-step (the most)"] == 0.9 / 0.95
    assert ratios["mlp: fastest peer / tfdist-fit"] is None


def test_sizes_are_read_and_written_alike():
    assert parsed_sizes("4,1K,16M") == [4, 1024, 16 * MIB]
    assert [size_text(n) for n in (4, 1024, 16 * MIB)] == ["4", "1K", "16M"]
    for wrong in ("", "1K,", "0", "3", "-4", "1T"):
        with pytest.raises(ValueError, match="multiples of 4"):
            parsed_sizes(wrong)


def test_times_have_three_digits():
    found = [milliseconds(s) for s in (7.88e-7, 0.000345, 0.0123456, 0.2865)]
    assert found == ["0.000788", "0.345", "12.3", "286"]


def row(peer, number, **more):
    return {
        **{"key": "k", "kind": "sizes", "np": 2, "round": number, "peer": peer},
        **{"tree": "t", "unix": 0},
        **more,
    }


def control(number, rate):
    described = {"cpu": "c", "cores": 2, "kernel": "k"}
    rates = {"add_gb_s": [rate, rate], "copy_gb_s": [2 * rate, 2 * rate]}
    return row("control", number, **described, **rates)


def test_a_report_leaves_discarded_rounds_out():
    rows = []
    for number, (rate, core_s) in enumerate([(4.0, 1e-3), (4.1, 3e-3), (1.0, 9.0)]):
        rows += [control(number, rate), control(number, rate)]
        for peer, seconds in (("tfdist-core", core_s), ("impi", 2e-3)):
            case = {"case": "allreduce/1048576", "median_s": seconds}
            rows.append(row(peer, number, versions={"v": "1"}, **case))
    rows.append(row("ompi5", 0, error="exit code 1\nno such thing"))
    text = report.text_of(rows)
    assert "3 rounds, 1 discarded (control more than 20 % off: 2)" in text
    assert "| tfdist-core | 2 |" in text  # ms, the median of two rounds
    ratios = "| 1M: fastest MPI / tfdist-core | 1 | 1.33 | 0.80-1.87 | 1 | 2 |"
    assert ratios in text
    assert "ompi5 failed in round 0:\n\n    exit code 1\n    no such thing" in text
    assert "| impi | v 1 |" in text
    every = report.text_of(rows, tolerance=10)
    assert "3 rounds, 0 discarded (control more than 1000 % off)" in every
    assert "| tfdist-core | 3 |" in every
    assert "| 3 | not judged (few rounds) |" in every
    assert "not judged" not in text


def test_a_report_has_the_latest_set_of_every_file():
    def measured(key, seconds):
        case = {"case": "allreduce/1048576", "median_s": seconds, "key": key}
        one = row("tfdist-core", 0, versions={"v": "1"}, **case)
        return [{**control(0, 4.0), "key": key}, {**control(0, 4.0), "key": key}, one]

    old_and_new = [*measured("old", 5e-3), *measured("new", 1e-3)]
    text = report.text_of(old_and_new, measured("other", 3e-3))
    assert text.count("## sizes, 2 ranks") == 2
    assert "| tfdist-core | 1 |" in text and "| tfdist-core | 3 |" in text
    assert "| tfdist-core | 5 |" not in text
