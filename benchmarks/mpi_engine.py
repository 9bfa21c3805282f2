"""Compares an allreduce of TFDIST_ENGINE=mpi with the native engine.

    python benchmarks/mpi_engine.py PREFIX [PREFIX ...] [--np 2] [--rounds 7]

PREFIX is the folder of an MPI, with bin/mpirun and bin/mpicc. Each round runs `tfdist
bench` on this host once for each way of carrying the data: TCP, TCP again as the
control, shared memory, and each MPI, with which no data go through tfdist's shared
memory. The ranks start under the mpirun of the first MPI, or of the MPI that carries
the data. Reported are the medians of the rounds' ratios to TCP, and their ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = "4K:64M:8"


@dataclass
class Way:
    """One way of carrying the data.

    Attributes:
        name: in the table.
        prefix: folder of the MPI whose mpirun starts the ranks.
        environ: variables of tfdist.
    """

    name: str
    prefix: Path
    environ: dict[str, str] = field(default_factory=dict)

    def times_us(self, ranks: int) -> dict[int, float]:
        """Runs the benchmark; returns the microseconds for each size in bytes."""
        mpirun = self.prefix / "bin" / "mpirun"
        words = [str(mpirun), "-np", str(ranks)]
        if (self.prefix / "bin" / "ompi_info").exists():
            words[1:1] = ["--oversubscribe", "--bind-to", "none"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **self.environ}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1"}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        with tempfile.TemporaryDirectory(prefix="tfdist-mpi-") as name:
            report = Path(name) / "report.json"
            words += [sys.executable, "-m", "tfdist.tools", "bench"]
            words += ["--sizes", SIZES, "--cap-s", "0.3", "--json", str(report)]
            done = subprocess.run(words, env=environ, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{self.name}: {done.stdout}{done.stderr}")
            rows = json.loads(report.read_text())["rows"]
        return {row["size_bytes"]: row["seconds"] * 1e6 for row in rows}


def compile_library(prefix: Path, folder: Path) -> str:
    """Compiles the library of the engine for one MPI; returns its path."""
    made = folder / f"{prefix.name}.so"
    words = [f"MPICC={prefix / 'bin' / 'mpicc'}", f"MPI_LIBRARY={made}"]
    subprocess.run(["make", "-s", "mpi", *words], cwd=ROOT, check=True)
    return str(made)


def main() -> int:
    """Runs the rounds, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prefixes", nargs="+", type=Path, metavar="PREFIX")
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    prefixes = [prefix.resolve() for prefix in options.prefixes]
    with tempfile.TemporaryDirectory(prefix="tfdist-mpi-") as name:
        tcp = {"TFDIST_TRANSPORT": "tcp"}
        ways = [
            Way("tcp", prefixes[0], tcp),
            Way("tcp again", prefixes[0], tcp),
            Way("shared memory", prefixes[0]),
        ]
        for prefix in prefixes:
            library = compile_library(prefix, Path(name))
            by = {"TFDIST_ENGINE": "mpi", "TFDIST_MPI_LIBRARY": library}
            ways.append(Way(f"mpi ({prefix.name})", prefix, {**tcp, **by}))
        rounds = []
        for number in range(options.rounds):
            rounds.append({way.name: way.times_us(options.np) for way in ways})
            print(f"round {number + 1} of {options.rounds} done", flush=True)
    for size in rounds[0]["tcp"]:
        tcp_us = statistics.median(found["tcp"][size] for found in rounds)
        print(f"{size:9} bytes: tcp {tcp_us:9.1f} us; time as a share of it:")
        for way in ways[1:]:
            ratios = [found[way.name][size] / found["tcp"][size] for found in rounds]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(f"    {way.name:16} {middle:5.2f} ({low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
