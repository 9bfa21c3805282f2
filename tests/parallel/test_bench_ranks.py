"""tfdist bench on two ranks: what it prints, and what it writes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import launcher

from tfdist.core import tuning
from tfdist.tools.bench.operations import OPERATIONS

BENCH = [sys.executable, "-m", "tfdist.tools", "bench"]
QUICK = ["--cap-s", "0.002", "--link-rate", "1"]


def bench(tmp_path, *words, **env):
    """Runs `tfdist bench` to its end."""
    return subprocess.run(
        [*BENCH, *QUICK, *words],
        cwd=tmp_path,
        env=launcher.clean_environment(TMPDIR=str(tmp_path), **env),
        capture_output=True,
        text=True,
        timeout=90,
    )


def rows(output):
    """The lines of the table, as rank 0 prints them."""
    lines = [line.removeprefix("[rank 0] ") for line in output.splitlines()]
    return [line.split() for line in lines if line and not line.startswith("#")]


def test_every_operation_is_timed_checked_and_written(tmp_path):
    done = bench(
        *(tmp_path, "-np", "2", "--operations", "all", "--dtypes", "float32,bfloat16"),
        *("--sizes", "4,6K", "--json", "all.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(done.stdout)
    assert len(table) == 2 * 2 * len(OPERATIONS)
    for size, count, dtype, algorithm, time_us, algbw, busbw, limit, wrong in table:
        assert int(size) == int(count) * (2 if dtype == "bfloat16" else 4)
        assert algorithm.startswith("auto:")
        assert float(time_us) > 0 and float(limit) >= 0 and wrong == "0"
        # microseconds with one digit after the point, GB/s with three
        rate = int(size) / float(time_us) / 1e3
        assert abs(float(algbw) - rate) <= 1e-3 + rate * 0.06 / float(time_us)
        assert float(busbw) <= float(algbw) + 1e-3
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["format"] == "tfdist bench" and written["hosts"] == [2]
    assert {row["operation"] for row in written["rows"]} == set(OPERATIONS)
    assert [row["size_bytes"] for row in written["rows"]] == [int(r[0]) for r in table]
    # Nothing is left behind.
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


def tuned(tmp_path):
    """A file of choices that has just been made."""
    done = bench(tmp_path, "-np", "2", "--sizes", "1K,16K", "--tune", "tuned.json")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {row[3] for row in rows(done.stdout)}
    assert {"ring", "pairwise", "butterfly", "tree"} <= names
    assert "torus" not in names  # needs four ranks
    assert re.search(r"# +within 1.25 of the best at every size; worst 1", done.stdout)
    path = tmp_path / "tuned.json"
    found = tuning.read(str(path))
    assert found.rules[0].hosts == (2,)
    return path, found


def test_choices_are_tuned_and_written(tmp_path):
    tuned(tmp_path)


@pytest.mark.slow  # other files of choices: test_tuning_ranks.py
def test_a_tuned_choice_is_taken_by_the_next_job(tmp_path):
    path, found = tuned(tmp_path)
    again = bench(
        *(tmp_path, "-np", "2", "--sizes", "1K,16K"), TFDIST_TUNING_FILE=str(path)
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"# tuning file in force: {found.hash}" in again.stdout
    taken = [row[3] for row in rows(again.stdout)]
    at = [
        next(rule.algorithm for rule in found.rules if size <= rule.up_to_bytes)
        for size in (1 << 10, 1 << 14)
    ]
    assert taken == [f"auto:{name}" for name in at]


@pytest.mark.slow
def test_where_nothing_can_be_measured_nothing_is_written(tmp_path):
    words = ("--algorithms", "torus", "--sizes", "1K", "--tune", "t", "--json", "j")
    done = bench(tmp_path, "-np", "2", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "nothing was measured or written" in done.stdout
    assert not (tmp_path / "t").exists() and not (tmp_path / "j").exists()


def test_an_interrupt_ends_all_ranks_without_a_traceback(tmp_path):
    words = ("-np", "2", "--sizes", "4,32M,64M", "--cap-s", "60", "--json", "all.json")
    with subprocess.Popen(
        [*BENCH, *words],
        cwd=tmp_path,
        env=launcher.clean_environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            for line in running.stdout:  # as Ctrl-C: to all processes of the terminal
                if rows(line):
                    os.killpg(running.pid, signal.SIGINT)
                    break
            said, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 128 + signal.SIGINT, said
    assert "ended by SIGINT" in said and "Traceback" not in said
    assert not (tmp_path / "all.json").exists()
