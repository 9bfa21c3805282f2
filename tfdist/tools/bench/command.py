"""`tfdist bench`: starts the ranks, or runs as one of the ranks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence

from tfdist.core import native, world
from tfdist.core.rendezvous.environment import detect
from tfdist.launch import cli as tfdistrun
from tfdist.tools.bench import options as bench_options
from tfdist.tools.bench.sweep import Sweep, unknown

HELP = "time and check the collectives of a job, and tune the algorithms"
_USAGE_ERROR = 2
_INTERRUPTED = 128 + signal.SIGINT


def _complain(message: str) -> int:
    print(f"tfdist bench: {message}", file=sys.stderr)
    return _USAGE_ERROR


def _start_ranks(size: int, words: Sequence[str]) -> int:
    """Runs the same command on `size` ranks of this host."""
    program = [sys.executable, "-m", "tfdist.tools", "bench", *words]
    if os.environ.get("TFDIST_LOG_DIR"):
        return tfdistrun.main(["-np", str(size), "--", *program])
    folder = tempfile.mkdtemp(prefix="tfdist-bench-")
    code = tfdistrun.main(["-np", str(size), "--log-dir", folder, "--", *program])
    if code == 0:  # otherwise the files show the error
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _refusal(options: Namespace, size: int) -> str:
    """Returns why this process cannot measure as a rank; "" if it can."""
    if size < 2:
        return (
            "expected a job of at least 2 ranks; run `tfdist bench -np 2` or "
            "`tfdistrun -np 2 tfdist bench`"
        )
    if options.size not in (None, size):
        return (
            f"-np {options.size} was given on a rank of a job of {size} ranks; omit it"
        )
    return ""


def main(words: Sequence[str]) -> int:
    """Runs `tfdist bench`; returns its exit code."""
    options = bench_options.parse(list(words))
    try:
        if why := unknown(options.operations, options.algorithms):
            return _complain(why)
        placement = detect(os.environ)
        if placement.rank == 0 and (why := bench_options.unwritable(options)):
            return _complain(why)
        if placement.size == 1 and options.size is not None:
            return _start_ranks(options.size, words)
        if why := _refusal(options, placement.size):
            return _complain(why)
        world.start()
        try:
            return Sweep(options).run()
        finally:
            world.shutdown()
    except KeyboardInterrupt:  # tfdistrun reports it
        return _INTERRUPTED
    except native.CoreError as error:
        return _complain(error.message)
    except OSError as error:  # e.g. the disk is full
        return _complain(str(error))
