"""`tfdist timeline DIR`: merges the ranks' parts of a timeline."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.core.timeline import merging

HELP = "merge the files of TFDIST_TIMELINE into one trace"
_MAX_LISTED = 5  # skipped files and lines that are listed
_MAX_RANKS = 8  # ranks with a separate line


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes DIR/trace.json; returns the exit code.

    Args:
        arguments: command-line arguments; default: the arguments of this process.
    """
    parser = argparse.ArgumentParser(
        prog="tfdist timeline",
        description="Merges the files rank-N.jsonl of TFDIST_TIMELINE=DIR "
        "into DIR/trace.json, which https://ui.perfetto.dev opens. tfdist merges them "
        "automatically when all ranks end normally, if they run on one host or share "
        "the folder. "
        "Run this command after a crash, or for files copied from several hosts.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        found = "a file" if options.folder.exists() else "no such folder"
        sys.stderr.write(
            f"Expected the job's TFDIST_TIMELINE folder, got {options.folder}: "
            f"{found}.\n"
        )
        return 1
    try:
        summary = merging.merge(options.folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(report(summary))
    return 0


def report(summary: merging.Summary) -> str:
    """Returns a summary of a trace as lines of text."""
    lines = [f"{summary.path}: {len(summary.ranks)} of {summary.size} ranks"]
    missing = sorted(set(range(summary.size)) - set(summary.ranks))
    if missing:
        lines.append(f"no files of ranks {missing}: copy them here from their hosts")
    if summary.incomplete:
        lines.append(f"did not end normally, or still running: {summary.incomplete}")
    if summary.error_us is None:
        lines.append("clocks: not compared on all ranks; used without correction")
    else:
        lines.append(f"clocks: aligned within {summary.error_us / 1000:.3f} ms")
    if summary.dropped:
        lines.append(f"{summary.dropped} records were lost (buffer full)")
    if summary.left_out:
        lines.append(f"skipped: {len(summary.left_out)} files or lines of files")
        lines += [f"  {one}" for one in summary.left_out[:_MAX_LISTED]]
        more = len(summary.left_out) - _MAX_LISTED
        lines += [f"  and {more} more"] if more > 0 else []
    rank, cost_us = summary.slowest
    if rank is not None:
        lines.append(
            f"slowest: rank {rank}; the others waited {cost_us / 1000:.1f} ms for it"
        )
    return "\n".join([*lines, *_exposure(summary), *_waits(summary)]) + "\n"


def _exposure(summary: merging.Summary) -> list[str]:
    """Lists the exposed communication of the ranks with the most of it."""
    if not summary.exposed:
        return []
    ranks = sorted(summary.exposed, key=lambda r: -summary.exposed[r].mean_ms)
    shown = sorted(ranks[:_MAX_RANKS])
    left_out = len(ranks) - len(shown)
    lines = ["exposed communication per step, without the first step:"]
    for rank in shown:
        one = summary.exposed[rank]
        kind = "steps of fit" if one.of_fit else "reductions of gradients"
        lines.append(
            f"  rank {rank}: mean {one.mean_ms:.2f} ms, median {one.median_ms:.2f} ms, "
            f"{one.share:.1%} of {one.step_ms:.2f} ms ({one.steps} {kind})"
        )
    return [*lines, f"  {left_out} other ranks have less"] if left_out else lines


def _waits(summary: merging.Summary) -> list[str]:
    if not summary.waits:
        return []
    lines = ["longest waits, summed over all ranks and steps except the first:"]
    return lines + [
        f"  {wait.ms:.1f} ms for rank {wait.rank} in {wait.name}"
        for wait in summary.waits
    ]


if __name__ == "__main__":
    sys.exit(main())
