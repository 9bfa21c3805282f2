"""One rank fails in the middle of a step of `fit`: everybody knows who, at once."""

import pathlib
import re
import sys
import uuid

import pytest
from helpers.deadline import deadline
from helpers.launcher import marked, run, until

PROGRAM = pathlib.Path(__file__).with_name("fit_program.py")
SAW = re.compile(r"\[rank (\d)\] SAW (\w+) (-?\d+) after ([0-9.]+) s")


@deadline(120)
@pytest.mark.parametrize(
    ("action", "code", "first"),
    [("kill", 137, "killed by SIGKILL"), ("raise", 1, "exit code 1")],
)
def test_the_others_and_the_launcher_name_the_rank(tmp_path, action, code, first):
    marker = f"mark-{uuid.uuid4().hex}"
    program = [sys.executable, str(PROGRAM), action, "1", str(tmp_path / "time")]
    done = run(
        tmp_path, "-np", "3", *program,
        timeout_s=100, MARK=marker, TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    assert done.code == code, done.stderr
    assert re.match(rf"rank 1 on \S+ failed first: {first}", done.report[0])
    seen = {int(found[0]): found[1:] for found in SAW.findall(done.stdout)}
    for rank in (0, 2):
        kind, who, seconds = seen[rank]
        assert (kind, who) == ("RankFailedError", "1"), done.stdout
        assert float(seconds) < 1.0
    if action == "raise":
        kind, _, seconds = seen[1]
        assert kind == "own"
        assert float(seconds) < 0.5
    assert "label 11 is not a digit" in done.stderr or action == "kill"
    for rank in (0, 2):
        refusal = re.search(rf"\[rank {rank}\] SAVE (.*)", done.stdout)
        assert refusal is not None
        assert "last good step is 2" in refusal[1]
        assert (tmp_path / f"good-{rank}.keras").read_text() == "saved before"
    until(lambda: marked(marker) == [], timeout_s=5)
