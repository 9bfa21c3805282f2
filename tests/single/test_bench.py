"""tfdist bench without ranks: options, exact inputs, the fit and the choice."""

import argparse
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.core import tuning
from tfdist.tools.bench import command, measure, options, picture, report, tune
from tfdist.tools.bench.limits import Limits
from tfdist.tools.bench.operations import DTYPES, OPERATIONS, Place, pattern
from tfdist.tools.cli import main


def test_sizes_are_ranges_or_lists():
    assert options.sizes("1K:4K") == [1024, 2048, 4096]
    assert options.sizes("100:2K:10") == [100, 1000]
    assert options.sizes("1M,3,2KiB") == [3, 2048, 1 << 20]
    for wrong in ("", "0", "1T", "4K:1K", "1:2:1", "1:2:3:4", "1:2:x", "-1", "32G"):
        with pytest.raises(argparse.ArgumentTypeError):
            options.sizes(wrong)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("size_bytes", [64, 1000, 1 << 20])
def test_memory_begins_where_tensors_do(name, size_bytes):
    operation, dtype, place = OPERATIONS["allreduce"], DTYPES[name], Place(0, 2)
    cell = measure.Cell(operation, dtype, size_bytes, place)
    for memory in (cell._input, cell._output):
        assert memory.ctypes.data % 64 == 0
        assert memory.nbytes == cell.size_bytes
    expected = dtype.array(operation.inputs(place, cell.count))
    assert cell._input.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--operations", "sum"], "expected all or some of allreduce"),
        (["--dtypes", "float8"], "expected all or some of float32"),
        (["-np", "1"], "expected a number of ranks from 2 to 4096"),
        (["--cap-s", "0"], "expected a number above 0"),
        (["--tune", "t", "--dtypes", "float32,int32"], "at most one half type"),
        (["--tune", "t", "--algorithms", "auto"], "got auto"),
    ],
)
def test_wrong_options_end_at_once(words, says, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(words)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--json", "no/f"], "--json: expected a file that can be written, got no/f: "),
        (["--json", "no/f"], "the folder no does not exist"),
        (["--json", "."], "got .: this is a folder; use the path of a file"),
        (["--tune", ""], "--tune: expected a file that can be written, got .: this is"),
        (["--picture", "a.png"], "--picture: expected a file that can be written, got"),
        (["--json", "/dev/null"], "got /dev/null: this is not a file"),
        (["--tune", "/proc/t.json"], "No such file or directory; use a path that"),
        (["--json", 255 * "x"], "File name too long; use a path that"),
        (["--json", "f", "--tune", "./f"], "--tune: expected a separate file, got"),
    ],
)
def test_files_are_tried_out_before_ranks_start(
    words, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "_start_ranks", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(picture, "is_possible", lambda: True)
    monkeypatch.setattr(picture, "kinds", lambda: ["png"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").mkdir()
    assert main(["bench", "-np", "2", *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_only_the_rank_that_writes_tries_files_out(monkeypatch, capsys):
    monkeypatch.setattr(command, "_refusal", lambda *_: "went on")
    monkeypatch.setenv("TFDIST_SIZE", "2")
    for rank, says in (("0", "the folder /no"), ("1", "went on")):
        monkeypatch.setenv("TFDIST_RANK", rank)
        assert main(["bench", "--json", "/no/f"]) == 2
        assert says in capsys.readouterr().err


def test_a_file_that_is_there_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "all.json"
    path.write_text("before")
    assert options.unwritable(options.parse(["--json", str(path)])) == ""
    assert path.read_text() == "before"
    with pytest.raises(TypeError):
        report.write(path, {"a": object()})
    assert path.read_text() == "before"
    report.write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_lone_process_is_told_how_to_start_ranks(monkeypatch, capsys):
    for name in ("TFDIST_RANK", "TFDIST_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench"]) == 2
    assert "tfdist bench -np 2" in capsys.readouterr().err


def test_an_algorithm_that_nothing_has_is_refused_before_ranks_start(capsys):
    words = ["-np", "2", "--operations", "reduce", "--algorithms"]
    assert main(["bench", *words, "star,ring"]) == 2
    assert (
        "--algorithms: expected some of all, auto, binomial, star; got 'ring'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("names", ["auto,star", "star,all"])
def test_auto_and_all_stand_alone(names, capsys):
    # At some of the sizes, auto would be counted under the name of its choice.
    with pytest.raises(SystemExit) as caught:
        main(["bench", "-np", "2", "--operations", "reduce", "--algorithms", names])
    assert caught.value.code == 2
    expected = f"expected auto, all or a list of names; got {names}"
    assert expected in capsys.readouterr().err


def test_the_command_lists_its_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "bench" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["no-such"])
    assert caught.value.code == 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sums_of_what_ranks_give_are_exact(dtype):
    for size in (2, 5, 256):
        numbers = [pattern(Place(0, size), rank) for rank in range(size)]
        total = np.sum(numbers, axis=0)
        assert total.max() <= 256
        assert len({bytes(dtype.array(n).tobytes()) for n in numbers}) > 1
        if dtype.name == "bfloat16":
            back = (dtype.array(total).astype(np.uint32) << 16).view(np.float32)
        else:
            back = dtype.array(total)
        assert np.array_equal(back.astype(np.int64), total)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)
def test_results_are_those_of_the_operation(operation):
    size = 3
    count = operation.round_count(200, size)
    places = [Place(rank, size) for rank in range(size)]
    given = [operation.inputs(place, count) for place in places]
    taken = [operation.result(place, count) for place in places]
    part = count // size
    match operation.name:
        case "allreduce":
            expected = [sum(given)] * size
        case "reduce":
            expected = [sum(given), None, None]
        case "reduce_scatter":
            expected = [sum(given)[r * part : (r + 1) * part] for r in range(size)]
        case "allgather":
            expected = [np.concatenate(given)] * size
        case "gather":
            expected = [np.concatenate(given), None, None]
        case "broadcast":
            expected = [given[0]] * size
        case "scatter":
            expected = [given[0][r * part : (r + 1) * part] for r in range(size)]
        case "alltoall":
            expected = [
                np.concatenate([x[r * part : (r + 1) * part] for x in given])
                for r in range(size)
            ]
    for got, want in zip(taken, expected, strict=True):
        assert (got is None) == (want is None)
        assert got is None or np.array_equal(got, want)


def test_the_limit_of_two_ranks_of_a_host_is_that_of_the_formula():
    limits = Limits(add=3e9, copy=5e9, line=None, hosts=(2,))
    algbw = 1 / (1 / (2 * 3e9) + 1 / (2 * 5e9))
    assert math.isclose(limits.bus("allreduce"), algbw)
    assert math.isclose(
        Limits(add=3e9, copy=5e9, line=None, hosts=(8,)).bus("allreduce"), algbw
    )
    # Two hosts of two: a host sends n / 2 twice, in n / line seconds; 3/2 n of busbw.
    between = Limits(add=3e9, copy=5e9, line=1e8, hosts=(2, 2))
    assert math.isclose(between.bus("allreduce"), 1.5e8)
    apart = Limits(add=3e9, copy=5e9, line=1e8, hosts=(1, 1, 1))
    for name in OPERATIONS:
        assert math.isclose(apart.bus(name), 1e8), name


def test_a_fit_gives_back_its_line_and_ignores_an_outlier():
    times = {n: 5e-6 + n * 2e-10 for n in (1024, 8192, 65536, 1 << 20, 1 << 24)}
    times[8192] *= 20
    line = tune.fit(times)
    assert math.isclose(line.alpha, 5e-6, rel_tol=1e-9)
    assert math.isclose(line.beta, 2e-10, rel_tol=1e-9)
    assert tune.fit({100: 2.0}).at(100) == pytest.approx(2.0)
    alone = tune.explain("allreduce", "float32", tune.choose({"tree": times}))
    assert "#   chosen: tree at every size" in alone


def test_the_border_lies_where_the_lines_cross():
    sizes = [1 << k for k in range(10, 25, 2)]
    times = {
        "quick": {n: 10e-6 + n * 4e-9 for n in sizes},
        "wide": {n: 100e-6 + n * 1e-9 for n in sizes},
    }
    choice = tune.choose(times)
    (border, first), last = choice.sizes
    assert abs(border - 30000) <= 1 and first == "quick"
    assert last == (None, "wide")
    assert choice.worst[0] == 1.0
    assert [choice.at(n) for n in (1, border, border + 1)] == ["quick", "quick", "wide"]


@settings(max_examples=100)
@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 1 << 40), min_size=1, max_size=12, unique=True),
    st.randoms(use_true_random=False),
)
def test_every_choice_is_within_the_mark_and_is_a_tuning_file(names, sizes, random):
    known = [f"allreduce/{i}" for i in range(names)]
    times = {
        str(i): {n: random.uniform(1e-6, 1e-3) * (1 + n / 1e6) for n in sizes}
        for i in range(names)
    }
    choice = tune.choose(times)
    assert choice.worst[0] <= 1.1**2 + 1e-9 < tune.GOOD
    for size, ratio in choice.ratios.items():
        best = min(found[size] for found in times.values())
        assert math.isclose(times[choice.at(size)][size], ratio * best)
    rows = [tune.row("allreduce", [2, 2], False, choice)]

    parsed = tuning.parse(json.dumps(tune.document(rows, {})), "t", known)
    assert [rule.algorithm for rule in parsed.rules] == [n for _, n in choice.sizes]


@pytest.mark.slow
def test_a_picture_shows_the_crossovers(tmp_path):
    pytest.importorskip("matplotlib")
    assert picture.is_possible()
    times = {"tree": {1: 1e-6, 1000: 9e-6}, "star": {1: 2e-6, 1000: 3e-6}}
    choices = {("allreduce", "float32"): tune.choose(times)}
    path = tmp_path / "times.svg"
    picture.draw(path, "4 ranks", {("allreduce", "float32"): times}, choices)
    assert path.read_text().startswith("<?xml")
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_of_an_unknown_kind_is_refused_at_once(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("times", "times.bmx"):
        with pytest.raises(SystemExit):
            options.parse(["--picture", str(tmp_path / name)])
        err = capsys.readouterr().err
        assert "expected a name that ends in one of" in err and ".svg" in err
    assert options.parse(["--picture", str(tmp_path / "times.PNG")]).picture


def test_without_matplotlib_a_picture_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options.parse(["--picture", "p.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
