"""Reports measured rounds as Markdown: times, marks, versions and failures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import required
from benchmarks.peers.catalogue import GRADIENTS, SIZES, TRAINING
from benchmarks.peers.marks import (
    ENOUGH_ROUNDS,
    TOLERANCE,
    Cell,
    Mark,
    Round,
    Verdict,
    discarded,
    limit_gb_s,
    read,
)
from benchmarks.peers.rounds import CONTROL, NO_TIME
from benchmarks.peers.rounds import read as lines_of
from benchmarks.peers.text import milliseconds, size_text, table

ALONE = (*required.CONTROLS_OF_TRAINING.values(), required.IN_STEP)
Row = Mapping[str, Any]


def text(paths: Sequence[Path], tolerance: float = TOLERANCE) -> str:
    """The report of some files.

    Args:
        paths: files that `rounds` has written.
        tolerance: largest deviation of a control in a round that counts; 0.2: 20 %.

    Raises:
        ValueError: no file has a line.
    """
    files = [rows for path in paths if (rows := lines_of(path))]
    if not files:
        names = ", ".join(map(str, paths))
        raise ValueError(f"Expected measured rounds; got no line from {names}.")
    return text_of(*files, tolerance=tolerance)


def text_of(*files: Sequence[Row], tolerance: float = TOLERANCE) -> str:
    """The report of the lines of some files.

    Only the rounds with the latest key of each file, task and number of ranks count.
    """
    sets = [one for rows in files for one in latest(rows)]
    sets.sort(key=_place)
    shown = [row for rows in sets for row in rows]
    sections = [_section(rows, tolerance) for rows in sets]
    return "\n\n".join([*sections, _versions(shown)])


def latest(rows: Sequence[Row]) -> list[list[Row]]:
    keys = {(row["kind"], row["np"]): row["key"] for row in rows}
    return [[row for row in rows if row["key"] == key] for key in keys.values()]


def _place(rows: Sequence[Row]) -> tuple[int, int]:
    return (SIZES, GRADIENTS, TRAINING).index(rows[0]["kind"]), rows[0]["np"]


def _section(rows: Sequence[Row], tolerance: float) -> str:
    task, ranks = rows[0]["kind"], rows[0]["np"]
    controls = controls_of(rows)
    out: set[int] = set()
    for place in (0, 1):  # rates of one kind are compared with each other
        out |= discarded({n: pair[place] for n, pair in controls.items()}, tolerance)
    kept = {n: one for n, one in rounds_of(rows).items() if n not in out}
    control = next(row for row in rows if row["peer"] == CONTROL)
    names = ", ".join(map(str, sorted(out)))
    head = (
        f"## {task}, {ranks} ranks\n\n{control['cpu']}, {control['cores']} cores, "
        f"Linux {control['kernel']}; tree {control['tree']}"
        f"{_settings(control)}.\n"
        f"{len(kept) + len(out)} rounds, {len(out)} discarded (control more than "
        f"{100 * tolerance:g} % off{names and ': ' + names})."
    )
    if not kept:
        every = rounds_of(rows).values()
        return "\n\n".join(
            [head, "No round counts. The times of all rounds:"]
            + [_times(task, ranks, every), *_failures(rows)]
        )
    cases = {row["case"] for row in rows if "case" in row}
    found = [(m, read(m, kept.values())) for m in required.marks(task, cases, ranks)]
    parts = [
        head,
        _limit(kept.values(), ranks),
        _times(task, ranks, kept.values()),
        _costs(rows, out),
        _marks(found, tolerance <= TOLERANCE),
        *_failures(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _settings(row: Row) -> str:
    named = [f"{name}={value}" for name, value in row.get("settings", {}).items()]
    return f", with {' '.join(named)}" if named else ""


def controls_of(rows: Iterable[Row]) -> dict[int, tuple[list[float], list[float]]]:
    """Mean rates of the processes of each control, by round: additions, copies."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["peer"] == CONTROL:
            adds, copies = found.setdefault(row["round"], ([], []))
            adds.append(statistics.mean(row["add_gb_s"]))
            copies.append(statistics.mean(row["copy_gb_s"]))
    return found


def rounds_of(rows: Sequence[Row]) -> dict[int, Round]:
    """The rounds of one key."""
    times: dict[int, dict[Cell, float]] = {}
    for row in rows:
        if "case" in row:
            cases = times.setdefault(row["round"], {})
            cases[row["peer"], row["case"]] = row["median_s"]
    return {
        number: Round(times.get(number, {}), statistics.mean(a), statistics.mean(c))
        for number, (a, c) in controls_of(rows).items()
    }


def _limit(rounds: Iterable[Round], ranks: int) -> str:
    adds, copies, limits = [], [], []
    for one in rounds:
        adds.append(one.add_gb_s)
        copies.append(one.copy_gb_s)
        limits.append(limit_gb_s(one.add_gb_s, one.copy_gb_s, ranks))
    return (
        f"Memory, each process: d=a+b {statistics.median(adds):.2f} GB/s, memcpy "
        f"{statistics.median(copies):.2f} GB/s; limit of {ranks} ranks "
        f"{statistics.median(limits):.2f} GB/s."
    )


def medians_of(rounds: Iterable[Round]) -> dict[Cell, float]:
    """Of each peer and case the median of the rounds' medians, in seconds."""
    found: dict[Cell, list[float]] = {}
    for one in rounds:
        for cell, seconds in one.times.items():
            found.setdefault(cell, []).append(seconds)
    return {cell: statistics.median(all_s) for cell, all_s in found.items()}


def _times(task: str, ranks: int, rounds: Iterable[Round]) -> str:
    cells = medians_of(rounds)
    columns = sorted({case.rpartition("/")[2] for _, case in cells}, key=int)
    if task == TRAINING:
        return _rates(ranks, cells)
    lines: dict[Cell, dict[str, float]] = {}
    for (peer, case), seconds in cells.items():
        series, _, size = case.rpartition("/")
        lines.setdefault((peer, series), {})[size] = seconds
    rows = []
    for (peer, series), found in sorted(lines.items()):
        name = peer if series == "allreduce" else f"{peer}, {series}"
        texts = [milliseconds(found[c]) if c in found else "" for c in columns]
        rows.append([name, *texts])
    heads = [size_text(int(column)) for column in columns]
    if task == GRADIENTS:
        heads = [f"{int(column) / 1e6:.1f} MB in one step" for column in columns]
    return table(["ms", *heads], rows)


def _rates(ranks: int, cells: Mapping[Cell, float]) -> str:
    """Images a second of all ranks."""
    cases = sorted({case for _, case in cells})
    rows = []
    for peer in sorted({peer for peer, _ in cells}):
        found = [cells.get((peer, case)) for case in cases]
        rates = [
            f"{ranks * int(case.rpartition('/')[2]) / seconds:.0f}" if seconds else ""
            for case, seconds in zip(cases, found, strict=True)
        ]
        rows.append([peer, *rates])
    return table(["images/s", *(case.partition("/")[0] for case in cases)], rows)


def _costs(rows: Iterable[Row], out: set[int]) -> str:
    """Table of the cost of communication in a training step, where it is measured."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        if "exposed_s" in row and row["round"] not in out:
            found.setdefault((row["peer"], row["case"]), []).append(row)
    lines = [
        [
            f"{peer}, {case.partition('/')[0]}",
            *(
                milliseconds(statistics.median(one[name] for one in own))
                for name in ("median_s", "communication_cpu_s", "exposed_s")
            ),
        ]
        for (peer, case), own in sorted(found.items())
    ]
    head = ["ms of a step", "whole", "processor time of communication", "exposed"]
    return table(head, lines) if lines else ""


def _marks(found: Sequence[tuple[Mark, Verdict | None]], by_the_rule: bool) -> str:
    """Table of the marks, which are judged only with a tolerance up to TOLERANCE."""
    rows = []
    for mark, verdict in found:
        if verdict is None:
            rows.append([mark.title, f"{mark.required:g}", *[""] * 4, "not measured"])
            continue
        met = ("yes" if verdict.met else "no") if by_the_rule else "not judged"
        few = "" if verdict.rounds >= ENOUGH_ROUNDS else " (few rounds)"
        rows.append(
            [
                mark.title,
                f"{mark.required:g}",
                f"{verdict.median:.2f}",
                f"{verdict.low:.2f}-{verdict.high:.2f}",
                str(verdict.worse),
                str(verdict.rounds),
                met + few,
            ]
        )
    head = ["mark", "required", "median", "p10-p90", "worse", "rounds", "met"]
    return table(head, rows)


def _failures(rows: Sequence[Row]) -> list[str]:
    torn = [
        f"{row['peer']}, {row['case']}: the ranks' weights differ at the end of round "
        f"{row['round']}."
        for row in rows
        if not row.get("same_weights", True) and row["peer"] not in ALONE
    ]
    late = sorted({row["peer"] for row in rows if row.get("error") == NO_TIME})
    if late:
        torn.append(f"No time was left for {', '.join(late)}.")
    return torn + [
        f"{row['peer']} failed in round {row['round']}:\n\n"
        + "\n".join(f"    {line}" for line in row["error"].splitlines())
        for row in rows
        if row.get("error", NO_TIME) != NO_TIME
    ]


def _versions(rows: Iterable[Row]) -> str:
    found = {
        row["peer"]: ", ".join(f"{k} {v}" for k, v in row["versions"].items())
        for row in rows
        if "versions" in row
    }
    return table(["peer", "versions"], [list(pair) for pair in sorted(found.items())])
