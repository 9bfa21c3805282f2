"""Reads and writes the files in the folder of an elastic job."""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers.json_lines import lines
from helpers.launcher import Run, finish


def latest_size(file: Path) -> int:
    """The number of ranks in the latest line; 0 if there is none."""
    rows = lines(file)
    return int(rows[-1]["size"]) if rows else 0


def has_joined(folder: Path, member: int) -> bool:
    """Whether a member has taken part in a step."""
    return any(row["member"] == member for row in lines(folder / "commits"))


def finish_at(folder: Path, process: subprocess.Popen[str], done: int) -> Run:
    """Lets all ranks stop after so many steps, or epochs.

    With a file FOLDER/slow, the ranks do not get there before the test has said so.
    """
    new = folder / "stop.new"
    new.write_text(str(done))
    new.rename(folder / "stop")
    found = finish(process, 60.0)
    assert found.code == 0, found.stdout + found.stderr
    return found
