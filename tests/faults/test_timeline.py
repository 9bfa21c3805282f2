"""TFDIST_TIMELINE in whole jobs without TensorFlow: ends, kills, folders that fail."""

import json
import os
import re
import sys

import pytest
from helpers.deadline import deadline
from helpers.launcher import run

from tfdist.tools import timeline as tool

CLIENT = [sys.executable, "-m", "helpers.core_client"]


def events(folder):
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


@deadline(40)
def test_the_last_rank_to_leave_writes_the_trace_of_all(tmp_path):
    folder = tmp_path / "new" / "trace"
    done = run(
        tmp_path, "-np", "3", *CLIENT, "steps", "20", TFDIST_TIMELINE=str(folder)
    )
    assert done.code == 0, done.stderr
    found = events(folder)
    sums = [e for e in found if e["ph"] == "X" and e["name"] == "gradients"]
    assert sorted(e["pid"] for e in sums) == [0] * 20 + [1] * 20 + [2] * 20
    assert {e["pid"] for e in found if e["name"].startswith("receive from")} == {
        0,
        1,
        2,
    }
    names = {p.name for p in folder.iterdir()}
    assert names == {"trace.json", *(f"rank-{r}.jsonl" for r in range(3))}


# In `make test`: tests/cpp/timeline_test.cc.
@pytest.mark.slow
@deadline(40)
def test_ranks_with_folders_of_their_own_send_their_parts_to_rank_0(tmp_path):
    """As on hosts without a common file system: each has a place of its own."""
    for rank in range(3):
        (tmp_path / f"r{rank}").mkdir()
    program = f"cd r$TFDIST_RANK && exec {' '.join(CLIENT)} steps 300"
    done = run(tmp_path, "-np", "3", "sh", "-c", program, TFDIST_TIMELINE="t")
    assert done.code == 0, done.stderr
    sums = [e["pid"] for e in events(tmp_path / "r0" / "t") if e["name"] == "gradients"]
    assert {rank: sums.count(rank) for rank in range(3)} == {0: 300, 1: 300, 2: 300}
    left = [p.name for r in (1, 2) for p in (tmp_path / f"r{r}" / "t").iterdir()]
    assert left == ["rank-1.jsonl", "rank-2.jsonl"]


@deadline(40)
def test_nothing_arrives_before_it_was_sent(tmp_path):
    """By the aligned clocks, in both directions: so they agree."""
    done = run(tmp_path, "-np", "2", *CLIENT, "steps", "200", TFDIST_TIMELINE="t")
    assert done.code == 0, done.stderr
    slices = [e for e in events(tmp_path / "t") if e["ph"] == "X"]
    slices.sort(key=lambda e: e["ts"])

    def of(rank, name):
        return [e for e in slices if e["pid"] == rank and e["name"].startswith(name)]

    for rank in range(2):
        sent, received = of(1 - rank, "send"), of(rank, "receive from")
        assert len(sent) == len(received) == 200
        for one, other in zip(sent, received, strict=True):
            assert other["ts"] + other["dur"] >= one["ts"]
    ended = [[e["ts"] + e["dur"] for e in of(r, "gradients")] for r in range(2)]
    apart_us = [abs(a - b) for a, b in zip(ended[0], ended[1], strict=True)]
    assert min(apart_us) < 1000


@deadline(40)
def test_a_killed_rank_leaves_what_it_did(tmp_path, capsys):
    done = run(tmp_path, "-np", "3", *CLIENT, "kill", "1", TFDIST_TIMELINE="t")
    assert done.code != 0
    folder = tmp_path / "t"
    assert not (folder / "trace.json").exists()
    assert tool.main([str(folder)]) == 0
    assert "did not end normally, or still running: [1]" in capsys.readouterr().out
    assert {e["pid"] for e in events(folder)} == {0, 1, 2}
    failed = [e for e in events(folder) if e.get("args", {}).get("error") == 10]
    assert {e["pid"] for e in failed} == {0, 2}


@deadline(60)
@pytest.mark.parametrize(
    "bad",
    [
        {1},
        pytest.param({0}, marks=pytest.mark.slow),
        pytest.param({0, 1, 2}, marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_cannot_be_written_ends_init_on_every_rank(tmp_path, bad):
    for rank in range(3):
        own = tmp_path / f"r{rank}"
        own.mkdir()
        if rank in bad:
            (own / "trace").write_text("a file")
    program = f"cd r$TFDIST_RANK && exec {' '.join(CLIENT)} steps 5"
    done = run(tmp_path, "-np", "3", "sh", "-c", program, TFDIST_TIMELINE="trace")
    assert done.code != 0
    text = done.stdout + done.stderr
    assert "init took" not in text
    for rank in range(3):
        own = rank if rank in bad else "[012]"
        assert re.search(
            rf"\[rank {rank}\].*TFDIST_TIMELINE=trace: rank {own} \(\S+\) cannot write "
            r"its timeline: .*File exists.*; set the variable to a folder in which"
            rf"|\[rank {rank}\] \[tfdist\] this rank ends with CoreError because of",
            text,
        ), text


# In `make test` with another setting: test_launch_jobs.py.
@pytest.mark.slow
@deadline(40)
def test_ranks_that_do_not_agree_about_it_do_not_start(tmp_path):
    program = (
        'if [ "$TFDIST_RANK" = 1 ]; then unset TFDIST_TIMELINE; fi; '
        f"exec {' '.join(CLIENT)} steps 5"
    )
    done = run(tmp_path, "-np", "2", "sh", "-c", program, TFDIST_TIMELINE="t")
    assert done.code != 0
    assert "TFDIST_TIMELINE" in done.stderr + done.stdout
    assert not (tmp_path / "t" / "trace.json").exists()


@deadline(40)
def test_a_later_job_replaces_what_an_earlier_one_left(tmp_path):
    for size in (2, 1):
        done = run(
            tmp_path, "-np", str(size), *CLIENT, "again", "2", TFDIST_TIMELINE="t"
        )
        assert done.code == 0, done.stderr
    assert {e["pid"] for e in events(tmp_path / "t")} == {0}
    assert len(os.listdir(tmp_path / "t")) == 2


@deadline(40)
@pytest.mark.parametrize(
    ("more", "found"),
    [({}, 0), pytest.param({"TFDIST_TIMELINE": "t"}, 2, marks=pytest.mark.slow)],
    ids=["without", "with"],
)
def test_without_the_variable_there_is_no_file_and_no_thread(tmp_path, more, found):
    program = (
        "import os, pathlib\n"
        "from tfdist.core import world\n"
        "from helpers.core_client import steps\n"
        "world.start()\n"
        "steps(3)\n"
        "tasks = pathlib.Path('/proc/self/task').iterdir()\n"
        "names = sorted((t / 'comm').read_text().strip() for t in tasks)\n"
        "print('THREADS', [n for n in names if n.startswith('tfdist')])\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = run(tmp_path, "-np", "2", sys.executable, "program.py", **more)
    assert done.code == 0, done.stderr
    assert done.stdout.count("'tfdist-timeline'") == found, done.stdout
    assert (tmp_path / "t").exists() == bool(more)


# In `make test`: tests/cpp/timeline_test.cc.
@pytest.mark.slow
@deadline(60)
def test_the_parts_are_bounded(tmp_path):
    limit = 65536
    done = run(
        tmp_path,
        *("-np", "2", *CLIENT, "steps", "1500"),
        TFDIST_TIMELINE="t",
        TFDIST_TIMELINE_BYTES=str(limit),
    )
    assert done.code == 0, done.stderr
    for rank in range(2):
        own = [
            p for p in (tmp_path / "t").iterdir() if p.name.startswith(f"rank-{rank}")
        ]
        assert len(own) == 2
        assert limit / 3 < sum(p.stat().st_size for p in own) <= limit
    assert sum(e["name"] == "gradients" for e in events(tmp_path / "t")) > 50
